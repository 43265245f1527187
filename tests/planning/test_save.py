from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.options import MIB
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.pack import Piece
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard

DEFAULTS = {
    "data_file_nbytes": 1 << 30,
    "slot_nbytes": 8 * MIB,
    "page_nbytes": 4096,
    "aligned_chunk_nbytes": MIB,
    "inline_nbytes": 1024,
}
SMALL = {
    "data_file_nbytes": 500,
    "slot_nbytes": 64,
    "page_nbytes": 16,
    "aligned_chunk_nbytes": 48,
    "inline_nbytes": 12,
}

SPECS = st.builds(
    ArraySpec,
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(["bool", "bfloat16", "float32", "complex128"]),
)


@st.composite
def layouts(draw: st.DrawFn) -> list[LeafLayout]:
    leaves: list[LeafLayout] = []
    for i in range(draw(st.integers(0, 12))):
        if leaves and draw(st.integers(0, 5)) == 0:
            other = draw(st.integers(0, i - 1))
            leaves.append(leaves[other]._replace(name=f"tied.{i}", tied_to=other, zstd_level=None))
            continue
        leaves.append(
            LeafLayout(
                f"leaf.{i}",
                draw(SPECS),
                draw(st.sampled_from([1, 20, 60, 64, 128, 1000])),
                zstd_level=draw(st.sampled_from([None, None, None, 3])),
            )
        )
    return leaves


@st.composite
def packing(draw: st.DrawFn) -> dict[str, int]:
    page = draw(st.sampled_from([16, 32, 48]))
    return {
        "data_file_nbytes": draw(st.integers(1, 2000)),
        "slot_nbytes": page * draw(st.integers(2, 6)),
        "page_nbytes": page,
        "aligned_chunk_nbytes": draw(st.integers(0, 100)),
        "inline_nbytes": draw(st.integers(0, 40)),
    }


def grids_of(plan: SavePlan) -> list[ChunkGrid]:
    """The grid of every array."""
    return [plan.arrays.of(array).grid for array in range(len(plan.arrays.names))]


def pieces_of(plan: SavePlan) -> list[tuple[int, int, Piece]]:
    """Every piece with its file and its offset in it."""
    return [(w.file, w.offset + p.position, p) for w in plan.windows for p in w.pieces]


@given(layouts(), packing())
def test_pieces_tile_every_planned_payload_exactly_once(
    leaves: list[LeafLayout], sizes: dict[str, int]
) -> None:
    plan = plan_save(leaves, **sizes)
    reached = dict.fromkeys(np.flatnonzero(plan.row_file >= 0).tolist(), 0)
    for file, offset, piece in pieces_of(plan):
        assert piece.array == plan.row_array[piece.row]
        assert piece.start == reached[piece.row] < piece.stop
        assert (file, offset) == (
            plan.row_file[piece.row],
            plan.row_offset[piece.row] + piece.start,
        )
        reached[piece.row] = piece.stop
        assert piece.last is bool(piece.stop == plan.row_payload[piece.row])
    assert reached == {row: plan.row_payload[row] for row in reached}


@given(layouts(), packing())
def test_no_byte_of_a_file_has_two_owners(leaves: list[LeafLayout], sizes: dict[str, int]) -> None:
    plan = plan_save(leaves, **sizes)
    files = [np.zeros(n, int) for n in plan.file_nbytes]
    for file, offset, piece in pieces_of(plan):
        files[file][offset : offset + piece.stop - piece.start + 4 * piece.last] += 1
    for file in files:
        assert file.max() == 1
        assert file[-1] == 1


@given(layouts(), packing())
def test_windows_cover_every_file_without_gaps(
    leaves: list[LeafLayout], sizes: dict[str, int]
) -> None:
    plan = plan_save(leaves, **sizes)
    slot = sizes["slot_nbytes"]
    expected = [
        (file, offset, min(slot, nbytes - offset))
        for file, nbytes in enumerate(plan.file_nbytes)
        for offset in range(0, nbytes, slot)
    ]
    assert [(w.file, w.offset, w.nbytes) for w in plan.windows] == expected


@given(layouts(), packing())
def test_a_trailer_lies_behind_its_payload_in_the_same_window(
    leaves: list[LeafLayout], sizes: dict[str, int]
) -> None:
    plan = plan_save(leaves, **sizes)
    for window in plan.windows:
        for piece in window.pieces:
            end = piece.position + piece.stop - piece.start
            assert 0 <= piece.position < end <= window.nbytes
            if piece.last:
                assert end + 4 <= window.nbytes


