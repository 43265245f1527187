"""Plans of several processes: together they are the whole, and each knows only its own part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB, MIB
from asyncckpt.planning.grid import choose_grid
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.spec import ArraySpec, Box, Partition, Shard
from benchmarks import workloads
from tests.planning.jobs import SIZES, mesh_leaf, mesh_shards

MESHES = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 4), (2, 2, 2)]


@dataclasses.dataclass
class Job:
    """The leaves of a job as every process sees them, and the shards of each."""

    leaves: list[list[LeafLayout]]
    shards: list[Sequence[Shard]]

    def plans(self) -> list[SavePlan]:
        count = len(self.leaves)
        return [
            plan_save(own, **SIZES, process=process, process_count=count)
            for process, own in enumerate(self.leaves)
        ]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    mesh = draw(st.sampled_from(MESHES))
    count = math.prod(mesh)
    job = Job([[] for _ in range(count)], [])
    for number in range(draw(st.integers(1, 6))):
        shape = draw(
            st.sampled_from([(), (0, 3), (5,), (7, 13), (70, 61), (97, 128), (24, 12, 24), (4096,)])
        )
        spec = ArraySpec(shape, draw(st.sampled_from(["bool", "float32", "complex128"])))
        chunk_nbytes = draw(st.sampled_from([4 * KIB, 20 * KIB, MIB]))
        level = draw(st.sampled_from([None, None, 3]))
        kind = draw(st.sampled_from(["whole", "some", "mesh", "listed"]))
        name = f"leaf.{number}"
        if kind in ("whole", "some"):
            some = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(tuple)
            holders = draw(some) if kind == "some" else None
            leaf = LeafLayout(name, spec, chunk_nbytes, zstd_level=level, holders=holders)
            every = tuple(range(count)) if holders is None else holders
            job.shards.append([Shard(Box.whole(shape), every)])
            for own in job.leaves:
                own.append(leaf)
            continue
        free = draw(st.permutations(range(len(mesh))))
        axes: list[list[int]] = [[] for _ in shape]
        for axis in free[: draw(st.integers(0, len(mesh)))] if shape else ():
            axes[draw(st.integers(0, len(shape) - 1))].append(axis)
        job.shards.append(mesh_shards(shape, mesh, axes)[1])
        for process, own in enumerate(job.leaves):
            leaf = mesh_leaf(
                name,
                spec,
                mesh,
                axes,
                process,
                chunk_nbytes=chunk_nbytes,
                listed=kind == "listed",
            )
            own.append(leaf._replace(zstd_level=level))
    return job


def chunk_boxes(plan: SavePlan) -> list[tuple[int, int, Box]]:
    """Array, leaf and box in the leaf of every chunk, by number."""
    found = []
    for array in range(len(plan.arrays.names)):
        part = plan.arrays.of(array)
        for cell in part.grid.cells():
            box = part.grid.box(cell)
            offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
            found.append((array, int(plan.arrays.leaf[array]), Box(offset, box.shape)))
    return found


@given(jobs())
@settings(max_examples=150)
def test_each_chunk_has_one_writer_who_holds_it_whole(job: Job) -> None:
    plans = job.plans()
    chunks = chunk_boxes(plans[0])
    writers: dict[int, int] = {}
    for process, plan in enumerate(plans):
        assert plan.arrays.chunk_count == len(chunks)
        for row, number in enumerate(plan.row_chunk.tolist()):
            array, leaf, box = chunks[number]
            assert plan.row_array[row] == array
            held = [s.box.intersect(box) for s in job.shards[leaf] if process in s.holders]
            # No chunk is split between processes.
            assert sum(part.size for part in held if part is not None) == box.size
            writer = int(plan.row_writer[row])
            assert writers.setdefault(number, writer) == writer
    for number, writer in writers.items():
        assert number in plans[writer].row_chunk
    in_boxes = {part.array for plan in plans for part in plan.parts}
    for number, (array, _, _) in enumerate(chunks):
        assert (number in writers) is (array not in in_boxes)


@given(jobs())
@settings(max_examples=100)
def test_boxes_without_a_chunk_are_sent_once_and_tile_their_leaf(job: Job) -> None:
    plans = job.plans()
    seen: dict[int, Any] = {}
    for process, plan in enumerate(plans):
        for part in plan.parts:
            leaf = int(plan.arrays.leaf[part.array])
            spec = job.leaves[process][leaf].spec
            assert spec.nbytes <= 64 * KIB
            own = job.leaves[process][leaf].shards
            assert own is not None
            held = [s for s in own if process in s.holders]
            assert part.box in [s.box for s in held]
            count = seen.setdefault(part.array, np.zeros(spec.shape, int))
            if part.writer == process:
                count[part.box.slices()] += 1
    assert all((count == 1).all() for count in seen.values())


@given(jobs())
@settings(max_examples=60)
def test_what_processes_share_is_equal_in_all(job: Job) -> None:
    first, *others = job.plans()
    for plan in others:
        one, two = first.arrays, plan.arrays
        assert (one.names, one.pieces, one.chunk_count) == (two.names, two.pieces, two.chunk_count)
        for column in ("part", "leaf", "first_chunk", "inline"):
            assert getattr(one, column).tolist() == getattr(two, column).tolist()
        assert [p.grid for p in one.parts] == [p.grid for p in two.parts]


@given(jobs())
@settings(max_examples=60)
def test_only_what_a_process_writes_has_a_place(job: Job) -> None:
    for process, plan in enumerate(job.plans()):
        inline = np.isin(np.arange(len(plan.row_array)), plan.inline)
        packed = np.zeros(len(plan.row_array), bool)
        packed[list(plan.compressed)] = True
        for row, writer in enumerate(plan.row_writer.tolist()):
            places = [bool(plan.row_file[row] >= 0), bool(inline[row]), bool(packed[row])]
            assert sum(places) == (writer == process)
        owners = plan.row_array[list(plan.inline)].tolist()
        assert len(set(owners)) == len(owners)
        assert set(owners) <= set(plan.arrays.inline.tolist())


@given(jobs())
@settings(max_examples=60)
def test_the_source_of_a_chunk_is_a_run_of_a_shard_that_the_process_holds(job: Job) -> None:
    for process, plan in enumerate(job.plans()):
        chunks = chunk_boxes(plan)
        for row, number in enumerate(plan.row_chunk.tolist()):
            _, leaf, box = chunks[number]
            if plan.row_source[row] < 0:
                continue
            layout = job.leaves[process][leaf]
            held = [s.box for s in layout.shards or () if process in s.holders]
            held = held or [Box.whole(layout.spec.shape)]
            numbers = np.arange(layout.spec.size).reshape(layout.spec.shape)
            memory = numbers[held[plan.row_shard[row]].slices()].ravel()
            start = int(plan.row_source[row]) // layout.spec.itemsize
            wanted = numbers[box.slices()].ravel()
            assert memory[start : start + box.size].tolist() == wanted.tolist()


@given(jobs())
@settings(max_examples=60)
def test_the_arrays_are_those_of_one_process_with_all_shards(job: Job) -> None:
    listed = []
    for leaf, shards in zip(job.leaves[0], job.shards, strict=True):
        all_shards = None if leaf.shards is None and leaf.partition is None else tuple(shards)
        listed.append(leaf._replace(shards=all_shards, partition=None, holders=None))
    one, first = plan_save(listed, **SIZES), job.plans()[0]
    assert one.arrays.names == first.arrays.names
    assert [one.arrays.of(a).grid for a in range(len(one.arrays.names))] == [
        first.arrays.of(a).grid for a in range(len(first.arrays.names))
    ]
    assert len(one.row_array) == first.arrays.chunk_count
    assert one.row_chunk.tolist() == list(range(one.arrays.chunk_count))


def test_tied_leaves_have_one_writer_and_one_number() -> None:
    leaf = LeafLayout("a", ArraySpec((100, 100), "float32"), 10 * KIB)
    tied = leaf._replace(name="b", tied_to=0)
    plans = [
        plan_save([leaf, tied], **SIZES, process=process, process_count=2) for process in range(2)
    ]
    for plan in plans:
        assert plan.arrays.first_chunk.tolist() == [0, 0]
        assert plan.row_chunk.tolist() == list(range(4))
        assert plan.row_writer.tolist() == plans[0].row_writer.tolist()
    assert sorted(plans[0].row_writer.tolist()) == [0, 0, 1, 1]


def test_small_shards_make_one_plain_chunk_whatever_is_asked_for() -> None:
    spec = ArraySpec((60, 60), "float32")
    own = Shard(Box((30, 0), (30, 60)), (1,))
    leaf = LeafLayout(
        "w", spec, MIB, (7, 60), 3, shards=(own,), partition=Partition((30, 60), "rows")
    )
    plan = plan_save([leaf], **SIZES, process=1, process_count=2)
    part = plan.arrays.of(0)
    assert (part.grid.chunk_shape, part.layout.zstd_level) == ((60, 60), None)
    assert plan.parts == ((0, own.box, 1),) and not len(plan.row_chunk)
    # A leaf that each process holds whole is stored as asked for.
    whole = leaf._replace(partition=Partition((60, 60), "all"), shards=None)
    part = plan_save([whole], **SIZES, process=1, process_count=2).arrays.of(0)
    assert (part.grid.chunk_shape, part.layout.zstd_level) == ((7, 60), 3)


@pytest.mark.parametrize("cuts", [(5,), (0, 4), ((5, 5), 4), ((0,), 4), ((10,), 4)])
def test_a_partition_that_does_not_fit_is_refused(cuts: Any) -> None:
    with pytest.raises(ValueError, match=r"cuts|cells"):
        choose_grid(ArraySpec((10, 4), "float32"), Partition(cuts, ""), chunk_nbytes=1)


def test_a_chunk_shape_across_the_cuts_of_a_partition_is_refused() -> None:
    spec = ArraySpec((1000, 100), "float32")
    rows = Partition((250, 100), "rows")
    choose_grid(spec, rows, chunk_nbytes=1, chunk_shape=(125, 100))
    with pytest.raises(UsageError, match=r"end at 250, 500, 750, so chunks of 300"):
        choose_grid(spec, rows, chunk_nbytes=1, chunk_shape=(300, 100))


def test_a_partition_of_a_million_cells_costs_no_more_than_its_cuts() -> None:
    spec = ArraySpec((1 << 20, 1 << 20), "float32")
    ((_, grid),) = choose_grid(spec, Partition((1 << 10, 1 << 10), "x"), chunk_nbytes=16 * MIB)
    assert grid.chunk_shape == (1 << 10, 1 << 10)
    # A short last cell that would be padded too much has an array of its own.
    spec = ArraySpec(((1 << 30) + 7,), "float32")
    (_, grid), (offset, rest) = choose_grid(
        spec, Partition(((1 << 28) + 1,), "x"), chunk_nbytes=4 << 30
    )
    assert (grid.shape, offset, rest.shape) == ((4 * ((1 << 28) + 1),), grid.shape, (3,))


# ------------------------------------------------------------------------------------- balance


def w1() -> list[ArraySpec]:
    """The arrays of W1: a model of 1 GiB in 588 leaves."""
    tree = workloads._llama_shapes(512, workloads.LAYERS, stacked=False)
    shapes = [shape for _, shape in workloads.leaves(tree)]
    return [ArraySpec(shape, kind) for kind in ("bfloat16", *["float32"] * 3) for shape in shapes]


def busiest(leaves_of: list[list[LeafLayout]]) -> float:
    """Bytes of the process that writes most, by the mean."""
    written = []
    for process, leaves in enumerate(leaves_of):
        plan = plan_save(leaves, **SIZES, process=process, process_count=len(leaves_of))
        written.append(int(plan.row_payload[plan.row_writer == process].sum()))
    return max(written) * len(written) / sum(written)


def job_of(specs: list[ArraySpec], mesh: tuple[int, ...], axes: Any) -> list[list[LeafLayout]]:
    return [
        [mesh_leaf(f"w{n}", spec, mesh, axes(spec), process) for n, spec in enumerate(specs)]
        for process in range(math.prod(mesh))
    ]


def along_rows(axis: int) -> Any:
    return lambda spec: [[axis], *([] for _ in spec.shape[1:])]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("layout", ["replicas", "local", "hsdp"])
def test_the_busiest_process_writes_hardly_more_than_the_mean(layout: str, large: bool) -> None:
    specs = w1()
    if large:
        # One leaf has 60 % of the bytes.
        rows = sum(spec.nbytes for spec in specs) * 3 // 2 // (4 * 4096)
        specs = [*specs[:300], ArraySpec((rows // 8 * 8, 4096), "float32"), *specs[300:]]
    if layout == "replicas":
        job = job_of(specs, (8,), lambda spec: [[] for _ in spec.shape])
    elif layout == "hsdp":
        job = job_of(specs, (2, 4), along_rows(1))
    else:
        job = [[LeafLayout(f"w{n}", spec, 16 * MIB) for n, spec in enumerate(specs)]] * 8
    assert busiest(job) <= 1.05
