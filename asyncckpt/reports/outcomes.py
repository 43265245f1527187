"""What a finished save, restore, inspection or verification tells its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from asyncckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of work under way, handed to `progress=` callbacks and shown by `PendingSave`.

    Attributes:
        stage: the stage that moves at present: plan, stage, upload, commit; fetch, place; verify;
            convert; diff.
        done_nbytes: bytes that have passed the last stage.
        total_nbytes: bytes in all.
    """

    stage: str
    done_nbytes: int
    total_nbytes: int

    @property
    def fraction(self) -> float:
        """From 0.0 to 1.0."""
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 1.0

    def __str__(self) -> str:
        return f"{self.stage} {self.fraction:.0%} of {nbytes_text(self.total_nbytes)}"


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed checkpoint.

    Attributes:
        location: path or URL of the checkpoint.
        step: its step, None for one-shot saves.
        save_id: identity that its record carries.
        leaf_count: leaves in the tree, scalars included.
        array_count: arrays stored (tied leaves count once, leaves in pieces once per piece).
        nbytes: bytes of array data, before compression and without padding.
        stored_nbytes: bytes of all files.
        file_count: files of the checkpoint.
        blocked_s: seconds until the state might be mutated again (`start_save`'s part).
        total_s: seconds from the call to the durable commit.
        stage_s: seconds during which each stage was busy (they overlap).
        plan_cached: whether the plan of an earlier save was used again.
        plan_cache_hits: saves of this `Checkpointer` so far, this one included, that did so.
        plan_cache_misses: saves that made a new plan, because paths, shapes, dtypes, shardings or
            options had changed.
        referenced_nbytes: bytes held by reference instead of copied (`snapshot="reference"`).
        peak_staged_nbytes: largest amount of the byte budget in use at one time.
        deleted_steps: steps that retention removed after the commit.
        orbax: whether Orbax can restore this checkpoint.
        skipped: nothing was saved, because another save was in flight (`on_overlap="skip"`).
        notes: anything a person should know.
    """

    location: str
    step: int | None
    save_id: str
    leaf_count: int
    array_count: int
    nbytes: int
    stored_nbytes: int
    file_count: int
    blocked_s: float
    total_s: float
    stage_s: Mapping[str, float] = field(default_factory=dict)
    plan_cached: bool = False
    plan_cache_hits: int = 0
    plan_cache_misses: int = 0
    referenced_nbytes: int = 0
    peak_staged_nbytes: int = 0
    deleted_steps: tuple[int, ...] = ()
    orbax: bool = True
    skipped: bool = False
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped {self.location}: another save was in flight"
        return (
            f"saved {self.location}: {self.leaf_count} leaves, {nbytes_text(self.nbytes)} in "
            f"{self.total_s:.2f} s ({rate_text(self.nbytes, self.total_s)}), "
            f"blocked {self.blocked_s * 1e3:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """A finished restore.

    Attributes:
        location: path or URL of the checkpoint.
        step: its step, None for one-shot checkpoints.
        leaf_count: leaves restored.
        nbytes: bytes of array data restored.
        read_nbytes: bytes read from the store.
        total_s: seconds from the call to the return.
        changed: paths of immutable leaves of the target that differ from the checkpoint and could
            not be filled (`strict=False` only; an error otherwise).
        missing: paths that the target has and the checkpoint lacks (`strict=False` only); an object
            with a state dict by its own path, and the keys that a module's `load_state_dict` lacks.
        unexpected: paths that the checkpoint has and the target lacks (`strict=False` only), and
            the keys that a module's `load_state_dict` has no use for.
        unverified: paths whose bytes had no checksum to check (foreign checkpoints only).
        metadata: the user's metadata of the checkpoint.
        notes: anything a person should know; each is also a `RestoreWarning`.
    """

    location: str
    step: int | None
    leaf_count: int
    nbytes: int
    read_nbytes: int
    total_s: float
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"restored {self.location}: {self.leaf_count} leaves, {nbytes_text(self.nbytes)} in "
            f"{self.total_s:.2f} s ({rate_text(self.nbytes, self.total_s)})"
        )


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a checkpoint: path relative to it, size in bytes, CRC-32C where it is known."""

    path: str
    nbytes: int
    crc32c: int | None


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """One leaf of a checkpoint.

    Attributes:
        path: parts joined by ``/``, percent-escaped.
        kind: ``array``, or the Python type of a scalar (``int``, ``str``, …).
        framework: what saved an array: ``numpy``, ``jax`` or ``torch``; empty for scalars.
        shape: shape of an array, ``()`` for scalars.
        dtype: zarr v3 dtype name, empty for scalars.
        chunk_shape: elements per chunk and dimension.
        chunk_count: number of chunks.
        nbytes: bytes of array data.
        stored_nbytes: bytes in the files, padding and checksums included.
        compression: ``"zstd"`` or None.
        array: name of its array in the OCDBT database, None for scalars.
        value: value of a scalar, None for arrays.
        tied_to: path of the leaf whose bytes it shares, or None.
        location: path or URL of the OCDBT database that holds it; empty where there is none.
        pieces: of a leaf stored as several arrays, the offset, name and shape of each.
        driver: TensorStore's driver of its arrays: ``zarr3``, or ``zarr`` for zarr version 2.
    """

    path: str
    kind: str
    framework: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk_shape: tuple[int, ...] = ()
    chunk_count: int = 0
    nbytes: int = 0
    stored_nbytes: int = 0
    compression: str | None = None
    array: str | None = None
    value: Any = None
    tied_to: str | None = None
    location: str = ""
    pieces: tuple[tuple[tuple[int, ...], str, tuple[int, ...]], ...] = ()
    driver: str = "zarr3"

    def tensorstore_spec(self) -> dict[str, Any]:
        """A TensorStore spec that opens this leaf for slicing, with ``ts.open(spec)``.

        A leaf in pieces is opened as one array too: TensorStore stacks them.

        Raises:
            TypeError: the leaf is no array.
            UsageError: the checkpoint is no OCDBT database (safetensors, DCP, one directory per
                array), so that TensorStore cannot open it from here.
        """
        if self.array is None:
            raise TypeError(f"{self.path}: a {self.kind} has no array; its value is in .value")
        if not self.location:
            raise UsageError(
                f"{self.path}: this checkpoint is no OCDBT database, and there is no TensorStore "
                "spec for it; restore the leaf (include=), or convert the checkpoint first",
                path=self.path,
            )
        if not self.pieces:
            return self._array_spec(self.array)
        return {
            "driver": "stack",
            "dtype": self.dtype,
            "layers": [
                {
                    **self._array_spec(array),
                    "transform": {
                        "input_inclusive_min": list(offset),
                        "input_shape": list(shape),
                        "output": [
                            {"input_dimension": axis, "offset": -start}
                            for axis, start in enumerate(offset)
                        ],
                    },
                }
                for offset, array, shape in self.pieces
            ],
        }

    def _array_spec(self, array: str) -> dict[str, Any]:
        place = self.location if "://" in self.location else f"file://{quote(self.location)}"
        return {
            "driver": self.driver,
            "kvstore": {"driver": "ocdbt", "base": f"{place}/", "path": f"{array}/"},
        }


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint holds, from its metadata alone; `info[path]` is one leaf.

    Attributes:
        location: path or URL.
        step: step, None for one-shot checkpoints.
        save_id: identity of the save.
        created_ns: wall-clock time of the commit, nanoseconds since 1970.
        library: what wrote it.
        leaves: every leaf, in tree order.
        files: every file except the commit record.
        metadata: the user's metadata.
        metrics: metrics given to `save`.
        tree: nested containers of `LeafInfo`, as saved.
        format: ``asyncckpt``, or what else it is: ``orbax``, ``ocdbt``, ``safetensors``, ``dcp``.
    """

    location: str
    step: int | None
    save_id: str
    created_ns: int
    library: str
    leaves: tuple[LeafInfo, ...]
    files: tuple[FileInfo, ...]
    metadata: Mapping[str, Any]
    metrics: Mapping[str, float]
    tree: Any = None
    format: str = "asyncckpt"

    @property
    def nbytes(self) -> int:
        """Bytes of array data; tied leaves count once."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.tied_to is None)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def __getitem__(self, path: str) -> LeafInfo:
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(f"{self.location} has no leaf {path!r}")

    def __repr__(self) -> str:
        return (
            f"CheckpointInfo({self.location!r}, step={self.step}, {len(self.leaves)} leaves, "
            f"{nbytes_text(self.nbytes)})"
        )


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place: leaf (or None for metadata), file, byte offset (or None), reason."""

    leaf: str | None
    file: str
    offset: int | None
    reason: str

    def __str__(self) -> str:
        where = self.file if self.offset is None else f"{self.file} at byte {self.offset}"
        return f"{self.leaf or 'metadata'}: {where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome of reading and checking every byte of a checkpoint.

    Attributes:
        location: path or URL.
        step: step, None for one-shot checkpoints.
        damages: everything found damaged; empty when the checkpoint is whole.
        leaf_count: leaves checked.
        read_nbytes: bytes read.
        total_s: seconds taken.
        unverified: paths that were read and decoded, but whose bytes have no checksum (foreign
            checkpoints only).
    """

    location: str
    step: int | None
    damages: tuple[Damage, ...]
    leaf_count: int
    read_nbytes: int
    total_s: float
    unverified: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was saved, as far as checksums can tell."""
        return not self.damages

    @property
    def outcome(self) -> str:
        """What was found, on one line."""
        if self.damages:
            return f"damaged in {len(self.damages)} places"
        read = f"{self.leaf_count} leaves, {nbytes_text(self.read_nbytes)}"
        if not self.unverified:
            return f"{read} intact"
        return f"{read} readable, {len(self.unverified)} of them without checksums"

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{self.location}: {self.outcome}", *(f"  {damage}" for damage in self.damages)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """A finished conversion.

    Attributes:
        source: path or URL of the checkpoint that was read.
        source_format: as `CheckpointInfo.format`.
        location: path or URL of what was written.
        format: ``asyncckpt`` or ``safetensors``.
        step: step of the new checkpoint, None where it is none of a run.
        leaf_count: leaves, scalars included.
        array_count: arrays written (tied leaves count once).
        nbytes: bytes of array data written, before compression.
        read_nbytes: bytes read from the source.
        stored_nbytes: bytes of all files written.
        file_count: files written.
        total_s: seconds taken.
        orbax: whether Orbax can restore what was written.
        unverified: paths whose bytes had no checksum to check.
        notes: anything a person should know.
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
            f"{self.leaf_count} leaves, {nbytes_text(self.nbytes)} in {self.total_s:.2f} s "
            f"({rate_text(self.nbytes, self.total_s)})"
        )


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """One leaf that two checkpoints hold differently.

    Attributes:
        path: its path.
        what: ``kind`` (scalar or array, type of a scalar), ``shape``, ``dtype`` or ``value``; the
            first of these that differs.
        first: what the first checkpoint has: kind, shape, dtype, or value of a scalar.
        second: what the second one has.
        size: elements of the arrays, 0 where their shapes or kinds differ.
        count: elements that differ.
        nan_count: those of them that are NaN in one checkpoint only.
        largest: largest absolute difference of elements that are numbers in both.
        largest_relative: largest difference divided by the larger magnitude of the two.
        index: index of the element with the largest difference (or of one that is NaN).
    """

    path: str
    what: str
    first: str
    second: str
    size: int = 0
    count: int = 0
    nan_count: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.path or '(the tree itself)'}: {self.what}"
        if self.first != self.second:
            text += f" {self.first} and {self.second}"
        if self.count:
            text += (
                f", {self.count} of {self.size} elements differ, by up to {self.largest:.6g} at "
                f"{list(self.index)} (relative {self.largest_relative:.3g})"
            )
            if self.nan_count:
                text += f", {self.nan_count} are NaN in one of them"
        return text


