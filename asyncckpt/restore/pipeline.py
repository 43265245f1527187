"""Fetch, decode and place of one restore, overlapping."""

# Rule 1: values are handed over only after every checksum has passed.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from asyncckpt.checkpointer.match import Assignment, Matching
from asyncckpt.checkpointer.memory import Memories
from asyncckpt.checkpointer.overlaps import check_overlaps
from asyncckpt.checkpointer.runtime import Runtime, reads_in_flight
from asyncckpt.checkpointer.values import Leaves
from asyncckpt.errors import AsyncCheckpointError, MismatchError
from asyncckpt.options import ALIGNED_CHUNK_NBYTES, RestoreOptions
from asyncckpt.planning.restore import Request, WholeArrays, plan_restore
from asyncckpt.reports import Progress, nbytes_text
from asyncckpt.stages.decode import Destination, ReadTables
from asyncckpt.stages.fetch import Fetch
from asyncckpt.stages.opened import Extents, OpenCheckpoint, extents_of, refuse_implied

PLACE_LEAVES = 512
"""Leaves finished by one call of a worker."""


class Filling:
    """One restore on its way: from matched leaves to finished ones.

    Attributes:
        unverified: paths whose bytes had no checksum.
        notes: what a person should know.
    """

    def __init__(
        self,
        runtime: Runtime,
        opened: OpenCheckpoint,
        matching: Matching,
        leaves: Leaves,
        *,
        into: bool,
        strict: bool,
        options: RestoreOptions,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._runtime = runtime
        self._compute = runtime.engine.compute
        self._opened = opened
        self._leaves = leaves
        self._into = into
        self._strict = strict
        self._options = options
        self._report = progress
        self._all = [*matching.assignments, *matching.additions]
        self._memories = Memories(opened)
        self._ready: list[Assignment] = []
        self._late: list[Assignment] = []
        self._arrived = asyncio.Event()
        self._done_nbytes = 0
        self._total_nbytes = 0
        self._started = False
        self.unverified: list[str] = []
        self.notes: list[str] = []

    async def run(self) -> int:
        """All assignments have their results; returns the bytes read.

        Raises:
            MismatchError: `strict`, and an immutable leaf of the target differs.
            CorruptCheckpointError: names leaf, file and offset.
        """
        writes = self._leaves.writes
        arrays = [a for a in self._all if a.spec is not None]
        scalars = [a for a in self._all if a.spec is None]
        self._set_scalars(a for a in scalars if not writes(a))
        read_nbytes = await self._read(arrays) if arrays else 0
        late = self._late
        if late:
            await self._compute.run(self._set, [a for a in late if not writes(a)])
        if self._leaves.changed and self._strict:
            raise changed_error(self._opened.location, self._leaves.changed)
        if late:
            await self._compute.run(self._set, [a for a in late if writes(a)])
        self._set_scalars(a for a in scalars if writes(a))
        return read_nbytes

    async def _read(self, arrays: Sequence[Assignment]) -> int:
        opened, pool = self._opened, self._runtime.pool
        wanted = None if opened.record else [n for a in arrays for n in a.arrays]
        extents = await extents_of(opened, wanted)
        self._look_at(extents, arrays)
        await self._compute.run(self._allocate, arrays)
        plan = await self._compute.run(
            plan_restore,
            opened.stored(),
            _requests(self._memories.destinations),
            row_file=extents.file,
            row_offset=extents.offset,
            row_nbytes=extents.nbytes,
            slot_nbytes=pool.slot_nbytes,
            gap_nbytes=opened.files.capabilities.read_gap_nbytes,
            aligned_chunk_nbytes=ALIGNED_CHUNK_NBYTES,
        )
        self._total_nbytes = plan.read_nbytes
        fetch = Fetch(
            ReadTables.of(opened, extents),
            plan,
            self._memories.destinations,
            pool,
            self._compute,
            concurrency=partial(reads_in_flight, opened.files, self._options.concurrency),
            own_memory=not self._into or self._options.atomic,
            arrived=self._has_arrived,
            progress=self._progress,
        )
        self._started = True
        self._ready = [a for a in arrays if not a.waiting]
        if self._ready:
            self._arrived.set()
        async with asyncio.TaskGroup() as group:
            placing = group.create_task(self._place_all(len(arrays)))
            await fetch.run()
            self._arrived.set()
            await placing
        return fetch.read_nbytes

    def failed(self, error: BaseException) -> BaseException:
        """The error, saying which targets were written."""
        if (
            isinstance(error, AsyncCheckpointError)
            and self._into
            and self._started
            and not self._options.atomic
        ):
            written = [a.path for a in self._all if self._leaves.writes(a)]
            error.written = tuple(written)
            error.add_note(
                f"the contents of {len(written)} targets are undefined now (error.written lists "
                "them); restore again, or use RestoreOptions(atomic=True)"
            )
        return error

    # -- plan

    def _allocate(self, arrays: Sequence[Assignment]) -> None:
        self._memories.allocate(arrays, in_place=self._into and not self._options.atomic)
        if self._into:
            check_overlaps(self._all, self._opened.first_rows)

    def _look_at(self, extents: Extents, arrays: Sequence[Assignment]) -> None:
        """What a foreign checkpoint lacks is noted, and bounded."""
        opened = self._opened
        if opened.record is not None:
            return
        budget = self._runtime.budget.capacity * self._runtime.pool.slot_nbytes
        own = [n for a in arrays if a.target is None for n in a.arrays]
        refuse_implied(opened, extents, own)
        large = 0
        for assignment in arrays:
            storages = [opened.storage(array) for array in assignment.arrays]
            if not all(storage.codec.crc32c for storage in storages):
                self.unverified.append(assignment.path)
            large = max([large, *(s.chunk_nbytes for s in storages if s.codec.decode is not None)])
        if self.unverified:
            self.notes.append(
                f"{len(self.unverified)} of {len(arrays)} arrays have no checksum in this "
                f"{opened.format} checkpoint and could not be verified"
            )
        if large > budget:
            self.notes.append(
                f"its largest chunk takes {nbytes_text(large)} and was restored alone, beyond the "
                f"budget of {nbytes_text(budget)}"
            )

    # -- fetch and place

    def _has_arrived(self, numbers: Sequence[int]) -> None:
        owners, sharers, ready = self._memories.owners, self._memories.sharers, self._ready
        for number in numbers:
            for assignment in (owners[number], *sharers.get(number, ())):
                assignment.waiting -= 1
                if not assignment.waiting:
                    ready.append(assignment)
        self._arrived.set()

    async def _place_all(self, count: int) -> None:
        done = 0
        while done < count:
            await self._arrived.wait()
            self._arrived.clear()
            while self._ready:
                batch = self._ready[:PLACE_LEAVES]
                del self._ready[: len(batch)]
                await self._compute.run(self._finish, batch)
                done += len(batch)

    def _progress(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        if self._report is not None:
            self._report(
                Progress("fetch", min(self._done_nbytes, self._total_nbytes), self._total_nbytes)
            )

    # -- in worker threads

    def _finish(self, batch: Sequence[Assignment]) -> None:
        made: dict[int, object] = {}
        for assignment in batch:
            if self._into and self._options.atomic:
                # What does not fit must be known before any target is touched.
                self._leaves.convert(assignment)
                self._late.append(assignment)
                continue
            shared = made.get(id(assignment.values)) if assignment.wanted is None else None
            value = shared if shared is not None else self._leaves.value(assignment)
            made[id(assignment.values)] = value
            assignment.result = value

    def _set(self, assignments: Sequence[Assignment]) -> None:
        for assignment in assignments:
            assignment.result = self._leaves.value(assignment)

    def _set_scalars(self, assignments: Iterable[Assignment]) -> None:
        for assignment in assignments:
            assignment.result = self._leaves.scalar(assignment)


def changed_error(location: str, changed: Sequence[str]) -> MismatchError:
    """The error for immutable leaves of a target that differ from the checkpoint."""
    shown = ", ".join(changed[:10]) + (", …" if len(changed) > 10 else "")
    return MismatchError(
        f"{shown}: the target's value differs from {location}'s and cannot be filled in place, "
        "being immutable; use restore(like=...), or pass strict=False to have such leaves listed "
        "in the report",
        path=changed[0],
        location=location,
    )


def _requests(destinations: Sequence[Destination]) -> Sequence[Request] | WholeArrays:
    if any(destination.box is not None for destination in destinations):
        return [Request(d.array, d.box, d.flat is not None) for d in destinations]
    return WholeArrays(
        np.array([d.array for d in destinations], np.int64),
        np.array([d.flat is not None for d in destinations], np.bool_),
    )
