"""Boxes of a mesh by arithmetic, compared with what PyTorch and JAX do to real indices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from asyncckpt.adapters import placements as arithmetic
from asyncckpt.adapters.dtensor import layout_of
from asyncckpt.adapters.placements import (
    Cut,
    Layout,
    Mesh,
    axis_cuts,
    coordinates_of,
    hold,
    partition,
)
from asyncckpt.planning.tiling import grid_boxes, tiling_fault
from asyncckpt.spec import Box, Partition

Coordinate = tuple[int, ...]


def numbered(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape)).reshape(shape)


def coordinates(mesh_shape: tuple[int, ...]) -> list[Coordinate]:
    return list(itertools.product(*map(range, mesh_shape)))


def local(
    mesh_shape: tuple[int, ...], layout: Layout, shape: tuple[int, ...], coordinate: Coordinate
) -> np.ndarray[Any, Any]:
    """What a coordinate holds of an array of numbers, put together from its boxes."""
    runs = arithmetic.runs_of(mesh_shape, layout, shape, coordinate)
    places = [arithmetic.without_gaps(held) for held in runs]
    found = np.full([held[-1][1] if held else 0 for held in places], -1)
    for box, place in zip(grid_boxes(runs), grid_boxes(places), strict=True):
        found[(*place.slices(), ...)] = numbered(shape)[(*box.slices(), ...)]
    return found


def edges(cuts: int | tuple[int, ...], length: int) -> list[int]:
    """The cuts between cells, as a list of positions."""
    if isinstance(cuts, tuple):
        return list(cuts)
    return list(range(cuts, length, cuts)) if cuts else []


# ---------------------------------------------------------------------------------- properties


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Mesh, Layout, tuple[int, ...]]:
    """A mesh of up to three axes with processes in any order, and an array divided over it."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    size = math.prod(mesh_shape)
    share = draw(st.sampled_from([1, 2, size]))  # coordinates of one process
    processes = draw(st.permutations([n // share for n in range(size)]))
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    layout: list[list[Cut]] = [[] for _ in shape]
    for axis in draw(st.permutations(range(len(mesh_shape)))):
        place = draw(st.integers(-1, len(shape) - 1))
        if place >= 0:
            layout[place].append(Cut(axis, draw(st.sampled_from([1, 1, 1, 2, 3]))))
    mesh = Mesh(np.array(processes).reshape(mesh_shape))
    return mesh, tuple(map(tuple, layout)), shape


@given(divisions())
def test_the_shards_of_all_coordinates_tile_the_array_along_the_cuts(
    case: tuple[Mesh, Layout, tuple[int, ...]],
) -> None:
    mesh, layout, shape = case
    found: dict[Box, set[int]] = {}
    stated: dict[Box, tuple[int, ...]] = {}
    for coordinate in coordinates(mesh.shape):
        holding = hold(mesh, layout, shape, [coordinate])
        assert holding.partition is partition(mesh, layout, shape)
        assert holding.numbers == (tuple(range(len(holding.shards))),)
        for shard in holding.shards:
            found.setdefault(shard.box, set()).add(int(mesh.processes[coordinate]))
            # All who hold a box name the same holders, as the same object.
            assert stated.setdefault(shard.box, shard.holders) is shard.holders
    whole = Box.whole(shape)
    assert (whole.size == 0) == (not found)
    assert tiling_fault(whole, list(found)) is None
    assert stated == {box: tuple(sorted(held)) for box, held in found.items()}
    for axis, cuts in enumerate(partition(mesh, layout, shape).cuts):
        if whole.size:
            starts = {box.offset[axis] for box in found}
            assert edges(cuts, shape[axis]) == sorted(starts - {0})
            assert cuts == shape[axis] or len(starts) > 1


@given(divisions())
def test_a_process_holds_what_its_coordinates_hold(
    case: tuple[Mesh, Layout, tuple[int, ...]],
) -> None:
    mesh, layout, shape = case
    for process in mesh.members:
        own = coordinates_of(mesh, process)
        assert all(mesh.processes[coordinate] == process for coordinate in own)
        holding = hold(mesh, layout, shape, own)
        boxes = [shard.box for shard in holding.shards]
        assert boxes == sorted(set(boxes), key=lambda box: box.offset)
        for coordinate, numbers in zip(own, holding.numbers, strict=True):
            alone = hold(mesh, layout, shape, [coordinate])
            assert tuple(holding.shards[number] for number in numbers) == alone.shards


@given(divisions())
def test_listing_the_boxes_of_all_processes_gives_the_same(
    case: tuple[Mesh, Layout, tuple[int, ...]],
) -> None:
    mesh, layout, shape = case
    every = hold(mesh, layout, shape, coordinates(mesh.shape))
    listed = {shard.box: shard.holders for shard in every.shards}
    own = [every.shards[number].box for numbers in every.numbers for number in numbers]
    found = arithmetic.enumerated(shape, listed, own)
    assert found.shards == every.shards
    assert [numbers for (numbers,) in found.numbers] == [n for ns in every.numbers for n in ns]
    if listed:
        assert found.partition.cuts == every.partition.cuts


# -------------------------------------------------------------------------------------- oracles


def left_to_right(
    placements: list[Placement], mesh_shape: tuple[int, ...], data: torch.Tensor, at: Coordinate
) -> torch.Tensor:
    """What PyTorch's own placements leave to a coordinate, one after the other."""
    for placement, size, index in zip(placements, mesh_shape, at, strict=True):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(data, size, with_padding=False)  # type: ignore[attr-defined]
            data = parts[index]
    return data


MESHES = [(1,), (3,), (2, 2), (3, 2), (2, 4), (1, 5), (2, 2, 2), (2, 3, 2)]
SHAPES = [(), (0,), (1,), (7,), (8,), (13,), (16, 3), (5, 7), (4, 0, 3), (6, 5, 4)]


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_shards_are_those_of_pytorch(mesh_shape: tuple[int, ...]) -> None:
    for shape in SHAPES:
        kinds: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
        for placements in itertools.product(kinds, repeat=len(mesh_shape)):
            layout = layout_of(placements, mesh_shape, len(shape))
            for at in coordinates(mesh_shape):
                expected = left_to_right(
                    list(placements), mesh_shape, torch.from_numpy(numbered(shape)), at
                )
                np.testing.assert_array_equal(local(mesh_shape, layout, shape, at), expected)


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("factor", [2, 3, 5])
def test_strided_shards_without_shards_of_their_own_are_those_of_pytorch(
    mesh_shape: tuple[int, ...], factor: int
) -> None:
    for length in (*range(14), 24):
        for place in range(len(mesh_shape)):
            placements: list[Placement] = [Replicate()] * len(mesh_shape)
            placements[place] = _StridedShard(0, split_factor=factor)
            layout = layout_of(placements, mesh_shape, 2)
            for at in coordinates(mesh_shape):
                data = torch.from_numpy(numbered((length, 2)))
                expected = left_to_right(placements, mesh_shape, data, at)
                found = local(mesh_shape, layout, (length, 2), at)
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("placements", "order"),
    [
        # fully_shard over tensor parallelism, over two axes of it, and replicated.
        ([_StridedShard(0, split_factor=3), Shard(0), Replicate()], [1, 0]),
        ([_StridedShard(0, split_factor=6), Shard(0), Shard(0)], [1, 2, 0]),
        ([Replicate(), _StridedShard(0, split_factor=2), Shard(0)], [2, 1]),
        # What PyTorch writes for other orders of three cuts.
        ([_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)], [2, 1, 0]),
        ([_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0)], [2, 0, 1]),
        ([_StridedShard(0, split_factor=3), Shard(0), Shard(0)], [1, 0, 2]),
        ([Shard(0), _StridedShard(0, split_factor=2), Shard(0)], [0, 2, 1]),
    ],
)
def test_later_shards_that_a_split_factor_counts_come_first(
    placements: list[Placement], order: list[int]
) -> None:
    mesh_shape = (2, 3, 2)
    for length in range(40):
        layout = layout_of(placements, mesh_shape, 1)
        assert layout == (tuple(map(Cut, order)),)
        for at in coordinates(mesh_shape):
            data = torch.arange(length)
            for axis in order:
                parts, _ = Shard(0)._split_tensor(data, mesh_shape[axis], with_padding=False)
                data = parts[at[axis]]
            np.testing.assert_array_equal(local(mesh_shape, layout, (length,), at), data)
            if length % 12 == 0:  # even shards are those that the placements give, too
                written = left_to_right(placements, mesh_shape, torch.arange(length), at)
                assert torch.equal(written, data)


