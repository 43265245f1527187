"""Copies of chunk payloads between arrays and byte buffers, by ranges of bytes.

A payload is a chunk's elements in C order, little endian, padded with zeros to the full chunk
shape where the chunk reaches past the array. All functions block and run in worker threads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.casts import castable, check_values_fit, may_lose
from asyncckpt.options import CACHED_NBYTES
from asyncckpt.planning.overlap import BoxIndex, boxes_of_run, runs
from asyncckpt.ports import Bytes, Source
from asyncckpt.spec import DTYPES, ArraySpec, Box, ChunkGrid


class ArrayReader:
    """Reader of payload bytes of one source array, cast to its stored dtype.

    Reads a sharded array shard by shard, without assembling it.

    Attributes:
        flats: for each shard, its bytes in C order if they are one run in host memory and stored
            unchanged, else None. An array without shards counts as one.
    """

    __slots__ = ("_dtype", "_index", "_may_lose", "_path", "_source", "_stored", "_views", "flats")

    def __init__(self, source: Source, stored_dtype: str, *, path: str) -> None:
        self._source = source
        self._path = path
        self._stored = stored_dtype
        self._dtype = DTYPES[stored_dtype]
        self._may_lose = may_lose(source.spec.dtype, stored_dtype)
        self._views = (source.view,) if source.shards is None else source.views
        self._index: BoxIndex | None = None
        plain = stored_dtype == source.spec.dtype
        self.flats = tuple(
            [flat_bytes(view) if plain and view is not None else None for view in self._views]
        )

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Copy the values of `box` into `out` (of the box's shape, in the stored dtype).

        Raises:
            DtypeMismatchError: a value does not fit into the stored dtype; names the leaf.
        """
        shards = self._source.shards
        if shards is None:
            self._read(0, box, out)
            return
        if self._index is None:
            self._index = BoxIndex([shard.box for shard in shards])
        for number, part, index in self._index.parts(box):
            self._read(number, part, out[index])

    def _read(self, shard: int, box: Box, out: npt.NDArray[Any]) -> None:
        """Copy the values of `box`, relative to the shard, into `out`."""
        source, view = self._source, self._views[shard]
        if view is not None:
            index: Any = (*box.slices(), ...)
            self._cast(view[index], out)
            return
        assert source.adapter is not None
        dtype = DTYPES[source.spec.dtype]
        if self._dtype == dtype:
            source.adapter.fetch(source, shard, box, out)
            return
        # The values before the cast are outside the byte budget.
        for run in runs(box.shape, dtype.itemsize, CACHED_NBYTES):
            values = np.empty(run.shape, dtype)
            offset = tuple(map(operator.add, run.offset, box.offset))
            source.adapter.fetch(source, shard, Box(offset, run.shape), values)
            part: Any = (*run.slices(), ...)
            self._cast(values, out[part])

    def _cast(self, values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        if self._may_lose:
            check_values_fit(self._path, values, self._source.spec.dtype, self._stored)
            if np.iscomplexobj(values):
                values = values.real
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out, castable(values, self._stored), casting="unsafe")


def flat_bytes(array: npt.NDArray[Any]) -> Bytes | None:
    """Return the bytes of a C-contiguous array as one run, sharing its memory, or None."""
    return np.frombuffer(array, np.uint8) if array.flags.c_contiguous else None


def gather(
    read: Callable[[Box, npt.NDArray[Any]], None],
    spec: ArraySpec,
    grid: ChunkGrid,
    cell: tuple[int, ...],
    start: int,
    stop: int,
    out: Bytes,
    *,
    offset: tuple[int, ...],
) -> None:
    """Copy bytes `start` to `stop` of the payload of chunk `cell` into `out`.

    `read` fills an array with the values of a box of the source. The chunk's array begins at
    `offset` in the source.
    """
    clipped = grid.box(cell)
    if any(offset):
        clipped = Box(tuple(map(operator.add, clipped.offset, offset)), clipped.shape)
    itemsize = spec.itemsize
    dtype = DTYPES[spec.dtype]
    position = start // itemsize * itemsize
    for box in boxes_of_run(grid.chunk_shape, start // itemsize, -(-stop // itemsize)):
        nbytes = box.size * itemsize
        low, high = max(start, position), min(stop, position + nbytes)
        if high - low == nbytes:
            _fill(read, box, clipped, out[low - start : high - start].view(dtype))
        else:
            # A window ends at a multiple of the page, not of the element size, and may cut an
            # element in two: the whole element is read, and some of its bytes are copied.
            whole = np.empty(box.size, dtype)
            _fill(read, box, clipped, whole)
            raw = whole.view(np.uint8)[low - position : high - position]
            np.copyto(out[low - start : high - start], raw)
        position += nbytes


def _fill(
    read: Callable[[Box, npt.NDArray[Any]], None], box: Box, clipped: Box, flat: npt.NDArray[Any]
) -> None:
    """Copy the elements of `box` of a chunk into `flat`; `clipped` is its part inside the array."""
    inside = box.intersect(Box((0,) * len(clipped.shape), clipped.shape))
    if inside is None or inside.shape != box.shape:
        flat.view(np.uint8).fill(0)
    if inside is not None:
        origin = tuple(map(operator.add, inside.offset, clipped.offset))
        index: Any = (*inside.relative_to(box.offset).slices(), ...)
        read(Box(origin, inside.shape), flat.reshape(box.shape)[index])


def scatter(
    payload: Bytes,
    spec: ArraySpec,
    grid: ChunkGrid,
    cell: tuple[int, ...],
    start: int,
    target: npt.NDArray[Any],
    wanted: Box,
) -> None:
    """Copy the elements of `payload` that lie in `wanted` into `target`.

    `payload` holds bytes of chunk `cell` from `start` on, both multiples of the element size.
    `target` has the shape of `wanted` and the dtype of the chunk.
    """
    clipped = grid.box(cell)
    dtype = DTYPES[spec.dtype]
    first = start // spec.itemsize
    last = first + payload.nbytes // spec.itemsize
    done = 0
    for box in boxes_of_run(grid.chunk_shape, first, last):
        nbytes = box.size * spec.itemsize
        part = payload[done : done + nbytes]
        done += nbytes
        placed = Box(tuple(map(operator.add, box.offset, clipped.offset)), box.shape)
        overlap = placed.intersect(wanted)
        if overlap is None:
            continue
        if part.ctypes.data % dtype.alignment:
            part = part.copy()
        values = part.view(dtype)
        where: Any = (*overlap.relative_to(wanted.offset).slices(), ...)
        np.copyto(
            target[where],
            values.reshape(box.shape)[overlap.relative_to(placed.offset).slices()],
            casting="no",
        )
