"""One restore: open and match, then run the restore pipeline."""

# Rule: no payload is read, and no target touched, before all leaves have been matched.

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncckpt.arguments import progress_notes
from asyncckpt.checkpoint.open import open_any
from asyncckpt.errors import AsyncCheckpointError, CheckpointNotFoundError
from asyncckpt.flow.recorder import Recorder
from asyncckpt.ports import CheckpointFiles
from asyncckpt.reports import RestoreReport
from asyncckpt.restore.exchange.agreement import RestoreAgreement
from asyncckpt.restore.exchange.exchanger import Exchanger
from asyncckpt.restore.exchange.shared_metadata import SharedMetadataFiles
from asyncckpt.restore.match import match
from asyncckpt.restore.matched import Matching
from asyncckpt.restore.pipeline import RestorePipeline
from asyncckpt.restore.place import Placement
from asyncckpt.restore.request import Holder, RestoreRequest
from asyncckpt.runtime import Runtime
from asyncckpt.tree import Structure


@dataclass(frozen=True, slots=True, eq=False)
class RestoreOutcome:
    """Restored leaves that the caller's thread still needs.

    Attributes:
        structure: containers of the checkpoint.
        form: its format, as `OpenCheckpoint.format`.
        savers: number of processes that saved it.
        saved: leaves without a leaf of the target, and those of objects with a state dict, by
            ordinal of the saved leaf.
        wanted: leaves of a target that is not filled, by ordinal of the target's leaf.
        replaced: path, holder and new value of each immutable leaf.
        written: returns the paths of the targets whose own memory was filled.
    """

    request: RestoreRequest
    structure: Structure
    form: str
    savers: int
    saved: Mapping[int, Any]
    wanted: Mapping[int, Any]
    replaced: Sequence[tuple[str, Holder, Any]]
    written: Callable[[], Sequence[str]]
    report: RestoreReport


Written = list[Callable[[], Sequence[str]]]
"""Functions that return the paths of the targets that each restore of a call has written."""


@contextlib.contextmanager
def listing_written() -> Iterator[Written]:
    """Add to the error that ends the block the paths of the targets that it has written.

    The error may also be of the deadline, of another process, or of an object that lists them.
    """
    written: Written = []
    try:
        yield written
    except AsyncCheckpointError as error:
        if not error.written and (paths := dict.fromkeys(p for found in written for p in found())):
            error.written = tuple(paths)
            error.add_note(
                f"the contents of {len(paths)} targets are undefined now (error.written lists "
                "them); restore again, or use RestoreOptions(atomic=True)"
            )
        raise


async def run_restore(
    runtime: Runtime,
    files: CheckpointFiles,
    step: int | None,
    request: RestoreRequest,
    written: Written,
    agreement: RestoreAgreement | None = None,
) -> RestoreOutcome:
    """Restore and check every wanted leaf, into the memory or as the type requested.

    `step` is for the report; `agreement` is None if no other process restores the checkpoint. Adds
    to `written` if targets may have been written.

    Cancellation: waits until no thread writes to the targets; their contents are undefined.

    Raises:
        CheckpointNotFoundError: there is no valid checkpoint.
        UsageError: `include` matches nothing, or a part of an object's state; nothing was read.
        MismatchError: checkpoint and target do not fit; nothing was read.
        CorruptCheckpointError: names leaf, file and offset.
    """
    process = 0 if agreement is None else agreement.round.group.process_index
    recorder = Recorder(request.begun, process)
    compute = runtime.engine.compute
    exchanger = None
    metadata = files
    if agreement is not None and agreement.exchange is not None:
        exchanger = Exchanger(agreement, agreement.exchange, files, compute, request.options)
        metadata = SharedMetadataFiles(files, exchanger)
    opened = await open_any(metadata, compute)
    if metadata is not files:
        opened = dataclasses.replace(opened, files=files)  # the payload is exchanged by streams
    if request.save_id not in ("", opened.save_id):
        raise CheckpointNotFoundError(
            f"{opened.location}: the checkpoint was replaced while being loaded; load it again",
            location=opened.location,
            expected=request.save_id,
            found=opened.save_id,
        )
    recorder.add("open", recorder.begun)
    with recorder.span("match"):
        matching = await compute.run(match, opened, request)
        if agreement is not None:
            await agreement.matched(opened, matching, request.strict)
    # Not of the pipeline, which keeps the memory that was read into.
    filled = partial(Placement(opened, request).written, matching)
    pipeline = RestorePipeline(runtime, opened, matching, request, exchanger, recorder)
    try:
        await pipeline.read()
        if agreement is not None and request.options.atomic:
            await agreement.staged()
        await pipeline.finish()
    finally:
        if pipeline.wrote:
            written.append(filled)
    notes = pipeline.notes
    if not request.strict and 2 * matching.matched < matching.wanted:
        notes.append(
            f"only {matching.matched} of the {matching.wanted} leaves that the target wants are in "
            "the checkpoint; the report lists the others (missing, unexpected)"
        )
    report = RestoreReport(
        location=opened.location,
        step=step,
        leaf_count=len(pipeline.results),
        nbytes=pipeline.nbytes,
        read_nbytes=pipeline.read_nbytes,
        received_nbytes=pipeline.received_nbytes,
        total_s=time.perf_counter() - recorder.begun,
        missing=tuple(matching.missing),
        unexpected=tuple(matching.unexpected),
        unverified=tuple(pipeline.unverified),
        metadata=opened.metadata,
        notes=(*notes, *progress_notes(request.progress)),
        strict=request.strict,
        matched=matching.matched,
        wanted=matching.wanted,
        reads=pipeline.reads,
        timeline=recorder.timeline(),
    )
    saved, wanted, replaced = _results(matching, pipeline.results, request)
    return RestoreOutcome(
        request,
        matching.structure,
        opened.format,
        opened.record.writers if opened.record else 1,
        saved,
        wanted,
        replaced,
        filled if request.mode == "into" else list,
        report,
    )


def _results(
    matching: Matching, results: Sequence[Any], request: RestoreRequest
) -> tuple[dict[int, Any], dict[int, Any], list[tuple[str, Holder, Any]]]:
    """Return `RestoreOutcome.saved`, `wanted` and `replaced`."""
    arrays, scalars = matching.arrays, matching.scalars
    saved: dict[int, Any] = {}
    wanted: dict[int, Any] = {}
    if request.mode == "saved" or request.stateful:
        saved = dict(zip(arrays.saved, results, strict=False))
    if request.mode == "like":
        wanted = {arrays.number[place]: results[place] for place in arrays.ordinary()}
    replaced: list[tuple[str, Holder, Any]] = []
    for place, leaf in [*arrays.described.items(), *enumerate(scalars, len(arrays))]:
        if leaf.want is None or request.stateful:
            saved[leaf.saved] = results[place]
        if leaf.want is not None:
            if request.mode == "like":
                wanted[leaf.number] = results[place]
            elif leaf.want.holder is not None:
                replaced.append((leaf.path, leaf.want.holder, results[place]))
    return saved, wanted, replaced