@dataclass(frozen=True, slots=True)
class DiffReport:
    """How two checkpoints differ; true where they do not.

    Attributes:
        first: path or URL of the first checkpoint.
        second: path or URL of the second one.
        only_first: paths of leaves that only the first one has.
        only_second: paths of leaves that only the second one has.
        changed: leaves that differ, in the order of the first checkpoint.
        leaf_count: leaves that both have.
        nbytes: bytes of array data compared, of one side.
        total_s: seconds taken.
        notes: differences that are none of leaves: containers, frameworks, formats.
    """

    first: str
    second: str
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[LeafDifference, ...]
    leaf_count: int
    nbytes: int
    total_s: float
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both have the same leaves, of equal kind, shape, dtype and value."""
        return not (self.only_first or self.only_second or self.changed)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            return f"{self.first} and {self.second}: {self.leaf_count} leaves, all equal"
        lines = [f"{self.first} and {self.second} differ"]
        lines += [f"  only in the first: {path}" for path in self.only_first]
        lines += [f"  only in the second: {path}" for path in self.only_second]
        lines += [f"  {leaf}" for leaf in self.changed]
        return "\n".join(lines)


def nbytes_text(nbytes: float) -> str:
    """A size for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def rate_text(nbytes: float, seconds: float) -> str:
    """A rate for people: `2.1 GiB/s`."""
    return f"{nbytes_text(nbytes / seconds)}/s" if seconds > 0 else "-"
