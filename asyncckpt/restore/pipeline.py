"""The restore pipeline: the overlapping stages fetch, decode and place of one restore."""

# Rule 1: values are handed over only after every checksum has passed.
# Rule 2: the loop only starts and counts reads; work per leaf runs in worker threads.
# Rule 3: a leaf is placed once all its chunks have arrived; `_waiting` counts them down. A leaf
#   that is its own destination buffer is not placed.

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from asyncckpt.adapters.arrays import bits
from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, refuse_implied
from asyncckpt.errors import MismatchError
from asyncckpt.flow.recorder import Recorder
from asyncckpt.flow.shield import raise_leading
from asyncckpt.reports import Progress, ReadRange, nbytes_text
from asyncckpt.restore.buffers import Buffers, allocate, find_shared, find_twins
from asyncckpt.restore.exchange.exchanger import Exchanger
from asyncckpt.restore.fetch import Fetch
from asyncckpt.restore.matched import Matching
from asyncckpt.restore.place import Placement
from asyncckpt.restore.plan import PlannedReads, plan_reads
from asyncckpt.restore.request import RestoreRequest
from asyncckpt.runtime import Runtime

PLACE_LEAVES = 4096
"""Most leaves that one call of a worker places, in a few milliseconds."""


@dataclass(eq=False, repr=False)
class RestorePipeline:
    """One restore, from matched leaves to finished ones.

    Attributes:
        exchanger: reads chunks that several processes want once for all; None if each reads them.
        nbytes: bytes of the restored arrays.
        read_nbytes: bytes read from the store.
        received_nbytes: bytes received by exchange between processes.
        unverified: paths of arrays without checksums.
        notes: for the report.
        reads: the ranges read, and for which leaves, with `RestoreOptions.explain`.
        wrote: targets may have been written.
    """

    runtime: Runtime
    opened: OpenCheckpoint
    matching: Matching
    request: RestoreRequest
    exchanger: Exchanger | None
    recorder: Recorder

    def __post_init__(self) -> None:
        self._arrays, self._scalars = self.matching.arrays, self.matching.scalars
        self._into = self.request.mode == "into"
        self._atomic = self._into and self.request.options.atomic
        self._in_place = self._into and not self._atomic
        self._placement = Placement(self.opened, self.request)
        # Whether ordinary arrays are their own destination buffers, so that none is placed.
        to_numpy = self.request.mode != "saved" or self.request.framework.name == "numpy"
        self._are_leaves = to_numpy and not self._atomic
        self._slot_nbytes = self.runtime.pool.slot_nbytes
        self._buffers: Buffers
        self._unplaced = 0  # number of leaves that are not placed; their destinations come first
        self._waiting: list[int] = []  # chunks that have not arrived, by number of the array
        self._ready: list[int] = []
        self._arrived = asyncio.Event()
        self._tied: dict[Hashable, Any] = {}
        self._twins: dict[int, int] = {}
        self._equal: dict[int, int] = {}  # leaves that must equal another: twins, shared ones
        self._held: dict[int, Sequence[Any]] = {}  # values of the arrays among both
        self._done_nbytes = 0
        self.wrote = False
        self.results: list[Any] = [None] * (len(self._arrays) + len(self._scalars))
        self.nbytes = 0
        self.read_nbytes = 0
        self.received_nbytes = 0
        self.unverified: list[str] = []
        self.notes: list[str] = []
        self.reads: tuple[ReadRange, ...] = ()

    async def read(self) -> None:
        """Read and check every leaf, straight into the targets unless the restore is atomic.

        Cancellation: waits until no thread writes to the targets; their contents are undefined.

        Raises:
            CorruptCheckpointError: names leaf, file and offset.
        """
        try:
            # A process without arrays takes part in the agreements, too.
            if self._arrays or self.exchanger is not None:
                await self._read()
            else:
                await self.runtime.engine.compute.run(self._check)
        except BaseExceptionGroup as failures:
            raise_leading(failures)

    async def finish(self) -> None:
        """Write the targets of an atomic restore, and make the leaves that are left."""
        with self.recorder.span("place"):
            await self.runtime.engine.compute.run(self._place_late)

    async def _read(self) -> None:
        opened, runtime = self.opened, self.runtime
        compute = runtime.engine.compute
        wanted = None
        if opened.record is None:
            wanted = [a for leaf in self._arrays for a in leaf.arrays()]
        with self.recorder.span("plan"):
            extents = await opened.read_extents(opened, wanted)
            reads = await compute.run(self._prepare, extents)
        self.wrote = self._in_place
        self._arrived.set()
        shared = None
        if self.exchanger is not None and opened.record is not None:
            shared = await self.exchanger.share(reads, self._slot_nbytes)
        options = self.request.options
        fetches = [
            Fetch(
                each,
                runtime.pool,
                compute,
                concurrency=None if options.concurrency == "auto" else options.concurrency,
                own_memory=not self._in_place,
                # Processes of one host that fill the same arrays read them from its disk once.
                shared=self._into and self.request.process_count > 1,
                arrived=self._count_down,
                progress=partial(self._progress, reads.plan.read_nbytes),
                recorder=self.recorder,
            )
            for each in ([reads] if shared is None else [shared.own, shared.streamed])
        ]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._place_arrived())
            if shared is not None:
                group.create_task(shared.exchange())
            for fetch in fetches:
                group.create_task(fetch.run())
        for_all: Sequence[ReadRange] = ()
        if self.exchanger is not None:
            for_all, self.received_nbytes = self.exchanger.ranges, self.exchanger.received_nbytes
        self.read_nbytes = fetches[0].read_nbytes + sum(one.nbytes for one in for_all)
        if options.explain:
            owners = self._buffers.owners
            own = await compute.run(fetches[0].explained, self._arrays, owners)
            self.reads = tuple(sorted([*own, *for_all], key=lambda one: (one.file, one.offset)))

    def _count_down(self, destinations: Sequence[int]) -> None:
        """Count down the chunks of the leaves in these destinations."""
        waiting, owners, sharers = self._waiting, self._buffers.owners, self._buffers.sharers
        leaves = [owners[number] for number in destinations if number >= self._unplaced]
        if sharers:
            leaves += itertools.chain(*[sharers.get(number, ()) for number in destinations])
        for leaf in leaves:
            waiting[leaf] -= 1
            if not waiting[leaf]:
                self._ready.append(leaf)
        if self._ready:
            self._arrived.set()

    async def _place_arrived(self) -> None:
        done = 0
        while done < len(self._arrays) - self._unplaced:
            await self._arrived.wait()
            self._arrived.clear()
            while self._ready:
                batch = self._ready[:PLACE_LEAVES]
                del self._ready[: len(batch)]
                with self.recorder.span("place"):
                    await self.runtime.engine.compute.run(self._place, batch)
                done += len(batch)

    def _progress(self, total_nbytes: int, nbytes: int) -> None:
        self._done_nbytes += nbytes
        if self.request.progress is not None:
            done = min(self._done_nbytes, total_nbytes)
            self.request.progress(Progress("fetch", done, total_nbytes))

    # -- in worker threads

    def _prepare(self, extents: Extents) -> PlannedReads:
        """Allocate memory and plan the reads, without writing to a target."""
        opened = self.opened
        if opened.record is None:
            self._check_foreign(extents)
        self._note_large_chunks()
        self._check()
        buffers = allocate(
            opened,
            self._arrays,
            framework=self.request.framework.name,
            in_place=self._in_place,
            recycled=self.runtime.recycled,
            twins=self._twins,
        )
        for number in {*self._equal, *self._equal.values()}:
            if number < len(self._arrays):
                values = buffers.values[number]
                self._held[number] = buffers.boxes[number] if values is None else (values,)
        reads = plan_reads(opened, extents, buffers.destinations, slot_nbytes=self._slot_nbytes)
        self._buffers, self.nbytes = buffers, buffers.nbytes
        self._waiting = buffers.chunks_of_leaves(reads.plan.counts)
        placed: Iterable[int] = range(len(self._arrays))
        if self._are_leaves:
            placed = self._arrays.described
            self._unplaced = len(self._arrays) - len(placed)
            self.results[: len(self._arrays)] = buffers.values
            for number in self._twins:
                self.results[number] = self._target_of(number)
        self._ready = [leaf for leaf in placed if not self._waiting[leaf]]
        return reads

    def _check(self) -> None:
        """Check targets for overlaps, and make the scalars that are not written in place."""
        self._equal = find_shared(self.matching, self.opened.first_rows, self.request)
        if self._into:
            self._twins = find_twins(self.matching, self.opened.first_rows)
            self._equal |= self._twins
        self._place_scalars(writing=False)

    def _check_foreign(self, extents: Extents) -> None:
        """Bound the memory that a foreign checkpoint implies, and note missing checksums."""
        opened, arrays = self.opened, list(self._arrays)
        self.notes.extend(opened.notes)
        own = [a for leaf in arrays if leaf.target is None for a in leaf.arrays()]
        refuse_implied(opened, extents, own)
        self.unverified = [leaf.path for leaf in arrays if not opened.is_verified(leaf.arrays())]
        if self.unverified:
            self.notes.append(opened.unverified_note(len(self.unverified), len(arrays)))

    def _note_large_chunks(self) -> None:
        """Note compressed chunks larger than the budget, such as those of a larger machine."""
        opened, budget = self.opened, self.runtime.budget.capacity
        if not any(s.chunk_nbytes > budget and s.codec.decode for s in opened.storages):
            return  # nearly always, so that no leaf is looked at
        storages = [opened.storage(array) for leaf in self._arrays for array in leaf.arrays()]
        large = max((s.chunk_nbytes for s in storages if s.codec.decode is not None), default=0)
        if large > budget:
            self.notes.append(
                f"its largest chunk takes {nbytes_text(large)} and was restored alone, beyond the "
                f"budget of {nbytes_text(budget)}"
            )

    def _place(self, batch: Sequence[int]) -> None:
        """Make the leaves of arrays whose values have arrived."""
        arrays, buffers = self._arrays, self._buffers
        others: list[int] = []
        for number in batch:
            if number in self._twins:
                self.results[number] = self._target_of(number)
            elif self._atomic:
                # A value that does not fit must raise before any target is written.
                parts = self._placement.converted(arrays[number], buffers.take(number))
                buffers.boxes[number] = parts
            elif number in buffers.ties:
                self._place_array(number)
            else:
                others.append(number)
        taken = [buffers.take(number) for number in others]
        made = self._placement.place_all([arrays[number] for number in others], taken)
        for number, value in zip(others, made, strict=True):
            self.results[number] = value

    def _place_array(self, number: int) -> None:
        key = self._buffers.ties.get(number)
        if key is None or key not in self._tied:
            leaf, parts = self._arrays[number], self._buffers.take(number)
            self.results[number] = self._placement.place(leaf, parts)
        if key is not None:
            self.results[number] = self._tied.setdefault(key, self.results[number])

    def _place_late(self) -> None:
        """Write the targets of an atomic restore, then the scalars."""
        self._compare()
        self.wrote = self._into
        if self._atomic:
            for writing in (False, True):
                for number, leaf in enumerate(self._arrays):
                    if number not in self._twins and self._placement.writes(leaf) == writing:
                        self._place_array(number)
        self._place_scalars(writing=True)

    def _target_of(self, number: int) -> Any:
        want = self._arrays[number].want
        assert want is not None
        return want.leaf

    def _compare(self) -> None:
        """Check that leaves that become one array in the target were saved with equal values.

        Raises:
            MismatchError: two values differ; names both leaves.
        """
        leaves = self.matching.leaves if self._equal else []
        for number, first in self._equal.items():
            pair = [self._held.get(n) or (leaves[n].scalar,) for n in (first, number)]
            if all(map(_same, *pair)):
                continue
            path, other = leaves[first].path, leaves[number].path
            raise MismatchError(
                f"{path} and {other}: the checkpoint holds different values for what is one array "
                "in the target; pass a copy of one of them, or leave it out with include=",
                path=other,
                location=self.opened.location,
                stage="place",
            )
        self._held.clear()

    def _place_scalars(self, *, writing: bool) -> None:
        for number, leaf in enumerate(self._scalars, len(self._arrays)):
            if self._placement.writes(leaf) == writing:
                self.results[number] = self._placement.place(leaf, ())


def _same(one: Any, other: Any) -> bool:
    """Return whether two arrays or Python scalars are bitwise equal."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(bits(one), bits(other))
    return repr(one) == repr(other)
