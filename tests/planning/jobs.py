"""Leaves of jobs of several processes, as each process sees them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from asyncckpt.options import MIB
from asyncckpt.planning.grid import cell_starts
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.spec import ArraySpec, Box, Partition, Shard

SIZES = {
    "data_file_nbytes": 1 << 30,
    "slot_nbytes": 8 * MIB,
    "page_nbytes": 4096,
    "aligned_chunk_nbytes": MIB,
    "inline_nbytes": 1024,
}


def mesh_shards(
    shape: tuple[int, ...], mesh: tuple[int, ...], axes: Sequence[Sequence[int]]
) -> tuple[Partition, tuple[Shard, ...]]:
    """Cut an array over a mesh of processes, and say who holds which cell.

    Args:
        shape: of the array.
        mesh: of the processes, which are numbered in C order.
        axes: per axis of the array the axes of the mesh that divide it, one after the other, each
            at multiples of the ceiling.
    """
    return _mesh_shards(shape, mesh, tuple(map(tuple, axes)))


@functools.lru_cache(1 << 12)
def _mesh_shards(
    shape: tuple[int, ...], mesh: tuple[int, ...], axes: tuple[tuple[int, ...], ...]
) -> tuple[Partition, tuple[Shard, ...]]:
    """Do `mesh_shards`, once for all processes of a mesh."""
    per_axis: list[list[tuple[tuple[int, ...], int, int]]] = []
    cuts: list[int | tuple[int, ...]] = []
    for n, divided_by in zip(shape, axes, strict=True):
        cells: list[tuple[tuple[int, ...], int, int]] = [((), 0, n)]
        for axis in divided_by:
            finer: list[tuple[tuple[int, ...], int, int]] = []
            for place, start, stop in cells:
                step = -(-(stop - start) // mesh[axis])
                for i in range(mesh[axis]):
                    edges = min(stop, start + i * step), min(stop, start + (i + 1) * step)
                    finer.append(((*place, i), *edges))
            cells = finer
        per_axis.append(cells)
        edges = tuple(sorted({start for _, start, stop in cells if 0 < start < stop}))
        even = len(divided_by) == 1 or edges == tuple(range(edges[0], n, edges[0])) if edges else 1
        cuts.append((edges[0] if edges else max(1, n)) if even else edges)
    shards: list[Shard] = []
    for cell in itertools.product(*per_axis):
        fixed = {}
        for divided_by, (place, _, _) in zip(axes, cell, strict=True):
            fixed.update(zip(divided_by, place, strict=True))
        box = Box(tuple([a for _, a, _ in cell]), tuple([b - a for _, a, b in cell]))
        holders = [
            process
            for process, at in enumerate(itertools.product(*map(range, mesh)))
            if all(at[axis] == i for axis, i in fixed.items())
        ]
        shards.append(Shard(box, tuple(holders)))
    partition = Partition(tuple(cuts), f"{mesh} {[list(divided_by) for divided_by in axes]}")
    filled = sum(1 for shard in shards if shard.box.size)
    assert filled == math.prod(map(len, cell_starts(shape, partition)))
    return partition, tuple(shards)


def mesh_leaf(
    name: str,
    spec: ArraySpec,
    mesh: tuple[int, ...],
    axes: Sequence[Sequence[int]],
    process: int,
    *,
    chunk_nbytes: int = 16 * MIB,
    listed: bool = False,
) -> LeafLayout:
    """Return a leaf over a mesh as a process sees it: its own shards, or with `listed` all."""
    partition, shards = mesh_shards(spec.shape, mesh, axes)
    if listed:
        return LeafLayout(name, spec, chunk_nbytes, shards=shards)
    own = tuple([shard for shard in shards if process in shard.holders and shard.box.size])
    return LeafLayout(name, spec, chunk_nbytes, shards=own, partition=partition)
