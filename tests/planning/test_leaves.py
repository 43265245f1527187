"""Leaves in shards: which arrays store them, and where the bytes of their chunks are."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB, MIB
from asyncckpt.planning.balance import Holders
from asyncckpt.planning.held import HeldChunks, HeldShards
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard
from asyncckpt.tree import array_names

SIZES = {
    "data_file_nbytes": 1 << 30,
    "slot_nbytes": 8 * MIB,
    "page_nbytes": 4096,
    "aligned_chunk_nbytes": MIB,
    "inline_nbytes": 1024,
}


def intervals(draw: st.DrawFn, n: int) -> list[tuple[int, int]]:
    """One axis, cut as a mesh would, twice, or anywhere."""
    edges = {0, n}
    way = draw(st.sampled_from(["ceil", "twice", "anywhere", "whole"]))
    if way in ("ceil", "twice"):
        edges |= set(range(0, n, -(-n // draw(st.integers(1, 5)))))
    if way == "twice":
        for start, stop in itertools.pairwise(sorted(edges)):
            edges |= set(range(start, stop, max(1, -(-(stop - start) // 2))))
    if way == "anywhere":
        edges |= set(draw(st.lists(st.integers(0, n), max_size=4)))
    return list(itertools.pairwise(sorted(edges)))


@st.composite
def sharded_leaves(draw: st.DrawFn) -> LeafLayout:
    """A leaf of more than 64 KiB in shards, with replicas and empty ones, in any order."""
    shape = tuple(draw(st.sampled_from([(70, 61), (97, 128), (7, 1009), (24, 12, 24), (8192,)])))
    boxes = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*(intervals(draw, n) for n in shape))
    ]
    shards = [Shard(box) for box in boxes]
    shards.append(Shard(Box((0,) * len(shape), (0, *shape[1:]))))
    shards += draw(st.lists(st.sampled_from(shards), max_size=3))
    return LeafLayout(
        "w",
        ArraySpec(shape, "complex128"),
        draw(st.sampled_from([4 * KIB, 20 * KIB, 64 * KIB, MIB])),
        shards=tuple(draw(st.permutations(shards))),
    )


def chunks_of(plan: SavePlan) -> list[tuple[int, Box]]:
    """Every row with the box of its leaf that it holds."""
    found = []
    for array in range(len(plan.arrays.names)):
        part = plan.arrays.of(array)
        for number, cell in enumerate(part.grid.cells()):
            box = part.grid.box(cell)
            offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
            found.append((int(plan.arrays.first_chunk[array]) + number, Box(offset, box.shape)))
    return found


@given(sharded_leaves())
@settings(max_examples=60)
def test_chunks_tile_a_sharded_leaf_exactly_once_within_the_limits(leaf: LeafLayout) -> None:
    plan = plan_save([leaf], **SIZES)
    seen = np.zeros(leaf.spec.shape, int)
    shards = {s.box for s in leaf.shards or () if s.box.size}
    for row, box in chunks_of(plan):
        seen[box.slices()] += 1
        assert plan.row_data[row] == box.size * 16
        # No chunk is held in parts by two shards.
        assert any(shard.intersect(box) == box for shard in shards)
    assert (seen == 1).all()
    assert len(plan.row_array) <= 4 * (leaf.spec.nbytes / leaf.chunk_nbytes + len(shards))
    if leaf.spec.nbytes > MIB:
        assert plan.row_payload.sum() <= 1.02 * leaf.spec.nbytes


@given(sharded_leaves())
@settings(max_examples=60)
def test_pieces_tile_their_leaf_and_have_names_of_their_own(leaf: LeafLayout) -> None:
    plan = plan_save([leaf], **SIZES)
    arrays = plan.arrays
    seen = np.zeros(leaf.spec.shape, int)
    for part in arrays.parts:
        seen[Box(part.offset, part.spec.shape).slices()] += 1
        assert part.grid.shape == part.spec.shape
    assert (seen == 1).all()
    count = len(arrays.names)
    assert arrays.leaf.tolist() == [0] * count
    if count == 1:
        assert (arrays.names, arrays.pieces) == (("w",), {})
    else:
        assert arrays.names == tuple(f"w%~{i}" for i in range(count))
        assert arrays.pieces == {0: range(count)}
        offsets = [arrays.of(array).offset for array in arrays.pieces[0]]
        assert offsets == sorted(offsets)


@given(sharded_leaves())
@settings(max_examples=60)
def test_the_source_of_a_chunk_is_a_run_of_its_shards_memory(leaf: LeafLayout) -> None:
    plan = plan_save([leaf], **SIZES)
    assert leaf.shards is not None
    numbers = np.arange(leaf.spec.size).reshape(leaf.spec.shape)
    held = [numbers[shard.box.slices()].ravel() for shard in leaf.shards]
    for row, box in chunks_of(plan):
        wanted = numbers[box.slices()].ravel()
        start = int(plan.row_source[row])
        if start >= 0:
            memory = held[plan.row_shard[row]]
            assert start % 16 == 0
            assert memory[start // 16 : start // 16 + box.size].tolist() == wanted.tolist()
        else:
            # Then no shard holds it as one run.
            for memory in held:
                at = np.flatnonzero(memory == wanted[0])
                run = memory[int(at[0]) : int(at[0]) + len(wanted)] if len(at) else memory[:0]
                whole = len(run) == len(wanted) and (run == wanted).all()
                assert (
                    not whole
                    or box.shape != plan.arrays.of(int(plan.row_array[row])).grid.chunk_shape
                )


def test_a_leaf_in_even_shards_of_whole_rows_is_copied_in_runs_only() -> None:
    boxes = [Box((i * 512, 0), (512, 1024)) for i in range(8)]
    leaf = LeafLayout("w", ArraySpec((4096, 1024), "float32"), MIB, shards=tuple(map(Shard, boxes)))
    plan = plan_save([leaf], **SIZES)
    assert plan.arrays.of(0).grid.chunk_shape == (256, 1024)
    assert plan.row_shard.tolist() == [i // 2 for i in range(16)]
    assert plan.row_source.tolist() == [i % 2 * MIB for i in range(16)]


def test_tiles_are_copied_in_runs_too() -> None:
    cells = itertools.product(range(2), range(4))
    boxes = [Box((i * 512, j * 256), (512, 256)) for i, j in cells]
    leaf = LeafLayout(
        "w", ArraySpec((1024, 1024), "float32"), 16 * MIB, shards=tuple(map(Shard, boxes))
    )
    plan = plan_save([leaf], **SIZES)
    assert plan.row_shard.tolist() == list(range(8))
    assert plan.row_source.tolist() == [0] * 8


def test_of_equal_shards_the_first_is_the_source() -> None:
    halves = [Box((0, 0), (512, 256)), Box((512, 0), (512, 256))]
    leaf = LeafLayout(
        "w",
        ArraySpec((1024, 256), "float32"),
        16 * MIB,
        shards=tuple(map(Shard, [halves[1], halves[0], halves[0], halves[1]])),
    )
    assert plan_save([leaf], **SIZES).row_shard.tolist() == [1, 0]


def test_a_shard_that_reaches_past_its_piece_is_a_source_all_the_same() -> None:
    # The array is rows 3 to 7 of the leaf; the shard holds rows 1 to 9.
    shard = Shard(Box((1, 0), (8, 5)))
    found = source_of(ChunkGrid((4, 5), (2, 5)), (3, 0), (shard,))
    assert found.start.tolist() == [2 * 20, 4 * 20]
    assert found.shard.tolist() == [0, 0]
    # One chunk that is as large as the shard, and elsewhere.
    apart = (Shard(Box((0, 0), (3, 4))), Shard(Box((3, 0), (3, 4))))
    found = source_of(ChunkGrid((3, 4), (3, 4)), (2, 0), apart)
    assert found.start.tolist() == [-1]


def source_of(grid: ChunkGrid, offset: tuple[int, ...], shards: tuple[Shard, ...]) -> HeldChunks:
    layout = LeafLayout("w", ArraySpec((20, 5), "float32"), 4 * KIB, shards=shards)
    return HeldShards(layout, Holders()).chunks(grid, 4, offset)


def test_chunks_are_copied_from_the_shard_that_holds_them_whole() -> None:
    leaf = LeafLayout(
        "w",
        ArraySpec((96, 120), "complex128"),
        4 * KIB,
        shards=tuple(
            Shard(Box((a, c), (b - a, d - c)))
            for a, b in itertools.pairwise((0, 24, 48, 96))
            for c, d in itertools.pairwise((0, 40, 120))
        )
        * 2,
    )
    assert leaf.shards is not None
    plan = plan_save([leaf], **SIZES)
    assert len(plan.row_array) > 12 and (plan.row_source >= 0).any()
    for row, box in chunks_of(plan):
        if plan.row_source[row] >= 0:
            holder = next(n for n, shard in enumerate(leaf.shards) if shard.box.intersect(box))
            assert plan.row_shard[row] == holder


def test_small_sharded_leaves_are_one_chunk_gathered_from_their_shards() -> None:
    quarters = [Box((i, j), (50, 40)) for i in (0, 50) for j in (0, 40)]
    leaf = LeafLayout(
        "w", ArraySpec((100, 80), "float64"), 4 * KIB, shards=tuple(map(Shard, quarters))
    )
    plan = plan_save([leaf], **SIZES)
    assert plan.arrays.of(0).grid.chunk_shape == (100, 80)
    assert plan.row_source.tolist() == [-1]


# ---------------------------------------------------------------------------- pieces and ties

UNEVEN = tuple(
    Shard(Box((a, 0), (b - a, 300)), (i,))
    for i, (a, b) in enumerate(itertools.pairwise((0, 3001, 5000, 8001, 10_000)))
)
WHOLE = LeafLayout("a", ArraySpec((10_000, 300), "float32"), 16 * MIB)
IN_PIECES = WHOLE._replace(name="params.w", shards=UNEVEN)


def test_leaves_in_pieces_stand_among_others_in_leaf_order() -> None:
    plan = plan_save([WHOLE, IN_PIECES, WHOLE._replace(name="z", zstd_level=3)], **SIZES)
    arrays = plan.arrays
    assert arrays.names == ("a", *(f"params.w%~{i}" for i in range(4)), "z")
    assert arrays.leaf.tolist() == [0, 1, 1, 1, 1, 2]
    assert arrays.pieces == {1: range(1, 5)}
    assert [arrays.of(i).offset for i in range(6)] == [
        (0, 0),
        *((row, 0) for row in (0, 3001, 5000, 8001)),
        (0, 0),
    ]
    assert [arrays.of(i).spec.shape[0] for i in range(6)] == [10_000, *([3001, 1999] * 2), 10_000]
    assert plan.compressed == (5,)


def test_tied_leaves_share_all_pieces() -> None:
    tied = IN_PIECES._replace(name="head", tied_to=1, shards=None, zstd_level=3)
    again = tied._replace(name="again", tied_to=2)
    plan = plan_save([WHOLE, IN_PIECES, tied, again], **SIZES)
    arrays = plan.arrays
    assert arrays.pieces == {1: range(1, 5), 2: range(5, 9), 3: range(9, 13)}
    assert arrays.tied == {a: (a - 1) % 4 + 1 for a in range(5, 13)}
    for array, owner in arrays.tied.items():
        assert arrays.first_chunk[array] == arrays.first_chunk[owner]
        # Their spec is one, whatever the tied leaf asks for.
        assert arrays.of(array) is arrays.of(owner)
        assert array not in plan.row_array
    assert arrays.names[5:9] == tuple(f"head%~{i}" for i in range(4))


def test_the_name_of_a_piece_is_that_of_no_leaf() -> None:
    keys = ["w", "w%~0", "w%7E0", "", "%~0", "%", "w%", "w~0", "w" * 2000, "w" * 2001]
    names = array_names([(key,) for key in keys])
    plan = plan_save(
        [IN_PIECES._replace(name=name) for name in names],
        **SIZES,
    )
    assert len(set(plan.arrays.names) | set(names)) == 5 * len(keys)


def test_a_leaf_named_like_a_piece_is_refused() -> None:
    with pytest.raises(UsageError, match=r"two leaves .* 'params\.w%~2'"):
        plan_save([IN_PIECES, WHOLE._replace(name="params.w%~2")], **SIZES)


def test_an_explicit_chunk_shape_makes_one_array_of_any_shards_of_one_process() -> None:
    shards = tuple(Shard(shard.box) for shard in UNEVEN)
    leaf = IN_PIECES._replace(shards=shards, chunk_shape=(5000, 300))
    plan = plan_save([leaf], **SIZES)
    assert not plan.arrays.pieces
    assert plan.row_source.tolist() == [-1, -1]


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


def tiled(n: int) -> LeafLayout:
    """As many shards as chunks, n x n."""
    boxes = [Box((i * 8, j * 8), (8, 8)) for i in range(n) for j in range(n)]
    spec = ArraySpec((8 * n, 8 * n), "complex128")
    return LeafLayout("w", spec, 4 * KIB, shards=tuple(map(Shard, boxes)))


def uneven(n: int) -> LeafLayout:
    """Nearly as many pieces as shards."""
    cuts = [0, *(i * 16 + i * i % 7 for i in range(1, n)), n * 16]
    shards = tuple(Shard(Box((a, 0), (b - a, 2000))) for a, b in itertools.pairwise(cuts))
    return LeafLayout("w", ArraySpec((n * 16, 2000), "float64"), MIB, shards=shards)


@pytest.mark.parametrize(("make", "sizes"), [(tiled, (16, 64)), (uneven, (100, 1600))])
def test_the_cost_is_linear_in_the_shards(
    make: Callable[[int], LeafLayout], sizes: tuple[int, int]
) -> None:
    few, many = (operations(functools.partial(plan_save, [make(n)], **SIZES)) for n in sizes)
    assert many <= 17 * few


def test_nearly_every_uneven_shard_may_be_a_piece() -> None:
    assert len(plan_save([uneven(800)], **SIZES).arrays.names) > 400


def test_as_many_shards_as_chunks_are_told_apart() -> None:
    plan = plan_save([tiled(64)], **SIZES)
    assert plan.row_shard.tolist() == list(range(64 * 64))
    assert plan.row_source.tolist() == [0] * 64 * 64
