from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.options import KIB, MIB
from asyncckpt.planning import restore as planning
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.restore import (
    Part,
    Requests,
    RestorePlan,
    StoredArrays,
    cells_overlapping,
    intersection,
)
from asyncckpt.planning.save import plan_save
from asyncckpt.spec import ArraySpec, Box, ChunkGrid


@dataclass(frozen=True)
class StoredArray:
    """One array of a checkpoint; `first_row` is the row of its first chunk."""

    grid: ChunkGrid
    itemsize: int
    compressed: bool
    first_row: int


def columns_of(arrays: Sequence[StoredArray]) -> StoredArrays:
    kinds: dict[tuple[ChunkGrid, int, bool], int] = {}
    kind = [kinds.setdefault((a.grid, a.itemsize, a.compressed), len(kinds)) for a in arrays]
    first_row = [a.first_row for a in arrays]
    return StoredArrays(list(kinds), np.array(kind, int), np.array(first_row, int))


class Request(NamedTuple):
    """One wanted box of one stored array."""

    array: int
    box: Box | None
    contiguous: bool


def requests_of(requests: Sequence[Request]) -> Requests:
    return Requests(
        np.array([request.array for request in requests], int),
        [request.box for request in requests],
        np.array([request.contiguous for request in requests], bool),
    )


def plan_restore(
    arrays: Sequence[StoredArray], requests: Sequence[Request], **facts: Any
) -> RestorePlan:
    for name in ("row_file", "row_offset", "row_nbytes"):
        facts[name] = np.array(facts[name], np.int64)
    return planning.plan_restore(columns_of(arrays), requests_of(requests), **facts)


SIZES = {"slot_nbytes": 8 * MIB, "gap_nbytes": 64 * KIB, "direct_nbytes": MIB}


@st.composite
def grids(draw: st.DrawFn) -> ChunkGrid:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    return ChunkGrid(shape, tuple(draw(st.integers(1, 7)) for _ in shape))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(
        offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    )


