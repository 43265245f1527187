"""Writing safetensors files from a reader of leaves: windows of one slot, read and written at once.

::

    read box by box ──► window in a slot ──► write ──► seal ──► rename
"""

# Rule 1: a slot is taken before its task exists, in the order of the files: the budget bounds all.
# Rule 2: tensors that are written tile by tile come after all windows, which share their pages.

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np

from asyncckpt.checkpointer.capture import Capture
from asyncckpt.checkpointer.safetensors_plan import FilesPlan, Tensor
from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.shield import leading_error
from asyncckpt.flow.threads import Workers
from asyncckpt.planning.pack import Window
from asyncckpt.planning.tiles import Part, tiles
from asyncckpt.ports import Bytes, DataFile, Export, ScatteredFile
from asyncckpt.spec import DTYPES, Box, ChunkGrid
from asyncckpt.stages.payload import ArrayReader, gather


class FilesWriter:
    """Writes the planned files into an attempt.

    Args:
        plan: the files.
        taken: the arrays.
        parts: per array, the stored arrays that it is read from.
        attempt: what the files belong to.
        pool: slots; of another runtime than the reader's.
        compute: threads that read.
        concurrency: windows on their way.
        positional: whether files take writes at any place; each window is a part of one otherwise.
        written: called with the bytes of every piece of work that is done.
    """

    def __init__(
        self,
        plan: FilesPlan,
        taken: Capture,
        parts: Callable[[int], Sequence[Part]],
        attempt: Export,
        pool: SlotPool,
        compute: Workers,
        *,
        concurrency: int,
        positional: bool,
        written: Callable[[int], None],
    ) -> None:
        self._plan = plan
        self._taken = taken
        self._parts = parts
        self._attempt = attempt
        self._pool = pool
        self._compute = compute
        self._streams = asyncio.Semaphore(concurrency)
        self._positional = positional
        self._written = written
        self._readers: dict[int, ArrayReader] = {}
        self._dtypes = {tensor.number: tensor.spec.dtype for tensor in plan.tensors}

    async def run(self) -> None:
        """Every file is whole and durable.

        Cancellation: waits for reads and writes that are running.

        Raises:
            CorruptCheckpointError: reading a leaf failed; names it.
            StoreError: writing failed; names the file.
        """
        plan = self._plan
        windows = {file: list(own) for file, own in groupby(plan.windows, key=_file_of)}
        tiled = {
            file: [plan.tensors[row] for row in rows]
            for file, rows in groupby(plan.tiled, key=lambda row: plan.tensors[row].file)
        }
        try:
            async with asyncio.TaskGroup() as sealing:
                for number, name in enumerate(plan.names):
                    file = await self._attempt.create(
                        name,
                        nbytes=plan.file_nbytes[number],
                        window_nbytes=None if self._positional else self._pool.slot_nbytes,
                    )
                    await self._write(file, windows[number], tiled.get(number, ()))
                    sealing.create_task(file.seal(plan.file_nbytes[number]))
        except BaseExceptionGroup as errors:
            raise leading_error(errors) from None
        if plan.index is not None:
            await self._attempt.put(*plan.index)

    async def _write(
        self, file: DataFile, windows: Sequence[Window], tiled: Sequence[Tensor]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for window in windows:
                await self._start(group, self._window, file, window)
        async with asyncio.TaskGroup() as group:
            for tensor in tiled:
                for box in self._tiles(tensor):
                    await self._start(group, self._tile, file, tensor, box)

    def _tiles(self, tensor: Tensor) -> Any:
        # In the dtype that is read: a cast to a wider one may need several slots' worth of it.
        itemsize = max(tensor.spec.itemsize, self._taken.sources[tensor.number].spec.itemsize)
        return tiles(self._parts(tensor.number), itemsize, self._pool.slot_nbytes)

    async def _start(self, group: asyncio.TaskGroup, work: Any, *args: Any) -> None:
        await self._streams.acquire()
        try:
            slots = await self._pool.take(1, grow=False)
        except BaseException:
            self._streams.release()
            raise
        task = group.create_task(work(slots[0], *args))
        # A task that is cancelled before its first step never runs its `finally`.
        task.add_done_callback(partial(self._free, slots))

    def _free(self, slots: list[Slot], task: asyncio.Task[bool]) -> None:
        self._streams.release()
        error = None if task.cancelled() else task.exception()
        if self._positional or not (task.cancelled() or error or not task.result()):
            self._pool.give(slots, error)
        else:  # somebody may still be sending what is in it
            self._pool.discard(slots)

    async def _window(self, slot: Slot, file: DataFile, window: Window) -> bool:
        data = slot.buffer[: window.nbytes]
        await self._compute.run(self._fill, window, data)
        if not self._positional:
            del data  # what is sent has no other views
            reusable = await file.write(window.offset, slot.body(window.nbytes))
        else:
            reusable = await file.write(window.offset, data)
        self._written(window.nbytes)
        return reusable

    async def _tile(self, slot: Slot, file: DataFile, tensor: Tensor, box: Box) -> bool:
        dtype = DTYPES[tensor.spec.dtype]
        data = slot.buffer[: box.size * dtype.itemsize]
        await self._compute.run(
            self._reader(tensor.number).read, box, data.view(dtype).reshape(box.shape)
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
                header = self._plan.headers[-1 - piece.array]
                out[:] = np.frombuffer(header, np.uint8)[piece.start : piece.stop]
                continue
            tensor = self._plan.tensors[piece.array]
            # As the payload of one chunk that is the whole tensor.
            grid = ChunkGrid(tensor.spec.shape, tensor.spec.shape)
            cell = (0,) * len(grid.shape)
            read = self._reader(tensor.number).read
            gather(read, tensor.spec, grid, cell, piece.start, piece.stop, out, offset=cell)
        data[end:] = 0

    def _reader(self, number: int) -> ArrayReader:
        reader = self._readers.get(number)
        if reader is None:
            reader = ArrayReader(
                self._taken.sources[number],
                self._taken.adapters[number],
                self._dtypes[number],
                path=self._taken.paths[self._taken.array_leaf[number]],
            )
            self._readers[number] = reader
        return reader


def _file_of(window: Window) -> int:
    return window.file


def _runs(tensor: Tensor, box: Box, data: Bytes) -> tuple[list[int], list[Bytes]]:
    """Where each run of a box goes in the file, and its bytes."""
    shape = tensor.spec.shape
    # The axes behind which the box is as wide as the tensor are one run.
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
