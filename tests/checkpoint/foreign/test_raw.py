"""Raw runs of bytes, cut into pieces whose chunks are full and contiguous."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.checkpoint.foreign.raw import raw_pieces
from asyncckpt.spec import ChunkGrid

shapes = st.lists(st.integers(0, 9), max_size=4)


@given(shapes, st.sampled_from((1, 2, 8)), st.integers(1, 200))
def test_the_chunks_are_runs_of_the_file_that_cover_it_once(
    shape: list[int], itemsize: int, target: int
) -> None:
    count = math.prod(shape)
    values = np.arange(count).reshape(shape)
    flat = np.arange(count)
    rebuilt = np.full(shape, -1)
    covered = np.zeros(count, int)
    for piece in raw_pieces(shape, itemsize, target):
        grid = ChunkGrid(piece.shape, piece.chunk_shape)
        assert len(piece.row_offset) == grid.chunk_count
        assert all(n % c == 0 for n, c in zip(piece.shape, piece.chunk_shape, strict=True))
        for cell, start in zip(grid.cells(), piece.row_offset.tolist(), strict=True):
            assert start % itemsize == 0
            first = start // itemsize
            run = flat[first : first + grid.chunk_size]
            covered[first : first + grid.chunk_size] += 1
            where = tuple(
                slice(o + i * c, o + (i + 1) * c)
                for o, i, c in zip(piece.offset, cell, piece.chunk_shape, strict=True)
            )
            rebuilt[where] = run.reshape(piece.chunk_shape)
    assert np.array_equal(rebuilt, values)
    assert (covered == 1).all()


@given(shapes, st.integers(1, 200))
def test_chunks_keep_the_target_where_an_element_does(shape: list[int], target: int) -> None:
    for piece in raw_pieces(shape, 4, target):
        nbytes = 4 * math.prod(piece.chunk_shape)
        assert nbytes <= max(target, 4) or not math.prod(shape)


def test_few_pieces_however_large_the_array_is() -> None:
    pieces = raw_pieces((1_000_003, 1024), 4, 16 << 20)
    assert [piece.offset for piece in pieces] == [(0, 0), (pieces[0].shape[0], 0)]
    assert sum(piece.shape[0] for piece in pieces) == 1_000_003