class Stored:
    """Arrays of bytes of elements laid out in files with gaps, one row per chunk."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.arrays: list[StoredArray] = []
        self.values: list[np.ndarray] = []
        self.payloads: list[bytes] = []
        for _ in range(draw(st.integers(1, 4))):
            grid = draw(grids())
            kind = np.dtype(draw(st.sampled_from(["u1", "u4", "u8"])))
            size = math.prod(grid.shape)
            values = (np.arange(1, size + 1) % 251).astype(kind).reshape(grid.shape)
            self.values.append(values)
            self.arrays.append(
                StoredArray(grid, kind.itemsize, draw(st.booleans()), len(self.payloads))
            )
            for cell in grid.cells():
                box = grid.box(cell)
                payload = np.full(grid.chunk_shape, 255, kind)
                payload[tuple(slice(n) for n in box.shape)] = values[box.slices()]
                self.payloads.append(payload.tobytes())
        self.files = [bytearray() for _ in range(3)]
        self.row_file: list[int] = []
        self.row_offset: list[int] = []
        for payload in self.payloads:
            file = draw(st.integers(-1, 2))
            self.row_file.append(file)
            if file < 0:
                self.row_offset.append(-1)
                continue
            self.files[file] += bytes(draw(st.integers(0, 20)))
            self.row_offset.append(len(self.files[file]))
            self.files[file] += payload + b"CRC!"
        self.row_nbytes = [len(p) + 4 for p in self.payloads]

    def plan(self, requests: list[Request], **sizes: int) -> RestorePlan:
        return plan_restore(
            self.arrays,
            requests,
            row_file=self.row_file,
            row_offset=self.row_offset,
            row_nbytes=self.row_nbytes,
            **sizes,
        )


@st.composite
def restores(draw: st.DrawFn) -> tuple[Stored, list[Request], dict[str, int]]:
    stored = Stored(draw)
    requests = []
    for _ in range(draw(st.integers(0, 5))):
        array = draw(st.integers(0, len(stored.arrays) - 1))
        box = draw(st.one_of(st.none(), boxes_in(stored.arrays[array].grid.shape)))
        requests.append(Request(array, box, draw(st.booleans())))
    sizes = {
        "slot_nbytes": draw(st.integers(1, 200)),
        "gap_nbytes": draw(st.integers(0, 30)),
        "direct_nbytes": draw(st.sampled_from([0, 20, 60, 10**6])),
    }
    return stored, requests, sizes


def parts_of(plan: RestorePlan) -> Iterator[Part]:
    yield from plan.inline
    for batch in plan.batches:
        yield from batch.parts


def execute(
    stored: Stored, requests: list[Request], plan: RestorePlan
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The requested boxes as the plan fills them, and how often each element was written."""
    targets, hits = [], []
    for array, box, _ in requests:
        whole = stored.values[array]
        shape = whole.shape if box is None else box.shape
        targets.append(np.zeros(shape, whole.dtype))
        hits.append(np.zeros(shape, int))

    def fill(part: Part, payload: bytes) -> None:
        array, box, _ = requests[part.request]
        held = stored.arrays[array]
        target, hit = targets[part.request], hits[part.request]
        if part.direct >= 0:
            memory = target.reshape(-1).view(np.uint8)
            memory[part.direct : part.direct + part.nbytes] = np.frombuffer(
                payload[: part.nbytes], np.uint8
            )
            first = part.direct // held.itemsize
            hit.reshape(-1)[first : first + part.nbytes // held.itemsize] += 1
            return
        if box is None:
            box = Box.whole(held.grid.shape)
        source, place = intersection(held.grid, part.row - held.first_row, box)
        chunk = np.frombuffer(payload, target.dtype).reshape(held.grid.chunk_shape)
        target[place] = chunk[source]
        hit[place] += 1

    for part in plan.inline:
        assert stored.row_file[part.row] == -1
        fill(part, stored.payloads[part.row])
    for batch in plan.batches:
        data = bytes(stored.files[batch.file][batch.offset : batch.offset + batch.nbytes])
        for part in batch.parts:
            assert stored.row_file[part.row] == batch.file
            at = stored.row_offset[part.row] - batch.offset
            payload = data[at : at + stored.row_nbytes[part.row]]
            assert payload.endswith(b"CRC!")
            fill(part, payload[:-4])
    return targets, hits


@given(restores())
def test_every_requested_element_is_covered_exactly_once(
    restore: tuple[Stored, list[Request], dict[str, int]],
) -> None:
    stored, requests, sizes = restore
    targets, hits = execute(stored, requests, stored.plan(requests, **sizes))
    for (array, box, _), target, hit in zip(requests, targets, hits, strict=True):
        wanted = stored.values[array] if box is None else stored.values[array][box.slices()]
        assert (hit == 1).all()
        assert (target == wanted).all()


@given(restores())
def test_every_row_is_read_once(restore: tuple[Stored, list[Request], dict[str, int]]) -> None:
    stored, requests, sizes = restore
    plan = stored.plan(requests, **sizes)
    owners: dict[int, set[int]] = {}
    for number, batch in enumerate(plan.batches):
        for part in batch.parts:
            owners.setdefault(part.row, set()).add(number)
    assert all(len(batches) == 1 for batches in owners.values())
    rows = {part.row for part in parts_of(plan)}
    assert len(plan.rows) == len(rows)
    assert plan.read_nbytes == sum(batch.nbytes for batch in plan.batches)
    ranges = [(b.file, b.offset, b.offset + b.nbytes) for b in plan.batches]
    assert ranges == sorted(ranges)
    for (file, _, end), (other, begin, _) in itertools.pairwise(ranges):
        assert file != other or end <= begin


@given(restores())
def test_batches_keep_to_their_limits(
    restore: tuple[Stored, list[Request], dict[str, int]],
) -> None:
    stored, requests, sizes = restore
    for batch in stored.plan(requests, **sizes).batches:
        rows = sorted({p.row for p in batch.parts}, key=lambda r: stored.row_offset[r])
        direct = [p for p in batch.parts if p.direct >= 0]
        assert len(rows) == 1 or (not direct and batch.nbytes <= sizes["slot_nbytes"])
        assert batch.offset == stored.row_offset[rows[0]]
        for row, after in itertools.pairwise(rows):
            gap = stored.row_offset[after] - stored.row_offset[row] - stored.row_nbytes[row]
            assert 0 <= gap <= sizes["gap_nbytes"]


@given(restores())
def test_only_large_unshared_plain_chunks_go_direct(
    restore: tuple[Stored, list[Request], dict[str, int]],
) -> None:
    stored, requests, sizes = restore
    plan = stored.plan(requests, **sizes)
    uses: dict[int, int] = {}
    for part in parts_of(plan):
        uses[part.row] = uses.get(part.row, 0) + 1
    for part in parts_of(plan):
        assert (part.direct < 0) == (part.nbytes < 0)
        if part.direct >= 0:
            request = requests[part.request]
            assert request.contiguous
            assert not stored.arrays[request.array].compressed
            assert uses[part.row] == 1
            assert stored.row_file[part.row] >= 0
            assert stored.row_nbytes[part.row] >= sizes["direct_nbytes"]


@given(grids(), st.data())
def test_overlapping_cells_are_those_that_intersect(grid: ChunkGrid, data: st.DataObject) -> None:
    box = data.draw(boxes_in(grid.shape))
    expected = [i for i, cell in enumerate(grid.cells()) if grid.box(cell).intersect(box)]
    assert cells_overlapping(grid, box).tolist() == expected
    for row in range(grid.chunk_count):
        if row not in expected:
            with pytest.raises(ValueError, match="holds nothing"):
                intersection(grid, row, box)


def test_large_chunks_go_straight_into_contiguous_targets() -> None:
    grid = ChunkGrid((10, MIB // 8), (4, MIB // 8))
    sizes = {
        "row_file": [0, 0, 0],
        "row_offset": [0, 20 * MIB, 40 * MIB],
        "row_nbytes": [2 * MIB + 4] * 3,
    }

    def parts(grid: ChunkGrid, box: Box | None = None) -> list[Part]:
        stored, wanted = StoredArray(grid, 4, False, 0), Request(0, box, True)
        batches = plan_restore([stored], [wanted], **sizes, **SIZES).batches
        assert all(b.direct == (part.direct >= 0) for b in batches for part in b.parts)
        return [part for b in batches for part in b.parts]

    # More than 1 MiB behind the last payload is not wanted: too much to be read with it.
    assert parts(grid) == [Part(0, 0, 0, 2 * MIB), Part(1, 0, 2 * MIB, 2 * MIB), Part(2, 0, -1, -1)]
    # Less is read, but does not go into the target.
    grid = replace(grid, shape=(11, MIB // 8))
    assert parts(grid)[2] == Part(2, 0, 4 * MIB, 3 * MIB // 2)
    assert parts(grid, Box((4, 0), (7, MIB // 8))) == [
        Part(1, 0, 0, 2 * MIB),
        Part(2, 0, 2 * MIB, 3 * MIB // 2),
    ]


@pytest.mark.parametrize(
    ("compressed", "contiguous", "box"),
    [
        (True, True, None),
        (False, False, None),
        (False, True, Box((1, 0), (3, MIB))),
        (False, True, Box((0, 0), (4, 5))),
    ],
)
def test_chunks_that_are_not_wanted_as_they_are_go_through_a_buffer(
    compressed: bool, contiguous: bool, box: Box | None
) -> None:
    plan = plan_restore(
        [StoredArray(ChunkGrid((4, MIB), (4, MIB)), 4, compressed, 0)],
        [Request(0, box, contiguous)],
        row_file=[0],
        row_offset=[0],
        row_nbytes=[16 * MIB + 4],
        **SIZES,
    )
    assert [p for b in plan.batches for p in b.parts] == [Part(0, 0, -1, -1)]


def test_long_rows_that_are_decoded_are_batches_of_their_own() -> None:
    """Chunks of one batch are decoded one after the other, in one thread."""
    plan = plan_restore(
        [StoredArray(ChunkGrid((4, 4 * MIB), (1, 4 * MIB)), 1, True, 0)],
        [Request(0, None, True)],
        row_file=[0] * 4,
        row_offset=[0, MIB, 2 * MIB, 3 * MIB - 1],
        row_nbytes=[MIB, MIB, MIB - 1, MIB - 1],
        **SIZES,
    )
    assert [[part.row for part in batch.parts] for batch in plan.batches] == [[0], [1], [2, 3]]


def test_adjacent_chunks_that_go_straight_into_targets_share_batches() -> None:
    """Of at most 1 MiB; nothing else is in these, and nothing in them is read twice."""
    size, count = 300 * KIB, 7
    every = [StoredArray(ChunkGrid((size,), (size,)), 1, False, row) for row in range(count)]
    offsets = [row * (size + 4) for row in range(count)]
    offsets[-1] = offsets[-2] + size  # a foreign file, in which the last two overlap
    plan = plan_restore(
        every,
        [Request(row, None, row != 4) for row in range(count)],
        row_file=[0] * count,
        row_offset=offsets,
        row_nbytes=[size + 4] * count,
        **{**SIZES, "direct_nbytes": 64 * KIB},
    )
    found = [(batch.direct, [part.row for part in batch.parts]) for batch in plan.batches]
    assert found == [(True, [0, 1, 2]), (True, [3]), (False, [4]), (True, [5]), (True, [6])]


def test_a_row_that_two_requests_want_is_read_once_through_a_buffer() -> None:
    plan = plan_restore(
        [StoredArray(ChunkGrid((MIB,), (MIB,)), 4, False, 0)],
        [Request(0, None, True), Request(0, None, True)],
        row_file=[0],
        row_offset=[4096],
        row_nbytes=[4 * MIB + 4],
        **SIZES,
    )
    assert plan.read_nbytes == 4 * MIB + 4
    assert [p for b in plan.batches for p in b.parts] == [Part(0, 0, -1, -1), Part(0, 1, -1, -1)]


def test_a_large_chunk_parts_the_small_ones_around_it() -> None:
    sizes = {"slot_nbytes": 1000, "gap_nbytes": 10, "direct_nbytes": 50}
    plan = plan_restore(
        [StoredArray(ChunkGrid((6,), (1,)), 1, False, 0)],
        [Request(0, None, True)],
        row_file=[0, 0, 0, 0, 0, 1],
        row_offset=[0, 20, 40, 90, 110, 130],
        row_nbytes=[20, 20, 50, 20, 20, 20],
        **sizes,
    )
    assert [(b.file, b.offset, b.nbytes, [p.row for p in b.parts]) for b in plan.batches] == [
        (0, 0, 40, [0, 1]),
        (0, 40, 50, [2]),
        (0, 90, 40, [3, 4]),
        (1, 130, 20, [5]),
    ]


def test_rows_in_the_index_are_not_read() -> None:
    plan = plan_restore(
        [
            StoredArray(ChunkGrid((), ()), 4, False, 0),
            StoredArray(ChunkGrid((9,), (9,)), 4, False, 1),
        ],
        [Request(1, None, True), Request(0, None, True)],
        row_file=[-1, 0],
        row_offset=[-1, 64],
        row_nbytes=[8, 40],
        **SIZES,
    )
    assert tuple(plan.inline) == (Part(0, 1, -1, -1),)
    assert [(b.file, b.offset, b.nbytes) for b in plan.batches] == [(0, 64, 40)]


def test_requests_outside_their_array_are_refused() -> None:
    array = StoredArray(ChunkGrid((4, 4), (2, 2)), 4, False, 0)
    columns = {"row_file": [0] * 4, "row_offset": [0] * 4, "row_nbytes": [20] * 4}
    for box in (Box((0, 0), (5, 4)), Box((-1, 0), (2, 2)), Box((0,), (4,))):
        with pytest.raises(ValueError, match="not a part of an array"):
            plan_restore([array], [Request(0, box, True)], **columns, **SIZES)


def test_no_request_reads_nothing() -> None:
    plan = plan_restore([], [], row_file=[], row_offset=[], row_nbytes=[], **SIZES)
    assert (plan.batches, tuple(plan.inline), plan.read_nbytes, len(plan.rows)) == ((), (), 0, 0)


# --------------------------------------------------------------------------------- resharding


def tile_shape(shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // m) for n, m in zip(shape, mesh, strict=True))


@pytest.mark.parametrize(
    ("shape", "saved", "wanted", "items"),
    [
        ((128, 64), (4, 1), (2, 2), 8),
        ((128, 64), (2, 2), (4, 1), 8),
        ((128, 64), (4, 4), (2, 2), 16),
        ((128, 64), (2, 2), (4, 4), 16),
        ((10, 6), (4, 1), (2, 2), 10),
        ((10, 6), (2, 2), (4, 1), 10),
        ((10, 6), (4, 4), (2, 2), 20),
        ((10, 6), (2, 2), (4, 4), 20),
        ((5, 3), (4, 1), (2, 2), 8),
        ((5, 3), (2, 2), (4, 1), 8),
        ((5, 3), (4, 4), (2, 2), 12),
        ((5, 3), (2, 2), (4, 4), 12),
    ],
)
def test_resharding_reads_one_item_per_overlapping_pair(
    shape: tuple[int, int], saved: tuple[int, int], wanted: tuple[int, int], items: int
) -> None:
    grid = ChunkGrid(shape, tile_shape(shape, saved))
    target = ChunkGrid(shape, tile_shape(shape, wanted))
    nbytes = grid.chunk_size * 4 + 4
    plan = plan_restore(
        [StoredArray(grid, 4, False, 0)],
        [Request(0, target.box(cell), True) for cell in target.cells()],
        row_file=[0] * grid.chunk_count,
        row_offset=np.arange(grid.chunk_count) * nbytes,
        row_nbytes=[nbytes] * grid.chunk_count,
        **SIZES,
    )
    assert sum(1 for _ in parts_of(plan)) == items
    assert plan.read_nbytes == grid.chunk_count * nbytes


# ------------------------------------------------------------------------------------- limits


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 10, 257, 5000, 300_000, 5_000_000]), st.integers(1, 9)),
        max_size=40,
    )
)
def test_reading_the_same_layout_reads_what_is_stored(shapes: list[tuple[int, int]]) -> None:
    leaves = [
        LeafLayout(f"a{i}", ArraySpec(shape, "float32"), 16 * MIB) for i, shape in enumerate(shapes)
    ]
    saved = plan_save(
        leaves,
        data_file_nbytes=1 << 30,
        slot_nbytes=8 * MIB,
        page_nbytes=4096,
        aligned_chunk_nbytes=MIB,
        inline_nbytes=1024,
    )
    arrays = [
        StoredArray(saved.arrays.of(array).grid, 4, False, int(first))
        for array, first in enumerate(saved.arrays.first_chunk)
    ]
    plan = plan_restore(
        arrays,
        [Request(i, None, True) for i in range(len(leaves))],
        row_file=saved.row_file,
        row_offset=saved.row_offset,
        row_nbytes=saved.row_payload + 4,
        **SIZES,
    )
    stored = int((saved.row_payload + 4)[saved.row_file >= 0].sum())
    assert stored <= plan.read_nbytes <= 1.01 * stored + 8 * len(saved.row_array)
    assert len(plan.rows) == len(saved.row_array)
    for batch in plan.batches:
        if len(batch.parts) == 1 and batch.nbytes > MIB:
            assert batch.parts[0].direct >= 0
            assert batch.offset % 4096 == 2048


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
    def plan(n: int) -> Callable[[], object]:
        arrays = [StoredArray(ChunkGrid((7 + i % 5,), (10,)), 4, False, 2 * i) for i in range(n)]
        requests = requests_of([Request(i, None, True) for i in range(n)])
        columns = (np.zeros(2 * n, int), np.arange(2 * n) * 64, np.full(2 * n, 44))
        stored = columns_of(arrays)
        return lambda: planning.plan_restore(
            stored,
            requests,
            row_file=columns[0],
            row_offset=columns[1],
            row_nbytes=columns[2],
            **SIZES,
        )

    few, many = operations(plan(2000)), operations(plan(16_000))
    assert many <= 8.5 * few
    assert many <= 5 * 16_000


def test_resharding_costs_what_overlaps_and_not_all_pairs() -> None:
    def plan(n: int) -> Callable[[], object]:
        grid = ChunkGrid((1024, 1024), (1024 // n, 1024 // n))
        target = ChunkGrid((1024, 1024), (1024 // n, 1024 // n))
        requests = [Request(0, target.box(cell), True) for cell in target.cells()]
        rows = np.arange(n * n)
        return lambda: plan_restore(
            [StoredArray(grid, 4, False, 0)],
            requests,
            row_file=rows * 0,
            row_offset=rows * 10**6,
            row_nbytes=rows * 0 + 10**6,
            **SIZES,
        )

    # 16 times the tiles on both sides: 256 times the pairs.
    assert operations(plan(16)) <= 20 * operations(plan(4))


def test_many_boxes_of_one_array_are_planned_together() -> None:
    """A reader of many small chunks asks for each by its own box."""
    n = 4096
    grid = ChunkGrid((n, 16), (1, 16))
    boxes = [Box((row, 0), (1, 16)) for row in range(n)]
    stored = columns_of([StoredArray(grid, 4, False, 0)])
    requests = requests_of([Request(0, box, True) for box in boxes])
    rows = np.arange(n)

    def plan() -> object:
        return planning.plan_restore(
            stored,
            requests,
            row_file=rows * 0,
            row_offset=rows * 68,
            row_nbytes=rows * 0 + 68,
            **SIZES,
        )

    assert operations(plan) <= 10 * n


def test_a_small_box_of_a_fine_grid_looks_at_its_own_cells_only() -> None:
    grid = ChunkGrid((10**9, 10**9), (10, 10))
    cells = cells_overlapping(grid, Box((5 * 10**8, 7), (10, 10)))
    assert cells.tolist() == [5 * 10**7 * 10**8 + i for i in (0, 1)]
