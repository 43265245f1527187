"""Time of planning by itself: no array is read, no file is touched.

Three things grow: the leaves of a tree, the shards of one leaf, and the leaves whose plan is found
in the cache. A plan of leaves has one chunk each, one of shards a chunk per shard.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncckpt import options
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.pack import TRAILER_NBYTES
from asyncckpt.planning.restore import (
    Requests,
    RestorePlan,
    StoredArrays,
    plan_restore,
)
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.ports import Sizes, StoreCapabilities
from asyncckpt.restore.plan import DIRECT_NBYTES, SHORT_NBYTES
from asyncckpt.save.plan_cache import (
    Agreement,
    LayoutCache,
    Limits,
    Terms,
    layout_key,
    make_layout,
)
from asyncckpt.save.shared_plan import schema_key
from asyncckpt.save.snapshot import SaveRequest, take_snapshot
from asyncckpt.spec import Box, ChunkGrid, Partition, Shard, array_spec
from benchmarks import measure
from benchmarks.local.suite import Suite
from benchmarks.measure import Case
from benchmarks.results import AGREED, OURS, PLAN, PROCESS_COUNTS, Measurement, own_shards
from benchmarks.workloads import Tree, Workload, flat_arrays

LEAVES_PER_SHARD = 20
"""A shard of one large array is worth so many leaves: what plans them has boxes to look at."""

SHARD_SHAPE = (256, 256)

LIMITS = Limits(1 << 30, None, None)

SIZES = Sizes(options.DEFAULT_DATA_FILE_NBYTES, options.SLOT_NBYTES, options.LOCAL_CONCURRENCY)

GAP_NBYTES = StoreCapabilities().read_gap_nbytes


@dataclass(frozen=True, slots=True)
class Planned:
    """One thing to time.

    Attributes:
        column: what it is.
        count: how many leaves or shards it is about.
        work: does it.
    """

    column: str
    count: int
    work: Callable[[], object]

    def run(self) -> Mapping[str, float]:
        """`wall_s` is the time of the call alone."""
        start = time.perf_counter()
        self.work()
        return {"wall_s": time.perf_counter() - start}


def run(suite: Suite, workload: Workload) -> None:
    """Time everything for the leaves of the workload."""
    suite.attempt(f"{workload.id} {PLAN}", PLAN, lambda: _measure(suite, workload))


def _measure(suite: Suite, workload: Workload) -> None:
    found = {work.column: work for work in planned(workload.tree)}
    cases = [Case(column, work.run) for column, work in found.items()]
    for column, samples in measure.rounds(cases, suite.protocol, suite.rng).items():
        made = Measurement.of(workload, PLAN, OURS, column, samples)
        made = dataclasses.replace(made, leaf_count=found[column].count)
        suite.found.measurements.append(made)


def planned(tree: Tree) -> list[Planned]:
    """Return what is timed for a tree: its leaves, and an array with shards in proportion."""
    leaves = [
        LeafLayout(path, array_spec(array.shape, array.dtype.name), options.DEFAULT_CHUNK_NBYTES)
        for path, array in flat_arrays(tree).items()
    ]
    sharded = sharded_leaf(max(1, len(leaves) // LEAVES_PER_SHARD))
    return [
        *_plans("leaves", len(leaves), leaves),
        *_plans("shards", *sharded),
        *(_own_shards(len(leaves), processes) for processes in PROCESS_COUNTS),
        _cached(tree),
        _agreed(tree),
    ]


def _plans(what: str, count: int, leaves: list[LeafLayout]) -> list[Planned]:
    plan = save(leaves)
    return [
        Planned(f"save, {what}", count, lambda: save(leaves)),
        Planned(f"restore, {what}", count, restoring(plan, leaves)),
    ]


def _own_shards(count: int, process_count: int) -> Planned:
    """Plan `count` leaves in rows over the processes: as many own shards."""
    height, width = SHARD_SHAPE
    spec = array_spec((process_count * height, width), "float32")
    partition = Partition((height, width), f"rows over {process_count}", (*range(process_count),))
    process = process_count // 2
    # As adapters do, which divide arrays of one shape once.
    own = (Shard(Box((process * height, 0), SHARD_SHAPE), (process,)),)
    leaves = [
        LeafLayout(f"w{n}", spec, options.DEFAULT_CHUNK_NBYTES, shards=own, partition=partition)
        for n in range(count)
    ]
    return Planned(
        own_shards(process_count),
        count,
        lambda: save(leaves, process=process, process_count=process_count),
    )


def save(leaves: list[LeafLayout], *, process: int = 0, process_count: int = 1) -> SavePlan:
    """Plan a save as the library does."""
    return plan_save(
        leaves,
        data_file_nbytes=options.DEFAULT_DATA_FILE_NBYTES,
        slot_nbytes=options.SLOT_NBYTES,
        page_nbytes=options.PAGE_NBYTES,
        aligned_chunk_nbytes=options.ALIGNED_CHUNK_NBYTES,
        inline_nbytes=options.INLINE_NBYTES,
        process=process,
        process_count=process_count,
    )


def restoring(plan: SavePlan, leaves: list[LeafLayout]) -> Callable[[], RestorePlan]:
    """Plans the restore of everything that was planned to be saved, shard by shard."""
    arrays = plan.arrays
    stored = StoredArrays(
        [(part.grid, part.spec.itemsize, False) for part in arrays.parts],
        arrays.part,
        arrays.first_chunk,
    )
    wanted: list[tuple[int, Box | None]] = []
    for array, leaf in enumerate(leaves):
        wanted += [(array, shard.box) for shard in leaf.shards or ()] or [(array, None)]
    requests = Requests(
        np.array([array for array, _ in wanted], np.int64),
        [box for _, box in wanted],
        np.ones(len(wanted), np.bool_),
    )
    nbytes = plan.row_payload + TRAILER_NBYTES
    # What stands in the index does so leaf behind leaf, in a file behind those of the data.
    inline = plan.row_file < 0
    file = np.where(inline, len(plan.file_nbytes), plan.row_file)
    offset = np.where(inline, np.cumsum(nbytes) - nbytes, plan.row_offset)
    return lambda: plan_restore(
        stored,
        requests,
        row_file=file,
        row_offset=offset,
        row_nbytes=nbytes,
        slot_nbytes=options.SLOT_NBYTES,
        gap_nbytes=GAP_NBYTES,
        direct_nbytes=DIRECT_NBYTES,
        short_nbytes=SHORT_NBYTES,
    )


def sharded_leaf(count: int) -> tuple[int, list[LeafLayout]]:
    """One array in about `count` shards, a grid of rows and columns; first their number."""
    rows = math.isqrt(count)
    columns = count // rows
    height, width = SHARD_SHAPE
    grid = ChunkGrid((rows * height, columns * width), SHARD_SHAPE)
    shards = tuple(Shard(grid.box(cell)) for cell in grid.cells())
    spec = array_spec(grid.shape, "float32")
    return len(shards), [LeafLayout("w", spec, options.DEFAULT_CHUNK_NBYTES, shards=shards)]


def _cached(tree: Tree) -> Planned:
    # Two saves of one loop: what the first one planned, the second one finds.
    def key() -> list[Any]:
        return layout_key(taken, Terms(options.SaveOptions(), LIMITS, SIZES))

    taken = take_snapshot(tree)
    layouts = LayoutCache()
    layouts.keep(key(), make_layout(taken, Terms(options.SaveOptions(), LIMITS, SIZES)))
    taken = take_snapshot(tree)

    def find() -> None:
        if layouts.find(key()) is None:
            raise AssertionError("the plan of an equal tree was not found")

    return Planned("cached plan", len(taken.paths), find)


def _agreed(tree: Tree) -> Planned:
    # The same where several processes save: what they agreed on is found, too.
    given = options.SaveOptions()
    processes = (1, 4)

    def request() -> SaveRequest:
        taken = take_snapshot(tree)
        return SaveRequest("1", 1, taken, {}, {}, False, given, None, stall_first=True)

    def key(request: SaveRequest) -> list[Any]:
        return layout_key(request.snapshot, Terms(given, LIMITS, SIZES, *processes))

    first, second = request(), request()
    layouts = LayoutCache()
    layouts.agree(schema_key(first), Agreement("run", "schema", False, LIMITS))
    layout = make_layout(first.snapshot, Terms(given, LIMITS, SIZES, *processes))
    layouts.keep(key(first), layout)

    def find() -> None:
        if layouts.agreement(schema_key(second)) is None or layouts.find(key(second)) is None:
            raise AssertionError("the plan of an equal tree was not found")

    return Planned(AGREED, len(second.snapshot.paths), find)