def test_uneven_shards_of_fsdp_over_tensor_parallelism() -> None:
    """What `fully_shard` really makes of 13 and 7 rows, by dp 3 and tp 2."""
    layout = layout_of([_StridedShard(0, split_factor=2), Shard(0)], (3, 2), 1)
    rows = {at: local((3, 2), layout, (13,), at).tolist() for at in coordinates((3, 2))}
    assert rows == {
        (0, 0): [0, 1, 2],
        (1, 0): [3, 4, 5],
        (2, 0): [6],
        (0, 1): [7, 8],
        (1, 1): [9, 10],
        (2, 1): [11, 12],
    }
    rows = {at: local((3, 2), layout, (7,), at).tolist() for at in coordinates((3, 2))}
    assert rows == {
        (0, 0): [0, 1],
        (1, 0): [2, 3],
        (2, 0): [],
        (0, 1): [4],
        (1, 1): [5],
        (2, 1): [6],
    }


def test_a_strided_shard_alone_is_several_boxes() -> None:
    layout = layout_of([_StridedShard(0, split_factor=2), Replicate()], (2, 2), 1)
    holding = hold(Mesh([[0, 1], [2, 3]]), layout, (8,), [(0, 0)])
    assert [(shard.box.offset, shard.box.shape, shard.holders) for shard in holding.shards] == [
        ((0,), (2,), (0, 1)),
        ((4,), (2,), (0, 1)),
    ]
    assert holding.partition == Partition((2,), "2x2[0,1,2,3] 0:2", (0, 1, 2, 3))