@given(layouts(), packing())
def test_files_follow_the_rules_of_packing(leaves: list[LeafLayout], sizes: dict[str, int]) -> None:
    plan = plan_save(leaves, **sizes)
    rows = np.flatnonzero(plan.row_file >= 0)
    places = [(plan.row_file[r], plan.row_offset[r]) for r in rows]
    assert places == sorted(places)
    for row in rows:
        large = plan.row_payload[row] >= sizes["aligned_chunk_nbytes"]
        page = sizes["page_nbytes"]
        assert plan.row_offset[row] % (page if large else 8) == (page // 2 if large else 0)
    counts = np.bincount(plan.row_file[rows], minlength=len(plan.file_nbytes))
    for nbytes, count in zip(plan.file_nbytes, counts, strict=True):
        assert count >= 1
        assert nbytes <= sizes["data_file_nbytes"] or count == 1


@given(layouts(), packing())
def test_every_chunk_has_exactly_one_kind_of_place(
    leaves: list[LeafLayout], sizes: dict[str, int]
) -> None:
    plan = plan_save(leaves, **sizes)
    own = [i for i, leaf in enumerate(leaves) if leaf.tied_to is None]
    assert plan.row_array.tolist() == [
        i for i in own for _ in range(plan.arrays.of(i).grid.chunk_count)
    ]
    for i in own:
        first = int(plan.arrays.first_chunk[i])
        rows = range(first, first + plan.arrays.of(i).grid.chunk_count)
        stored = plan.arrays.of(i).grid.chunk_size * leaves[i].spec.itemsize
        assert all(plan.row_payload[r] == stored for r in rows)
        places = {bool(plan.row_file[r] >= 0) for r in rows}
        packed = leaves[i].zstd_level is not None and len(rows) > 0
        inline = not packed and len(rows) == 1 and stored + 4 <= sizes["inline_nbytes"]
        assert {r in plan.compressed for r in rows} == ({packed} if rows else set())
        assert {r in plan.inline for r in rows} == ({inline} if rows else set())
        if rows:
            assert places == {not packed and not inline}
    assert not set(plan.row_array[list(plan.inline)].tolist()) - set(own)


@given(layouts())
def test_tied_leaves_share_rows_and_are_counted_once(leaves: list[LeafLayout]) -> None:
    plan = plan_save(leaves, **SMALL)
    for i, leaf in enumerate(leaves):
        if leaf.tied_to is not None:
            first = plan.arrays.first_chunk
            assert first[i] == first[leaf.tied_to]
            assert plan.arrays.of(i).grid is plan.arrays.of(leaf.tied_to).grid
            assert i not in plan.row_array


@given(layouts())
def test_row_sources_are_runs_of_the_array(leaves: list[LeafLayout]) -> None:
    plan = plan_save(leaves, **SMALL)
    for row, array in enumerate(plan.row_array.tolist()):
        spec, grid = leaves[array].spec, plan.arrays.of(array).grid
        cell = np.unravel_index(row - plan.arrays.first_chunk[array], grid.counts)
        box = grid.box(tuple(map(int, cell)))
        assert plan.row_data[row] == box.size * spec.itemsize
        if plan.row_source[row] >= 0:
            numbers = np.arange(spec.size).reshape(spec.shape)[box.slices()].ravel()
            first = plan.row_source[row] // spec.itemsize
            assert numbers.tolist() == list(range(first, first + box.size))


@given(layouts())
def test_equal_layouts_share_one_grid(leaves: list[LeafLayout]) -> None:
    twice = leaves + [
        leaf._replace(
            name=f"again.{leaf.name}",
            tied_to=None if leaf.tied_to is None else leaf.tied_to + len(leaves),
        )
        for leaf in leaves
    ]
    plan = plan_save(twice, **SMALL)
    grids = grids_of(plan)
    for one, other in zip(grids, grids[len(leaves) :], strict=False):
        assert one is other


def test_a_chunk_larger_than_a_slot_is_a_run_of_pieces() -> None:
    leaves = [
        LeafLayout("small", ArraySpec((1000,), "float32"), 16 * MIB),
        LeafLayout("large", ArraySpec((4 * MIB,), "float32"), 16 * MIB),
    ]
    plan = plan_save(leaves, **DEFAULTS)
    slot = 8 * MIB
    start = 4096 + 2048  # the middle of the next page
    assert plan.row_offset.tolist() == [0, start]
    assert plan.file_nbytes == (16 * MIB + start + 4,)
    assert [tuple(w.pieces) for w in plan.windows] == [
        (Piece(0, 0, 0, 4000, 0, True), Piece(1, 1, 0, slot - start, start, False)),
        (Piece(1, 1, slot - start, 2 * slot - start, 0, False),),
        (Piece(1, 1, 2 * slot - start, 2 * slot, 0, True),),
    ]


@pytest.mark.parametrize("short", range(4))
def test_a_payload_that_ends_at_a_window_is_moved_once(short: int) -> None:
    leaf = LeafLayout("a", ArraySpec((56 - short,), "bool"), 1000)
    plan = plan_save([leaf], **SMALL)
    assert plan.row_offset.tolist() == [24]
    assert [tuple(w.pieces) for w in plan.windows] == [
        (Piece(0, 0, 0, 40, 24, False),),
        (Piece(0, 0, 40, 56 - short, 0, True),),
    ]


def test_a_payload_that_leaves_room_for_its_trailer_stays() -> None:
    plan = plan_save([LeafLayout("a", ArraySpec((52,), "bool"), 1000)], **SMALL)
    assert plan.row_offset.tolist() == [8]
    assert plan.file_nbytes == (64,)


def test_a_chunk_past_the_target_begins_the_next_file() -> None:
    leaves = [
        LeafLayout(f"a{i}", ArraySpec((n,), "bool"), 10**6)
        for i, n in enumerate([300, 200, 700, 20])
    ]
    plan = plan_save(leaves, **SMALL)
    assert plan.row_file.tolist() == [0, 1, 2, 3]
    leaves = [LeafLayout(f"b{i}", ArraySpec((40,), "bool"), 10**6) for i in range(20)]
    plan = plan_save(leaves, **SMALL)
    assert plan.row_file.tolist() == [0] * 10 + [1] * 10


def test_an_empty_tree_has_an_empty_plan() -> None:
    plan = plan_save([], **DEFAULTS)
    assert (plan.windows, plan.file_nbytes, len(plan.row_array)) == (
        (),
        (),
        0,
    )


def test_zero_sized_arrays_have_no_chunks() -> None:
    leaves = [
        LeafLayout("a", ArraySpec((0, 3), "float32"), 100),
        LeafLayout("b", ArraySpec((5, 0), "float32"), 100, zstd_level=3),
        LeafLayout("c", ArraySpec((2,), "float32"), 100),
    ]
    plan = plan_save(leaves, **SMALL)
    assert plan.row_array.tolist() == [2]
    assert (plan.inline, plan.compressed) == ((0,), ())


# ------------------------------------------------------------------------------------- errors


def test_two_leaves_of_one_name_are_refused() -> None:
    leaf = LeafLayout("a.b", ArraySpec((2,), "float32"), 100)
    with pytest.raises(UsageError, match=r"two leaves .* 'a\.b'"):
        plan_save([leaf, leaf], **SMALL)


def test_a_bad_chunk_shape_names_its_leaf() -> None:
    leaves = [
        LeafLayout("ok", ArraySpec((2,), "float32"), 100, (1,)),
        LeafLayout("params.w", ArraySpec((2, 2), "float32"), 100, (1,)),
    ]
    with pytest.raises(UsageError, match=r"^chunk_shape=\(1,\) has rank 1") as caught:
        plan_save(leaves, **SMALL)
    assert (caught.value.path, caught.value.expected, caught.value.found) == ("params.w", 2, 1)


def rows(*cuts: int, columns: int = 300) -> tuple[Shard, ...]:
    """Shards of whole rows, cut there."""
    return tuple(
        Shard(Box((a, 0), (b - a, columns)), (i,))
        for i, (a, b) in enumerate(itertools.pairwise(cuts))
    )


UNEVEN = LeafLayout(
    "params.w",
    ArraySpec((10_000, 300), "float32"),
    16 * MIB,
    shards=rows(0, 3001, 5000, 8001, 10_000),
)
"""PROCESSES: Linear(3, 10) on 2 x 2, larger."""


def test_regular_is_an_error_that_names_leaf_and_chunk_count() -> None:
    with pytest.raises(
        UsageError,
        match=r'^the finest chunk grid .* 4 shards .* has 10000 chunks, .*"regular"',
    ) as caught:
        plan_save([UNEVEN], **DEFAULTS, regular=True)
    assert (caught.value.path, caught.value.stage) == ("params.w", "plan")
    assert (caught.value.expected, caught.value.found) == (16, 10_000)


def test_regular_changes_nothing_where_one_grid_follows_the_shards() -> None:
    even = UNEVEN._replace(shards=rows(0, 4000, 6000, 10_000))
    plan = plan_save([even], **DEFAULTS, regular=True)
    assert grids_of(plan) == grids_of(plan_save([even], **DEFAULTS))
    assert plan.arrays.of(0).grid.chunk_shape == (2000, 300)
    assert not plan.arrays.pieces


def test_too_many_pieces_name_the_leaf() -> None:
    n = 9000
    cuts = [0, *(i * 8 + i * i % 7 for i in range(1, n)), n * 8]
    leaf = LeafLayout("w", ArraySpec((n * 8, 4), "float64"), MIB, shards=rows(*cuts, columns=4))
    with pytest.raises(UsageError, match=r"would take \d+ arrays, 4096 are allowed") as caught:
        plan_save([leaf], **DEFAULTS)
    assert (caught.value.path, caught.value.expected) == ("w", 4096)


@pytest.mark.parametrize("change", [{"slot_nbytes": 40}, {"slot_nbytes": 16}])
def test_sizes_that_could_not_place_a_trailer_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="page"):
        plan_save([], **{**SMALL, **change})


