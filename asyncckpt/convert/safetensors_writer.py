"""Writing of safetensors files, in concurrent windows of one slot each.

::

    read box by box ──► window in a slot ──► write ──► seal ──► rename
"""

# Rule 1: each stream takes a slot for one window at a time, in file order.
# Rule 2: tiled tensors are written after all windows of their file: the two may share pages.

from __future__ import annotations

import asyncio
import math
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TypeVar, cast

import numpy as np

from asyncckpt.checkpoint.payload import ArrayReader, gather
from asyncckpt.convert.destination import Facts, Target
from asyncckpt.convert.reader import LeafReader
from asyncckpt.convert.safetensors_plan import FilesPlan, Tensor, plan_files
from asyncckpt.convert.tiles import tiles
from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.shield import cleaned_up, raise_leading, to_completion, together
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.planning.pack import Window
from asyncckpt.ports import Bytes, DataFile, Export, ExportingStore, ScatteredFile, Sizes
from asyncckpt.reports import Progress
from asyncckpt.save.snapshot import Snapshot
from asyncckpt.spec import DTYPES, Box, ChunkGrid

T = TypeVar("T")


async def write_files(target: Target, reader: LeafReader, snapshot: Snapshot) -> Facts:
    """Write the tree as safetensors files at the target, durably; like `write_checkpoint`.

    Cancellation: waits for running reads and writes, then removes what was written.

    Raises:
        UsageError: the format cannot hold a leaf; names it. Nothing was written.
        CorruptCheckpointError: names leaf, file and offset. Nothing remains.
        StoreError: writing failed. Nothing remains.
    """
    runtime, store = target.runtime, target.store
    plan = await runtime.engine.compute.run(plan_files, target, reader, snapshot)
    reader.in_order([snapshot.array_leaf[tensor.number] for tensor in plan.tensors])
    total = sum(plan.file_nbytes)
    wanted = target.options.concurrency
    concurrency = store.sizes(
        total,
        budget_nbytes=runtime.budget.capacity,
        concurrency=None if wanted == "auto" else wanted,
    ).concurrency
    # A window is one slot long, so that it can also be one part of an upload.
    pool = runtime.window_pool(store.capabilities, Sizes(total, SLOT_NBYTES, concurrency))
    # A destination is a path or URL (`format_of`), whose store can export.
    attempt = await cast(ExportingStore, store).begin_export(
        target.name, uuid.uuid4().hex, overwrite=target.overwrite, private=target.options.private
    )

    writer = FilesWriter(target, reader, snapshot, plan, attempt, pool, concurrency)
    try:
        await writer.run()
    except BaseException as error:
        await cleaned_up(to_completion(attempt.abort()), error)
        raise
    await to_completion(attempt.publish_files("" if target.max_file_nbytes else plan.names[0]))
    index = 0 if plan.index is None else len(plan.index[1])
    return Facts(
        location=attempt.location,
        step=None,
        leaf_count=len(snapshot.paths),
        array_count=len(plan.tensors),
        nbytes=sum(tensor.spec.nbytes for tensor in plan.tensors),
        stored_nbytes=total + index,
        file_count=len(plan.names) + bool(index),
    )