def test_an_axis_that_only_the_first_coordinates_hold() -> None:
    layout = layout_of([Shard(0)], (3,), 2)
    mesh = Mesh([0, 1, 2])
    held = [hold(mesh, layout, (1, 6), [(n,)]).shards for n in range(3)]
    assert [[shard.box for shard in shards] for shards in held] == [[Box((0, 0), (1, 6))], [], []]
    assert partition(mesh, layout, (1, 6)).cuts == (1, 6)


# ------------------------------------------------------------------------- cuts, texts and cost


@pytest.mark.parametrize(
    ("length", "steps", "cuts"),
    [
        (12, (), 12),
        (12, ((4, 1),), 3),
        (13, ((4, 1),), 4),
        (3, ((8, 1),), 1),
        (0, ((8, 1),), 0),
        (12, ((2, 1), (3, 1)), 2),
        (13, ((1, 1), (4, 1), (1, 1)), 4),
        (10, ((2, 1), (2, 1)), (3, 5, 8)),
        (14, ((2, 1), (2, 1)), (4, 7, 11)),
        (8, ((2, 2),), 2),
        (9, ((4, 2),), (2, 4, 5, 6, 7, 8)),
    ],
)
def test_cuts_are_one_length_where_cells_are_regular(
    length: int, steps: tuple[tuple[int, int], ...], cuts: Any
) -> None:
    assert axis_cuts(length, steps) == cuts


@given(st.integers(0, 60), st.lists(st.integers(1, 5), max_size=3))
def test_cuts_are_where_parts_that_are_divided_again_begin(length: int, sizes: list[int]) -> None:
    parts = [range(length)]
    for size in sizes:
        cells = [-(-len(part) // size) for part in parts]
        parts = [
            part[n * cell : (n + 1) * cell]
            for part, cell in zip(parts, cells, strict=True)
            for n in range(size)
        ]
    expected = sorted({part[0] for part in parts if part} - {0})
    assert edges(axis_cuts(length, tuple((size, 1) for size in sizes)), length) == expected


def test_cuts_of_many_processes_are_not_listed() -> None:
    size = 1 << 40
    assert axis_cuts(size, ((1 << 20, 1), (1 << 10, 1))) == 1 << 10
    assert axis_cuts(size + 1, ((1 << 20, 1),)) == (1 << 20) + 1


def test_texts_tell_layouts_apart() -> None:
    square, line = Mesh([[0, 1], [2, 3]]), Mesh([0, 1, 2, 3])
    rows: Layout = ((Cut(0),), ())
    both: Layout = ((Cut(0), Cut(1)), ())
    layouts = [
        (square, rows),
        (square, ((Cut(1),), ())),
        (square, ((), (Cut(0),))),
        (square, both),
        (square, ((Cut(1), Cut(0)), ())),
        (square, ((Cut(0, 2),), ())),
        (square, ((), ())),
        (Mesh([[0, 2], [1, 3]]), rows),
        (Mesh([[0, 0], [1, 1]]), rows),
        (line, rows),
    ]
    texts = [partition(mesh, layout, (8, 8)).holders for mesh, layout in layouts]
    assert len(set(texts)) == len(layouts)
    assert texts[0] == "2x2[0,1,2,3] 0,"
    assert partition(Mesh([[0, 1], [2, 3]]), rows, (8, 8)).holders == texts[0]
    # An axis of length 1 divides nothing.
    assert (
        partition(Mesh([[4], [5]]), both, (8, 8)).holders
        == partition(Mesh([[4], [5]]), rows, (8, 8)).holders
    )


def test_texts_of_many_processes_are_short() -> None:
    ordered = Mesh(np.repeat(np.arange(10_000), 4).reshape(-1, 8))
    shuffled = Mesh(np.random.default_rng(7).permutation(10_000))
    layout: Layout = ((Cut(0),),)
    for mesh in (ordered, shuffled, Mesh(shuffled.processes)):
        assert len(partition(mesh, layout, (80_000,)).holders) < 100
    one, other = (partition(m, layout, (8,)).holders for m in (shuffled, Mesh(shuffled.processes)))
    assert one == other
    swapped = shuffled.processes.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert partition(Mesh(swapped), layout, (8,)).holders != one
