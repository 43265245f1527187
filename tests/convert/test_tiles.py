"""Order in which chunks are copied: every element once, without repeated decoding."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.checkpoint.foreign.raw import raw_pieces
from asyncckpt.convert.tiles import Part, band_nbytes, chunk_shape_for, tile_shape, tiles
from asyncckpt.planning.overlap import runs
from asyncckpt.planning.restore import cells_overlapping
from asyncckpt.spec import Box, ChunkGrid

lengths = st.integers(1, 12)
shapes = st.lists(lengths, min_size=0, max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn) -> ChunkGrid:
    shape = draw(shapes)
    return ChunkGrid(shape, tuple(draw(st.integers(1, n + 2)) for n in shape))


def covered(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    count = np.zeros(shape, np.int64)
    for box in boxes:
        count[box.slices()] += 1
    return count


@given(shapes, st.integers(1, 40))
def test_runs_tile_an_array_in_c_order(shape: tuple[int, ...], target: int) -> None:
    boxes = list(runs(shape, 2, target))
    assert (covered(shape, boxes) == 1).all()
    firsts = [np.ravel_multi_index(box.offset, shape) if shape else 0 for box in boxes]
    assert firsts == sorted(firsts)
    assert all(box.size * 2 <= max(2, target) for box in boxes)


@given(grids(), st.integers(1, 60))
def test_tiles_cover_every_element_once_within_the_target(grid: ChunkGrid, target: int) -> None:
    offset = tuple(range(len(grid.shape)))
    boxes = list(tiles([(offset, grid)], 2, target))
    whole = tuple(n + o for n, o in zip(grid.shape, offset, strict=True))
    count = covered(whole, boxes)
    inside = tuple(slice(o, None) for o in offset)
    assert (count[inside] == 1).all() and count.sum() == math.prod(grid.shape)
    assert all(box.size * 2 <= max(2, target) for box in boxes)


@given(grids(), st.integers(1, 60))
def test_a_chunk_belongs_to_one_tile(grid: ChunkGrid, target: int) -> None:
    cell = tile_shape(grid, 2, target)
    coarse = ChunkGrid(grid.shape, cell)
    met: list[int] = []
    for index in coarse.cells():
        met += cells_overlapping(grid, coarse.box(index)).tolist()
    assert sorted(met) == list(range(grid.chunk_count))


@given(grids(), st.integers(2, 60))
def test_tiles_pad_no_more_than_chunks(grid: ChunkGrid, target: int) -> None:
    def padded(chunk: tuple[int, ...]) -> int:
        return math.prod(-(-n // c) * c for n, c in zip(grid.shape, chunk, strict=True))

    assert padded(tile_shape(grid, 2, target)) == padded(grid.chunk_shape)


def test_bands_are_the_chunks_that_reading_in_c_order_holds_open() -> None:
    def band(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
        return band_nbytes([((0,) * len(shape), ChunkGrid(shape, chunk))], 4)

    assert band((8, 10), (2, 10)) == 80  # runs of rows: one at a time
    assert band((8, 10), (1, 5)) == 20
    assert band((8, 10), (8, 2)) == 8 * 10 * 4  # columns: all of them
    assert band((8, 10), (2, 5)) == 2 * 10 * 4
    assert band((3, 8, 10), (1, 4, 5)) == 4 * 10 * 4
    assert band((), ()) == 4


def test_a_tensor_in_a_file_is_read_a_chunk_at_a_time() -> None:
    parts: list[Part] = [
        (piece.offset, ChunkGrid(piece.shape, piece.chunk_shape))
        for piece in raw_pieces((1000, 10), 4, 400)
    ]
    assert band_nbytes(parts, 4) == 400


def test_pieces_side_by_side_are_open_at_the_same_time() -> None:
    parts: list[Part] = [((0, 0), ChunkGrid((8, 3), (8, 3))), ((0, 3), ChunkGrid((8, 7), (8, 7)))]
    assert band_nbytes(parts, 1) == 80


def test_new_chunks_follow_those_that_would_be_read_repeatedly() -> None:
    columns: list[Part] = [((0, 0), ChunkGrid((64, 64), (64, 4)))]
    assert chunk_shape_for((64, 64), columns, 1, target_nbytes=256, limit_nbytes=1 << 20) == (64, 4)
    assert chunk_shape_for((64, 64), columns, 1, target_nbytes=600, limit_nbytes=1 << 20) == (64, 8)
    assert chunk_shape_for((64, 64), columns, 1, target_nbytes=64, limit_nbytes=64) == (16, 4)
    pieces: list[Part] = [
        ((0, 0), ChunkGrid((10, 3), (5, 3))),
        ((0, 3), ChunkGrid((10, 7), (5, 4))),
    ]
    assert chunk_shape_for((10, 10), pieces, 1, target_nbytes=20, limit_nbytes=99) == (5, 4)
    assert chunk_shape_for((10, 10), pieces, 1, target_nbytes=4, limit_nbytes=99) is None


@given(grids(), st.integers(1, 60), st.integers(1, 60))
def test_chunks_beyond_the_limit_are_cut_exactly(grid: ChunkGrid, target: int, limit: int) -> None:
    origin = (0,) * len(grid.shape)
    shape = chunk_shape_for(
        grid.shape, [(origin, grid)], 1, target_nbytes=target, limit_nbytes=limit
    )
    assert shape is not None
    whole = tile_shape(grid, 1, target)
    assert math.prod(shape) <= limit
    assert all(n % c == 0 for n, c in zip(whole, shape, strict=True))
