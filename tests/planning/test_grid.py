from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB, MIB
from asyncckpt.planning.grid import choose_grid
from asyncckpt.planning.overlap import runs_within
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard

DTYPE_NAMES = st.sampled_from(["bool", "bfloat16", "float32", "float64", "complex128"])
LENGTHS = st.one_of(
    st.integers(0, 6),
    st.integers(1, 64),
    st.sampled_from([97, 127, 251, 509, 1009, 4096, 50257, 65537, 1_000_003, 2**31 - 1]),
)
SHAPES = st.lists(LENGTHS, max_size=5).map(tuple)
TARGETS = st.sampled_from([1, 100, 4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB])


def count_limit(spec: ArraySpec, target: int, shards: int) -> float:
    return 4 * (spec.nbytes / target + shards)


def padding(shape: tuple[int, ...], grid: ChunkGrid) -> int:
    return grid.chunk_count * grid.chunk_size - math.prod(shape)


def is_run(part: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a box of shape `part` is a run of the C-order elements of `shape`."""
    cut = [i for i, (a, b) in enumerate(zip(part, shape, strict=True)) if a != b]
    return not cut or all(n == 1 for n in part[: cut[-1]])


def axis_intervals(draw: st.DrawFn, n: int) -> list[tuple[int, int]]:
    """One axis cut as a mesh would (ceil), evenly, twice (FSDP and TP), or anywhere."""
    way = draw(st.sampled_from(["ceil", "twice", "anywhere", "whole"]))
    edges = {0, n}
    if way in ("ceil", "twice"):
        cell = -(-n // draw(st.integers(1, 6)))
        edges |= set(range(0, n, max(1, cell)))
    if way == "twice":
        parts = draw(st.integers(2, 3))
        for start, stop in zip(sorted(edges), sorted(edges)[1:], strict=False):
            step = -(-(stop - start) // parts)
            edges |= set(range(start, stop, max(1, step)))
    if way == "anywhere":
        edges |= set(draw(st.lists(st.integers(0, n), max_size=4)))
    ordered = sorted(edges)
    return list(itertools.pairwise(ordered))


@st.composite
def sharded_specs(draw: st.DrawFn) -> tuple[ArraySpec, tuple[Shard, ...]]:
    shape = tuple(
        draw(
            st.lists(
                st.one_of(st.integers(1, 40), st.sampled_from([97, 1024, 6283, 50257])),
                min_size=1,
                max_size=3,
            )
        )
    )
    boxes: list[list[tuple[int, int]]] = [[]]
    for n in shape:
        intervals = axis_intervals(draw, n)
        boxes = [[*box, interval] for box in boxes for interval in intervals]
    shards = [
        Shard(Box(tuple(a for a, _ in box), tuple(b - a for a, b in box)), (i,))
        for i, box in enumerate(boxes)
    ]
    shards.append(Shard(Box((0,) * len(shape), (0, *shape[1:])), (99,)))
    shards.extend(draw(st.lists(st.sampled_from(shards), max_size=3)))
    return ArraySpec(shape, draw(DTYPE_NAMES)), tuple(draw(st.permutations(shards)))


@given(SHAPES, DTYPE_NAMES, TARGETS)
@example((), "float32", 1)
@example((0,), "float32", 1)
@example((29, 29, 29, 29, 29), "bool", 7 * 29**3)
@example((2, 3, 1_000_003), "float32", 2 * MIB)
@example((11, 600_000), "float32", 16_800_000)
@example((47, 100_000), "float32", 2_000_000)
@example((2**31 - 1,), "complex128", 16 * MIB)
def test_padding_and_chunk_count_stay_within_their_limits(
    shape: tuple[int, ...], dtype: str, target: int
) -> None:
    spec = ArraySpec(shape, dtype)
    ((offset, grid),) = choose_grid(spec, None, chunk_nbytes=target)
    assert offset == (0,) * len(shape)
    assert grid.shape == shape
    assert all(c >= 1 for c in grid.chunk_shape)
    assert grid.chunk_count <= count_limit(spec, target, 1)
    if spec.nbytes > MIB:
        assert padding(shape, grid) <= 0.02 * spec.size


@given(SHAPES, DTYPE_NAMES, TARGETS)
def test_an_array_up_to_the_target_is_one_chunk_without_padding(
    shape: tuple[int, ...], dtype: str, target: int
) -> None:
    spec = ArraySpec(shape, dtype)
    ((_, grid),) = choose_grid(spec, None, chunk_nbytes=target)
    if 0 < spec.nbytes <= target:
        assert grid.chunk_shape == shape


@given(SHAPES, DTYPE_NAMES, TARGETS)
def test_chunks_over_the_target_are_rare_exceptions(
    shape: tuple[int, ...], dtype: str, target: int
) -> None:
    spec = ArraySpec(shape, dtype)
    ((_, grid),) = choose_grid(spec, None, chunk_nbytes=target)
    if grid.chunk_size * spec.itemsize > max(target, spec.itemsize):
        # Only where some axis is too short to be cut evenly within 2 %.
        assert any(1 < n < 2500 for n in shape)


@pytest.mark.parametrize(
    ("shape", "dtype", "target", "chunk"),
    [
        ((), "float32", 16 * MIB, ()),
        ((0,), "float32", 16 * MIB, (1,)),
        ((3, 0, 5), "float32", 16 * MIB, (3, 1, 5)),
        ((1000,), "float32", 16 * MIB, (1000,)),
        # 40 MiB: three even parts, not 16 + 16 + 8.
        ((10 * MIB,), "float32", 16 * MIB, (3_495_254,)),
        ((50257, 768), "float32", 16 * MIB, (5026, 768)),
        # One row is larger than the target: the next axis is cut.
        ((4, 16 * MIB), "float32", 16 * MIB, (1, 4 * MIB)),
        # Three rows of which two fit: one row per chunk, or a third would be padding.
        ((3, 2 * MIB), "float32", 16 * MIB, (1, 2 * MIB)),
        # Prime number of large rows, seven fit: a band of all rows is cut along the next axis.
        ((29, 1000, 600), "float32", 16_800_000, (29, 200, 600)),
        # No other cut is left within the limits: longer than the target.
        ((29, 29, 29, 29, 29), "bool", 7 * 29**3, (1, 29, 29, 29, 29)),
    ],
)
def test_chunks_are_cut_evenly_along_the_leading_axis(
    shape: tuple[int, ...], dtype: str, target: int, chunk: tuple[int, ...]
) -> None:
    ((_, grid),) = choose_grid(ArraySpec(shape, dtype), None, chunk_nbytes=target)
    assert grid.chunk_shape == chunk


@given(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.data())
def test_chunks_tile_every_array_exactly_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    spec = ArraySpec(shape, "float32")
    ((_, grid),) = choose_grid(spec, None, chunk_nbytes=data.draw(st.integers(1, 200)))
    seen = np.zeros(shape, int)
    for cell in grid.cells():
        seen[grid.box(cell).slices()] += 1
    assert (seen == 1).all()


@given(SHAPES, DTYPE_NAMES, st.sampled_from([64 * KIB, MIB]))
def test_a_chunk_is_a_contiguous_run_of_its_array(
    shape: tuple[int, ...], dtype: str, target: int
) -> None:
    ((_, grid),) = choose_grid(ArraySpec(shape, dtype), None, chunk_nbytes=target)
    band = [c for c in grid.chunk_shape if c > 1]
    if grid.chunk_count and not is_run(grid.chunk_shape, shape):
        # The exception: all rows of a short axis, and a cut through a later one.
        assert len(band) >= 2
        assert any(1 < n == c < 2500 for n, c in zip(shape, grid.chunk_shape, strict=True))


# ---------------------------------------------------------------------------- explicit chunks


def test_an_explicit_chunk_shape_wins() -> None:
    spec = ArraySpec((10, 10), "float32")
    assert choose_grid(spec, None, chunk_nbytes=1, chunk_shape=(3, 20)) == (
        ((0, 0), ChunkGrid((10, 10), (3, 20))),
    )


@pytest.mark.parametrize(
    ("chunk_shape", "text"),
    [
        ((3,), r"rank 1, but float32\[10,10\] has rank 2"),
        ((3, 3, 3), "rank 3, but"),
    ],
)
def test_a_chunk_shape_that_does_not_fit_is_refused(
    chunk_shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        choose_grid(ArraySpec((10, 10), "float32"), None, chunk_nbytes=1, chunk_shape=chunk_shape)


def test_a_rank_error_states_both_ranks() -> None:
    with pytest.raises(UsageError) as caught:
        choose_grid(ArraySpec((4, 4), "bool"), None, chunk_nbytes=1, chunk_shape=(1,))
    assert (caught.value.expected, caught.value.found) == (2, 1)


def test_an_explicit_chunk_never_straddles_processes() -> None:
    spec = ArraySpec((1000, 100), "float32")
    halves = [Box((0, 0), (500, 100)), Box((500, 0), (500, 100))]
    apart = tuple(Shard(b, (i,)) for i, b in enumerate(halves))
    choose_grid(spec, apart, chunk_nbytes=1, chunk_shape=(250, 100))
    with pytest.raises(UsageError, match="along axis 0 the shards end at"):
        choose_grid(spec, apart, chunk_nbytes=1, chunk_shape=(300, 100))
    together = tuple(Shard(b, (0, i)) for i, b in enumerate(halves))
    choose_grid(spec, together, chunk_nbytes=1, chunk_shape=(300, 100))


def test_an_error_about_the_ends_of_many_shards_lists_a_few() -> None:
    spec = ArraySpec((3000, 100), "float32")
    shards = tuple(Shard(Box((3 * i, 0), (3, 100)), (i,)) for i in range(1000))
    with pytest.raises(UsageError, match=r"end at 3, 6, .* 24 and 991 more, so chunks of 2"):
        choose_grid(spec, shards, chunk_nbytes=1, chunk_shape=(2, 100))


# ------------------------------------------------------------------------------------- shards


@given(sharded_specs(), TARGETS)
def test_no_chunk_crosses_a_shard_and_the_limits_hold(
    sharded: tuple[ArraySpec, tuple[Shard, ...]], target: int
) -> None:
    spec, shards = sharded
    boxes = {s.box for s in shards if s.box.size}
    pieces = choose_grid(spec, shards, chunk_nbytes=target)
    covered = 0
    count = 0
    extra = 0
    for offset, grid in pieces:
        assert Box(offset, grid.shape).intersect(Box.whole(spec.shape)) == Box(offset, grid.shape)
        covered += math.prod(grid.shape)
        count += grid.chunk_count
        extra += padding(grid.shape, grid)
    assert covered == spec.size
    if len(boxes) > 1 and spec.nbytes <= 64 * KIB:
        assert count == 1
        return
    assert count <= count_limit(spec, target, len(boxes))
    if spec.nbytes > MIB:
        assert extra <= 0.02 * spec.size
    if count * len(boxes) > 20_000:
        return
    for offset, grid in pieces:
        for cell in grid.cells():
            box = grid.box(cell)
            at = Box(tuple(o + p for o, p in zip(offset, box.offset, strict=True)), box.shape)
            assert any(b.intersect(at) == at for b in boxes)


@given(sharded_specs(), st.data())
def test_pieces_tile_the_leaf_exactly_once(
    sharded: tuple[ArraySpec, tuple[Shard, ...]], data: st.DataObject
) -> None:
    spec, shards = sharded
    pieces = choose_grid(spec, shards, chunk_nbytes=data.draw(TARGETS))
    boxes = [Box(offset, grid.shape) for offset, grid in pieces][:60]
    for i, box in enumerate(boxes):
        assert all(box.intersect(other) is None for other in boxes[:i])


def tiles(shape: tuple[int, ...], *cuts: list[int]) -> tuple[Shard, ...]:
    boxes: list[list[tuple[int, int]]] = [[]]
    for n, axis in zip(shape, cuts, strict=True):
        edges = [0, *axis, n]
        boxes = [[*b, pair] for b in boxes for pair in itertools.pairwise(edges)]
    return tuple(
        Shard(Box(tuple(a for a, _ in b), tuple(z - a for a, z in b)), (i,))
        for i, b in enumerate(boxes)
    )


def test_small_sharded_leaves_are_one_chunk() -> None:
    spec = ArraySpec((128, 128), "float32")
    ((_, grid),) = choose_grid(spec, tiles((128, 128), [64], [64]), chunk_nbytes=16 * MIB)
    assert grid.chunk_shape == (128, 128)


def test_regular_shards_are_chunks_subdivided_exactly() -> None:
    spec = ArraySpec((8192, 4096), "float32")
    shards = tiles(spec.shape, [2048, 4096, 6144], [2048])
    ((_, grid),) = choose_grid(spec, shards, chunk_nbytes=16 * MIB)
    assert grid.chunk_shape == (2048, 2048)
    ((_, grid),) = choose_grid(spec, shards, chunk_nbytes=6 * MIB)
    assert grid.chunk_shape == (512, 2048)


def test_a_short_last_shard_is_padded_within_the_limit() -> None:
    spec = ArraySpec((10_000, 1000), "float32")
    ((_, grid),) = choose_grid(
        spec, tiles(spec.shape, [3000, 6000, 9000], []), chunk_nbytes=16 * MIB
    )
    assert grid.chunk_shape == (1000, 1000)


def test_composed_cuts_take_the_finest_common_grid() -> None:
    spec = ArraySpec((1200, 1000), "float32")
    ((_, grid),) = choose_grid(spec, tiles(spec.shape, [400, 600, 1000], []), chunk_nbytes=MIB * 16)
    assert grid.chunk_shape == (200, 1000)


def test_uneven_composed_cuts_become_pieces() -> None:
    # Linear(3, 10) of PROCESSES on 2 × 2, larger: rows 0, 3k+1, 5k, 8k+1, 10k.
    spec = ArraySpec((10_000, 300), "float32")
    pieces = choose_grid(spec, tiles(spec.shape, [3001, 5000, 8001], []), chunk_nbytes=16 * MIB)
    assert len(pieces) > 1
    assert [offset for offset, _ in pieces] == sorted(offset for offset, _ in pieces)
    assert sum(g.chunk_count for _, g in pieces) <= 4 * (12e6 / (16 * MIB) + 4)


def test_shards_without_a_common_product_grid_are_pieces_of_their_own() -> None:
    n = 640
    boxes = [Box((i, 0), (1, i + 1)) for i in range(n - 1)]
    boxes += [Box((i, i + 1), (1, n - i - 1)) for i in range(n - 1)]
    boxes += [Box((n - 1, 0), (1, n))]
    spec = ArraySpec((n, n), "float32")
    pieces = choose_grid(spec, tuple(Shard(b) for b in boxes), chunk_nbytes=MIB)
    assert sorted((o, g.shape) for o, g in pieces) == sorted((b.offset, b.shape) for b in boxes)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (5, 10))],
        [Box((0, 0), (5, 10)), Box((4, 0), (6, 10))],
        [Box((0, 0), (5, 10)), Box((5, 0), (6, 10))],
        # As many elements as the array, but some twice and some not at all.
        [Box((0, 0), (5, 10)), Box((4, 0), (5, 10))],
    ],
)
def test_shards_that_do_not_tile_the_leaf_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(ValueError, match="do not tile"):
        choose_grid(ArraySpec((10, 10), "float32"), tuple(Shard(b) for b in boxes), chunk_nbytes=64)


# --------------------------------------------------------------------------------------- runs


def small_cases(lengths: tuple[int, ...], rank: int) -> Iterator[tuple[ChunkGrid, Box]]:
    """All shapes, chunk shapes and boxes of these lengths."""
    for shape in itertools.product(lengths, repeat=rank):
        for chunk in itertools.product(lengths, repeat=rank):
            spans = [[(a, b - a) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
            for box in itertools.product(*spans):
                yield (
                    ChunkGrid(shape, chunk),
                    Box(tuple(o for o, _ in box), tuple(n for _, n in box)),
                )


@pytest.mark.parametrize(
    ("lengths", "rank"), [((), 0), ((1, 2, 3, 4), 1), ((1, 2, 3), 2), ((1, 2), 3)]
)
def test_a_run_is_found_exactly_where_payload_and_box_agree(
    lengths: tuple[int, ...], rank: int
) -> None:
    for grid, box in small_cases(lengths, rank):
        rows = np.arange(grid.chunk_count)
        starts, nbytes = runs_within(grid, 8, rows, box.offset, box.shape)
        values = np.arange(math.prod(grid.shape), dtype=np.int64).reshape(grid.shape)
        wanted = values[box.slices()].tobytes()
        for row, cell in enumerate(grid.cells()):
            part = grid.box(cell)
            payload = np.full(grid.chunk_shape, -1, np.int64)
            payload[tuple(slice(n) for n in part.shape)] = values[part.slices()]
            held = values[part.slices()].tobytes()
            assert nbytes[row] == len(held)
            at = wanted.find(held)
            run = box.intersect(part) == part and at >= 0 and payload.tobytes().startswith(held)
            assert starts[row] == (at if run else -1)