# -------------------------------------------------------------------------------- determinism

SCRIPT = """
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.save import plan_save
from asyncckpt.spec import ArraySpec, Box, Shard
shards = tuple(Shard(Box((i,), (1000,)), (i, 7)) for i in range(0, 50000, 1000))
leaves = [LeafLayout(f"a.{i}", ArraySpec((i, 3), "float32"), 40 + i) for i in range(60)]
leaves.append(LeafLayout("s", ArraySpec((50000,), "float32"), 1000, shards=shards))
plan = plan_save(leaves, data_file_nbytes=500, slot_nbytes=64, page_nbytes=16,
                 aligned_chunk_nbytes=48, inline_nbytes=12)
print(plan.arrays, plan.row_offset.tolist(), [tuple(w.pieces) for w in plan.windows])
"""


def test_the_plan_does_not_depend_on_the_hash_seed() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 1000


# -------------------------------------------------------------------------------------- limits


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3000)), max_size=6))
def test_whole_plans_keep_the_limits_of_chunks_and_padding(shapes: list[tuple[int, int]]) -> None:
    leaves = [
        LeafLayout(f"a{i}", ArraySpec(shape, "float64"), 256 * 1024)
        for i, shape in enumerate(shapes)
    ]
    plan = plan_save(leaves, **DEFAULTS)
    nbytes = sum(leaf.spec.nbytes for leaf in leaves)
    assert len(plan.row_array) <= 4 * (nbytes / (256 * 1024) + len(leaves))
    for i, leaf in enumerate(leaves):
        if leaf.spec.nbytes > MIB:
            stored = plan.row_payload[plan.row_array == i].sum()
            assert stored <= 1.02 * leaf.spec.nbytes


def operations(action: Callable[[], object]) -> int:
    """Function calls made, Python's and C's."""
    count = 0

    def event(frame: object, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(event)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_the_cost_is_linear_in_the_leaves() -> None:
    def leaves(n: int) -> list[LeafLayout]:
        return [
            LeafLayout(f"a{i}", ArraySpec((7 + i % 5, 100), "float32"), 10**6) for i in range(n)
        ]

    few, many = (operations(lambda n=n: plan_save(leaves(n), **DEFAULTS)) for n in (2000, 16_000))
    construction = [operations(lambda n=n: leaves(n)) for n in (2000, 16_000)]
    assert many - construction[1] <= 8.5 * (few - construction[0])
    assert many - construction[1] <= 5 * 16_000


def test_grids_of_a_plan_are_checked_once_per_layout() -> None:
    leaves = [LeafLayout(f"a{i}", ArraySpec((10, 10), "float32"), 100) for i in range(500)]
    plan = plan_save(leaves, **SMALL)
    assert len({id(g) for g in grids_of(plan)}) == 1
    assert plan.arrays.of(0).grid == ChunkGrid((10, 10), (2, 10))
    assert math.prod(plan.arrays.of(0).grid.counts) * 500 == len(plan.row_array)
