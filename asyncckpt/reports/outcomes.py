"""Reports of finished saves, restores and conversions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.pickled import PickledByName
from asyncckpt.reports.texts import counted, nbytes_text, rate_text
from asyncckpt.reports.timed import Timed
from asyncckpt.reports.timeline import Timeline


@dataclass(frozen=True, slots=True)
class ProcessPart(PickledByName):
    """One process's part in a save by several processes.

    Attributes:
        process: its number.
        host: name of its host.
        written_nbytes: bytes of the data files that it wrote.
        file_count: number of these files.
        blocked_s: seconds from its call until its state could be mutated again.
        written_s: seconds from its call until its files were durable.
    """

    process: int
    host: str
    written_nbytes: int
    file_count: int
    blocked_s: float
    written_s: float

    def __str__(self) -> str:
        return (
            f"process {self.process} ({self.host}): {nbytes_text(self.written_nbytes)} in "
            f"{self.written_s:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class SaveReport(Timed):
    """A committed checkpoint.

    Attributes:
        location: path or URL of the checkpoint.
        step: its step, None for one-shot saves.
        save_id: identity of the save, as in its record.
        leaf_count: leaves in the tree, scalars included.
        array_count: arrays stored; tied leaves count once, leaves in pieces once per piece.
        nbytes: bytes of array data, before compression and without padding.
        stored_nbytes: bytes of all files.
        file_count: files of the checkpoint.
        blocked_s: seconds until the state could be mutated again, as in `start_save`.
        total_s: seconds from the call to the durable commit; retention, which follows, is the span
            `retain` of the timeline.
        plan_cached: whether the plan of an earlier save was reused.
        plan_cache_hits: saves of this `Checkpointer` so far, this one included, that reused a plan.
        plan_cache_misses: saves that needed a new plan, because paths, shapes, dtypes, shardings or
            options had changed.
        referenced_nbytes: bytes held by reference instead of copied (`snapshot="reference"`).
        peak_staged_nbytes: peak use of the byte budget.
        deleted_steps: steps that retention deleted after the commit.
        orbax: whether Orbax can restore this checkpoint.
        skipped: nothing was saved, because another save was in flight (`on_overlap="skip"`).
        preempted: a process got SIGTERM; all processes report it from this step on
            (`preemption=True`).
        notes: notes for the user.
        processes: part of each of several processes; only process 0 knows the parts of the others.
        timeline: when the stages were busy.
    """

    location: str
    step: int | None
    save_id: str = ""
    leaf_count: int = 0
    array_count: int = 0
    nbytes: int = 0
    stored_nbytes: int = 0
    file_count: int = 0
    blocked_s: float = 0.0
    total_s: float = 0.0
    plan_cached: bool = False
    plan_cache_hits: int = 0
    plan_cache_misses: int = 0
    referenced_nbytes: int = 0
    peak_staged_nbytes: int = 0
    deleted_steps: tuple[int, ...] = ()
    orbax: bool = True
    skipped: bool = False
    preempted: bool = False
    notes: tuple[str, ...] = ()
    processes: tuple[ProcessPart, ...] = ()
    timeline: Timeline = field(default_factory=Timeline, repr=False)

    @property
    def stage_s(self) -> Mapping[str, float]:
        """Seconds during which each stage of this process was busy; they overlap."""
        return {name: stage.busy_s for name, stage in self.timeline.stages().items()}

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped {self.location}: another save was in flight"
        return f"saved {self.location}: {_amount(self)}, blocked {self.blocked_s * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class ReadItem(PickledByName):
    """Reason for a read: the elements that a stored chunk and a wanted box have in common.

    Attributes:
        path: path of the leaf; of tied leaves, the first.
        offset: offset of the elements in the leaf.
        shape: shape of the elements.
        wanted_nbytes: bytes of the elements.
        chunk_offset: offset of the chunk in its file.
        chunk_nbytes: bytes of the chunk as stored, with its checksum.
    """

    path: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    wanted_nbytes: int
    chunk_offset: int
    chunk_nbytes: int

    def __str__(self) -> str:
        box = ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True))
        return f"{self.path}[{box}] {nbytes_text(self.wanted_nbytes)}"


@dataclass(frozen=True, slots=True)
class ReadRange(PickledByName):
    """One range of a file that a restore read.

    Attributes:
        file: path in the checkpoint.
        offset: first byte of the range.
        nbytes: length of the range: chunks, and gaps between them.
        items: reasons for the read; a chunk that several boxes want has several items. None of what
            processes that exchange bytes read for all of them.
    """

    file: str
    offset: int
    nbytes: int
    items: tuple[ReadItem, ...]

    @property
    def wanted_nbytes(self) -> int:
        """Bytes of the wanted elements."""
        return sum(item.wanted_nbytes for item in self.items)

    def __str__(self) -> str:
        purpose = "all processes that want it"
        if self.items:
            purpose = f"{nbytes_text(self.wanted_nbytes)}: {'; '.join(map(str, self.items))}"
        place = f"{self.file} {self.offset}:{self.offset + self.nbytes}"
        return f"{place}, {nbytes_text(self.nbytes)} for {purpose}"


@dataclass(frozen=True, slots=True)
class RestoreReport(Timed):
    """A finished restore.

    Attributes:
        location: path or URL of the checkpoint.
        step: its step, None for one-shot checkpoints.
        leaf_count: leaves restored.
        nbytes: bytes of array data restored.
        read_nbytes: bytes read from the store, gaps between chunks included.
        received_nbytes: bytes received by exchange between processes, including the pieces that
            this process read for all.
        total_s: seconds from the call to the return.
        replaced: paths of immutable leaves that `restore_into` replaced in their dict, list or
            dataclass.
        missing: paths that only the target has (`strict=False`), including objects with a state
            dict, and keys that a module's `load_state_dict` reports as missing.
        unexpected: paths that only the checkpoint has (`strict=False`), and keys that a module's
            `load_state_dict` reports as unexpected.
        unverified: paths whose bytes have no checksum (foreign checkpoints only).
        metadata: the user's metadata of the checkpoint.
        notes: notes for the user; each is also a `RestoreWarning`.
        strict: whether missing and unexpected leaves were errors.
        wanted: leaves that the target wants.
        matched: wanted leaves that the checkpoint has.
        reads: with `RestoreOptions(explain=True)`, every range read, with the reason, except chunks
            that are not stored, as in some foreign checkpoints.
        timeline: when the stages were busy.
    """

    location: str
    step: int | None
    leaf_count: int
    nbytes: int
    read_nbytes: int
    total_s: float
    received_nbytes: int = 0
    replaced: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()
    strict: bool = True
    wanted: int = 0
    matched: int = 0
    reads: tuple[ReadRange, ...] = field(default=(), repr=False)
    timeline: Timeline = field(default_factory=Timeline, repr=False)

    def __str__(self) -> str:
        found = ""
        if not self.strict:
            found = (
                f"{self.matched} of {self.wanted} leaves matched, {len(self.missing)} missing, "
                f"{len(self.unexpected)} unexpected: "
            )
        return f"{found}restored {self.location}: {_amount(self)}"


@dataclass(frozen=True, slots=True)
class ConvertReport(PickledByName):
    """A finished conversion.

    Attributes:
        source: path or URL of the checkpoint that was read.
        source_format: as `CheckpointInfo.format`.
        location: path or URL of the result.
        format: ``asyncckpt`` or ``safetensors``.
        step: step of the new checkpoint, None if it is not part of a run.
        leaf_count: leaves, scalars included.
        array_count: arrays written; tied leaves count once.
        nbytes: bytes of array data written, before compression.
        read_nbytes: bytes read from the source.
        stored_nbytes: bytes of all files written.
        file_count: files written.
        total_s: seconds taken.
        orbax: whether Orbax can restore the result.
        unverified: paths whose bytes have no checksum.
        notes: notes for the user.
    """

    source: str
    source_format: str
    location: str
    format: str
    step: int | None
    leaf_count: int
    array_count: int
    nbytes: int
    read_nbytes: int
    stored_nbytes: int
    file_count: int
    total_s: float
    orbax: bool = False
    unverified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"converted {self.source} ({self.source_format}) to {self.location} ({self.format}): "
            f"{_amount(self)}"
        )


def _amount(report: SaveReport | RestoreReport | ConvertReport) -> str:
    leaves = counted(report.leaf_count, "leaf", "leaves")
    rate = rate_text(report.nbytes, report.total_s)
    return f"{leaves}, {nbytes_text(report.nbytes)} in {report.total_s:.2f} s ({rate})"