@dataclass(eq=False, repr=False)
class FilesWriter:
    """Writer of the planned files of an attempt, window by window in slots of `pool`.

    If the store has no positional writes, each window is one part of an upload.
    """

    target: Target
    reader: LeafReader
    snapshot: Snapshot
    plan: FilesPlan
    attempt: Export
    pool: SlotPool
    concurrency: int
    done_nbytes: int = 0

    async def run(self) -> None:
        """Write every file, whole and durable. Cancellation, errors: as `write_files`."""
        plan = self.plan
        windows = {file: list(own) for file, own in groupby(plan.windows, attrgetter("file"))}
        try:
            async with asyncio.TaskGroup() as sealing:
                for number, name in enumerate(plan.names):
                    file = await self.attempt.create(
                        name, nbytes=plan.file_nbytes[number], window_nbytes=self.pool.slot_nbytes
                    )
                    await self._each(partial(self._window, file), windows[number])
                    await self._each(partial(self._tile, file), self._tiles(number))
                    sealing.create_task(file.seal(plan.file_nbytes[number]))
        except BaseExceptionGroup as errors:
            raise_leading(errors)
        if plan.index is not None:
            await self.attempt.put(*plan.index)

    async def _each(self, write: Callable[[Slot, T], Awaitable[bool]], items: Iterable[T]) -> None:
        """Write all items, each in a slot; `write` returns whether the slot may be reused."""
        waiting = iter(items)

        async def stream() -> None:
            for item in waiting:
                slots = await self.pool.take(1, grow=False)
                reusable = self.target.store.capabilities.positional_writes
                try:
                    reusable |= await write(slots[0], item)
                finally:
                    if reusable:
                        self.pool.release(slots, sys.exception())
                    else:  # a request may still be sending it
                        self.pool.discard(slots)

        await together(stream() for _ in range(self.concurrency))

    def _tiles(self, file: int) -> Iterator[tuple[Tensor, Box]]:
        for tensor in self.plan.tensors:
            if tensor.file != file or not tensor.tiled:
                continue
            # The dtype that is read may be wider than the stored one.
            itemsize = max(tensor.spec.itemsize, self.snapshot.sources[tensor.number].spec.itemsize)
            parts = self.reader.parts(self.snapshot.array_leaf[tensor.number])
            for box in tiles(parts, itemsize, self.pool.slot_nbytes):
                yield tensor, box

    def _written(self, nbytes: int) -> None:
        self.done_nbytes += nbytes
        if self.target.progress is not None:
            total = sum(self.plan.file_nbytes)
            self.target.progress(Progress("convert", min(self.done_nbytes, total), total))

    async def _window(self, file: DataFile, slot: Slot, window: Window) -> bool:
        await self.target.runtime.engine.compute.run(
            self._fill, window, slot.buffer[: window.nbytes]
        )
        # The client keeps the body while it sends it: no other view of the slot may exist now.
        reusable = await file.write(window.offset, slot.body(window.nbytes))
        self._written(window.nbytes)
        return reusable

    async def _tile(self, file: DataFile, slot: Slot, tile: tuple[Tensor, Box]) -> bool:
        tensor, box = tile
        dtype = DTYPES[tensor.spec.dtype]
        data = slot.buffer[: box.size * dtype.itemsize]
        await self.target.runtime.engine.compute.run(
            self._reader(tensor).read, box, data.view(dtype).reshape(box.shape)
        )
        offsets, runs = _runs(tensor, box, data)
        await cast(ScatteredFile, file).write_runs(offsets, runs)
        self._written(data.nbytes)
        return True

    # -- in worker threads

    def _fill(self, window: Window, data: Bytes) -> None:
        end = 0
        for piece in window.pieces:
            data[end : piece.position] = 0
            end = piece.position + piece.stop - piece.start
            out = data[piece.position : end]
            if piece.array < 0:
                header = self.plan.headers[-1 - piece.array]
                out[:] = np.frombuffer(header, np.uint8)[piece.start : piece.stop]
                continue
            tensor = self.plan.tensors[piece.array]
            # Same bytes as the payload of one chunk that holds the whole tensor.
            grid = ChunkGrid(tensor.spec.shape, tensor.spec.shape)
            cell = (0,) * len(grid.shape)
            read = self._reader(tensor).read
            gather(read, tensor.spec, grid, cell, piece.start, piece.stop, out, offset=cell)
        data[end:] = 0

    def _reader(self, tensor: Tensor) -> ArrayReader:
        snapshot, number = self.snapshot, tensor.number
        path = snapshot.paths[snapshot.array_leaf[number]]
        return ArrayReader(snapshot.sources[number], tensor.spec.dtype, path=path)


def _runs(tensor: Tensor, box: Box, data: Bytes) -> tuple[list[int], list[Bytes]]:
    """Return the file offset and the bytes of every run of a box."""
    shape = tensor.spec.shape
    # Trailing axes along which the box spans the tensor form one run.
    inner = len(shape)
    while inner > 1 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = box.shape[: inner - 1]
    strides = [tensor.spec.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start = tensor.offset + sum(o * s for o, s in zip(box.offset, strides, strict=True))
    offsets = np.full((), start, np.int64)
    for length, stride in zip(outer, strides[: inner - 1], strict=True):
        offsets = offsets[..., None] + np.arange(length) * stride
    return offsets.reshape(-1).tolist(), list(data.reshape(math.prod(outer), -1))
