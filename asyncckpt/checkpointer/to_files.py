"""Writing what a checkpoint of any format holds as safetensors files."""

from __future__ import annotations

import uuid

from asyncckpt.checkpointer.capture import Capture
from asyncckpt.checkpointer.destination import Target, is_banded
from asyncckpt.checkpointer.layout import options_of_leaf, stored_spec
from asyncckpt.checkpointer.origin import Origin
from asyncckpt.checkpointer.safetensors_out import FilesWriter
from asyncckpt.checkpointer.safetensors_plan import FilesPlan, plan_files
from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.flow.shield import to_completion
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import ExportingStore, Sizes, Source
from asyncckpt.reports import ConvertReport, Progress
from asyncckpt.spec import ArraySpec


async def write_files(target: Target, origin: Origin, taken: Capture) -> ConvertReport:
    """The tree stands in safetensors files at the target, whole and durable.

    Cancellation: waits for reads and writes that are running, then removes what was written.

    Raises:
        UsageError: the format cannot hold a leaf; names it. Nothing was written.
        CorruptCheckpointError: names leaf, file and offset; nothing is left.
        StoreError: writing failed; nothing is left.
    """
    destination, runtime, reader = target.destination, target.runtime, origin.reader
    store = target.store
    if not isinstance(store, ExportingStore):
        raise UsageError(
            f"{destination.location}: this store takes checkpoints only, no safetensors files; "
            "convert to a path or URL"
        )
    plan = await runtime.engine.compute.run(_plan, target, origin, taken)
    reader.in_order([taken.array_leaf[tensor.number] for tensor in plan.tensors])
    total = sum(plan.file_nbytes)
    done = 0
    wanted = target.options.concurrency
    concurrency = store.sizes(
        total,
        budget_nbytes=runtime.budget_nbytes,
        concurrency=None if wanted == "auto" else wanted,
    ).concurrency
    # Files are cut into windows of a slot, so that each of them can also be a part of an upload.
    pool = runtime.window_pool(store.capabilities, Sizes(total, SLOT_NBYTES, concurrency))
    single = destination.max_file_nbytes is None
    attempt = await store.begin_export(
        target.name,
        uuid.uuid4().hex,
        overwrite=destination.overwrite,
        private=target.options.private,
    )

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if target.progress is not None:
            target.progress(Progress("convert", min(done, total), total))

    writer = FilesWriter(
        plan,
        taken,
        lambda number: reader.parts(taken.array_leaf[number]),
        attempt,
        pool,
        runtime.engine.compute,
        concurrency=concurrency,
        positional=store.capabilities.positional_writes,
        written=written,
    )
    try:
        await writer.run()
    except BaseException as error:
        try:
            await to_completion(attempt.abort())
        except AsyncCheckpointError as failure:
            error.add_note(f"cleaning up failed too: {failure}")
        raise
    await to_completion(attempt.publish_files(plan.names[0] if single else ""))
    index = 0 if plan.index is None else len(plan.index[1])
    return target.report(
        origin,
        location=attempt.location,
        step=None,
        leaf_count=len(taken.paths),
        array_count=len(plan.tensors),
        nbytes=sum(tensor.spec.nbytes for tensor in plan.tensors),
        stored_nbytes=total + index,
        file_count=len(plan.names) + bool(index),
    )


def _plan(target: Target, origin: Origin, taken: Capture) -> FilesPlan:
    specs: list[ArraySpec] = []
    banded: list[bool] = []
    for number, leaf in enumerate(taken.array_leaf):
        source = taken.sources[number]
        # Stores without writes at places of a file get it in order, however often chunks are read.
        scattered = target.store.capabilities.positional_writes
        banded.append(scattered and is_banded(origin.reader, leaf, source.spec))
        first = taken.tied.get(number)
        specs.append(_stored(target, taken.paths[leaf], source) if first is None else specs[first])
    return plan_files(
        taken,
        specs,
        metadata={**origin.opened.metadata, **target.metadata},
        metrics=origin.opened.metrics,
        max_file_nbytes=target.destination.max_file_nbytes,
        tiled=banded,
        name=target.name,
    )


def _stored(target: Target, path: str, source: Source) -> ArraySpec:
    """The array in the dtype that the user's options ask for."""
    own = options_of_leaf(target.options, path, source.spec)
    return source.spec if own is None else stored_spec(path, source, own)
