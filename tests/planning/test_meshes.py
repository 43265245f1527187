"""Saved on one mesh and restored on another: every pair of meshes of up to 16 processes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from asyncckpt.options import MIB
from asyncckpt.planning import grid as grids
from asyncckpt.planning import held
from asyncckpt.planning.restore import Requests, RestorePlan, StoredArrays, plan_restore
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.spec import ArraySpec, Box, ChunkGrid
from tests.planning.jobs import SIZES, mesh_leaf, mesh_shards

Mesh = tuple[int, int]

MESHES = [mesh for mesh in itertools.product(range(1, 17), repeat=2) if math.prod(mesh) <= 16]

ITEMS: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (128, 64): (8, 8, 16, 16),
    (10, 6): (10, 10, 20, 20),
    (5, 3): (8, 8, 12, 12),
}
"""What PyTorch/XLA's planners read for the pairs of `PAIRS`; empty shards included in neither."""

PAIRS: list[tuple[Mesh, Mesh]] = [((4, 1), (2, 2)), ((2, 2), (4, 1))]
PAIRS += [((4, 4), (2, 2)), ((2, 2), (4, 4))]


@pytest.fixture(autouse=True)
def no_leaf_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of small leaves would travel to process 0, which makes one chunk."""
    monkeypatch.setattr(grids, "WHOLE_NBYTES", 0)
    monkeypatch.setattr(held, "WHOLE_NBYTES", 0)


def spec_of(shape: tuple[int, int]) -> ArraySpec:
    return ArraySpec(shape, "float32")


def plan_of(shape: tuple[int, int], mesh: Mesh, process: int) -> SavePlan:
    leaf = mesh_leaf("w", spec_of(shape), mesh, [[0], [1]], process)
    return plan_save([leaf], **SIZES, process=process, process_count=math.prod(mesh))


def boxes_of(shape: tuple[int, int], mesh: Mesh) -> list[Box]:
    shards = mesh_shards(shape, mesh, [[0], [1]])[1]
    return [shard.box for shard in shards if shard.box.size]


def restore(grid: ChunkGrid, boxes: Sequence[Box]) -> RestorePlan:
    nbytes = grid.chunk_size * 4 + 4
    rows = np.arange(grid.chunk_count)
    return plan_restore(
        StoredArrays([(grid, 4, False)], np.array([0]), np.array([0])),
        Requests(np.zeros(len(boxes), int), boxes, np.ones(len(boxes), bool)),
        row_file=rows * 0,
        row_offset=rows * nbytes,
        row_nbytes=rows * 0 + nbytes,
        slot_nbytes=8 * MIB,
        gap_nbytes=0,
        direct_nbytes=MIB,
    )


@pytest.mark.parametrize("shape", ITEMS)
def test_as_much_is_read_as_by_other_planners(shape: tuple[int, int]) -> None:
    for (saved, wanted), items in zip(PAIRS, ITEMS[shape], strict=True):
        grid = plan_of(shape, saved, 0).arrays.of(0).grid
        assert sum(restore(grid, boxes_of(shape, wanted)).counts) == items


@pytest.mark.parametrize("shape", ITEMS)
def test_every_process_of_every_mesh_writes_its_own_shard(shape: tuple[int, int]) -> None:
    for mesh in MESHES:
        shards = [shard.box for shard in mesh_shards(shape, mesh, [[0], [1]])[1]]
        written: list[int] = []
        for process, box in enumerate(shards):
            plan = plan_of(shape, mesh, process)
            assert plan.row_data.sum() == box.size * 4
            assert (plan.row_writer == process).all()
            written += plan.row_chunk.tolist()
        assert sorted(written) == list(range(plan.arrays.chunk_count))


@pytest.mark.parametrize("shape", ITEMS)
def test_every_mesh_reads_what_every_other_has_saved(shape: tuple[int, int]) -> None:
    # Many meshes cut alike: each different grid is read in each different way.
    saved = {plan_of(shape, mesh, 0).arrays.of(0).grid for mesh in MESHES}
    wanted = {tuple(boxes_of(shape, mesh)): mesh for mesh in MESHES}

    @functools.cache
    def overlaps(axis: int, cell: int, parts: int) -> int:
        """Pairs of a cell of the saved grid and one of the wanted cut that meet on an axis."""
        n = shape[axis]
        step = -(-n // parts)
        return sum(
            min(n, a + step) > b and min(n, b + cell) > a
            for a in range(0, n, step)
            for b in range(0, n, cell)
        )

    for grid, (boxes, mesh) in itertools.product(saved, wanted.items()):
        plan = restore(grid, boxes)
        # As many items as there are overlaps, and every chunk once.
        rows, columns = grid.chunk_shape
        items = overlaps(0, rows, mesh[0]) * overlaps(1, columns, mesh[1])
        assert sum(plan.counts) == items, (grid, mesh)
        assert len(plan.rows) == grid.chunk_count
