"""Comparison of two checkpoints of any formats, leaf by leaf, within bounded memory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.arguments import guarded, typed
from asyncckpt.convert.differences import Difference, Values, described, notes
from asyncckpt.convert.reader import LeafReader
from asyncckpt.convert.source import Work, options_of, shares
from asyncckpt.convert.tiles import band_nbytes, runs, tiles
from asyncckpt.errors import DeadlineExceededError
from asyncckpt.flow.shield import leading_error
from asyncckpt.options import LOCAL_CONCURRENCY, RestoreOptions
from asyncckpt.reports import DiffReport, LeafDifference, Progress
from asyncckpt.spec import DTYPES, ArraySpec, Box

BATCH_LEAVES = 1024
"""Most small leaves compared in one call of a worker."""


@dataclass(slots=True, eq=False)
class _Pair:
    """Array leaf of both checkpoints, with equal shapes."""

    path: str
    leaves: tuple[int, int]
    specs: tuple[ArraySpec, ArraySpec]
    found: Difference = field(default_factory=Difference)


class Comparison(Work[DiffReport]):
    """Comparison of two checkpoints; arguments as for `diff`."""

    def __init__(
        self,
        first: str | os.PathLike[str],
        second: str | os.PathLike[str],
        *,
        bitwise: bool,
        options: RestoreOptions | None,
        storage_options: Mapping[str, Any] | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._locations = (first, second)
        self._bitwise = bitwise
        self._options = typed("options", options, RestoreOptions)
        self._storage_options = options_of(self._locations, storage_options)
        self._progress = guarded(progress)
        reading, cache, working = shares(self._options.host_memory_nbytes)
        super().__init__(
            "diff", reading_nbytes=reading, working_nbytes=working // 2, cache_nbytes=cache // 2
        )
        self._done_nbytes = 0
        self._total_nbytes = 0

    async def _run(self) -> DiffReport:
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.deadline_s):
                a, b = [
                    await self._open(location, options)
                    for location, options in zip(
                        self._locations, self._storage_options, strict=True
                    )
                ]
                return await self._compare(a, b, begun)
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._locations[0]}: the comparison did not finish within "
                f"{self._options.deadline_s} s; raise RestoreOptions.deadline_s"
            ) from None
        except BaseExceptionGroup as group:
            raise leading_error(group) from None

    async def _compare(self, a: LeafReader, b: LeafReader, begun: float) -> DiffReport:
        place = {path: leaf for leaf, path in enumerate(b.paths)}
        changed: dict[int, LeafDifference] = {}
        pairs: list[_Pair] = []
        common = 0
        for leaf, path in enumerate(a.paths):
            other = place.pop(path, None)
            if other is None:
                continue
            common += 1
            difference = described(a, leaf, b, other, bitwise=self._bitwise)
            if difference is not None:
                changed[leaf] = difference
            specs = a.specs[leaf], b.specs[other]
            if specs[0] is not None and specs[1] is not None and specs[0].shape == specs[1].shape:
                pairs.append(_Pair(path, (leaf, other), (specs[0], specs[1])))
        a.in_order([pair.leaves[0] for pair in pairs])
        b.in_order([pair.leaves[1] for pair in pairs])
        self._total_nbytes = sum(pair.specs[0].nbytes for pair in pairs)
        await self._compare_values(a, b, pairs)
        for pair in pairs:
            if pair.found.count or pair.leaves[0] in changed:
                changed[pair.leaves[0]] = _with_values(changed.get(pair.leaves[0]), pair)
        known = set(b.paths) - place.keys()
        return DiffReport(
            first=a.opened.location,
            second=b.opened.location,
            only_first=tuple(path for path in a.paths if path not in known),
            only_second=tuple(place),
            changed=tuple(changed[leaf] for leaf in sorted(changed)),
            leaf_count=common,
            nbytes=self._total_nbytes,
            total_s=time.perf_counter() - begun,
            notes=tuple(notes(a.opened, b.opened)),
        )

    async def _compare_values(self, a: LeafReader, b: LeafReader, pairs: Sequence[_Pair]) -> None:
        pool = self._working.pool
        waiting = _batches(a, b, pairs, pool.slot_nbytes // 2)

        async def stream() -> None:
            slots = await pool.take(1, grow=False)
            try:
                for batch in waiting:
                    # One half of the slot for each side.
                    halves = slots[0].buffer.reshape(2, -1)
                    found = await self._working.engine.compute.run(self._look, a, b, batch, halves)
                    for (pair, _), difference in zip(batch, found, strict=True):
                        pair.found.merge(difference)
                    self._done_nbytes += sum(x.size * pair.specs[0].itemsize for pair, x in batch)
                    if self._progress is not None:
                        self._progress(Progress("diff", self._done_nbytes, self._total_nbytes))
            except BaseException as error:
                pool.release(slots, error)
                raise
            pool.release(slots)

        async with asyncio.TaskGroup() as group:
            wanted = self._options.concurrency
            for _ in range(LOCAL_CONCURRENCY if wanted == "auto" else wanted):
                group.create_task(stream())

    # -- in worker threads

    def _look(
        self,
        a: LeafReader,
        b: LeafReader,
        batch: Sequence[tuple[_Pair, Box]],
        halves: Values,
    ) -> list[Difference]:
        found = []
        for pair, box in batch:
            values = []
            for reader, leaf, spec, half in zip(
                (a, b), pair.leaves, pair.specs, halves, strict=True
            ):
                data = half[: box.size * spec.itemsize]
                part = data.view(DTYPES[spec.dtype]).reshape(box.shape)
                reader.read(leaf, box, part)
                values.append(part)
            difference = Difference()
            difference.add(box, values[0], values[1], bitwise=self._bitwise)
            found.append(difference)
        return found


def _batches(
    a: LeafReader, b: LeafReader, pairs: Sequence[_Pair], half_nbytes: int
) -> Iterator[list[tuple[_Pair, Box]]]:
    """Yield batches of boxes to compare, each of at most half a slot on either side."""
    batch: list[tuple[_Pair, Box]] = []
    nbytes = 0
    for pair in pairs:
        for box in _boxes(a, b, pair, half_nbytes):
            batch.append((pair, box))
            nbytes += box.size * max(spec.itemsize for spec in pair.specs)
            if nbytes >= half_nbytes or len(batch) == BATCH_LEAVES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _boxes(a: LeafReader, b: LeafReader, pair: _Pair, half_nbytes: int) -> Iterator[Box]:
    """Yield boxes of a leaf, in the order of the side with the larger chunks."""
    shape = pair.specs[0].shape
    if not pair.specs[0].size:
        return
    itemsize = max(spec.itemsize for spec in pair.specs)
    if pair.specs[0].size * itemsize <= half_nbytes:
        yield Box.whole(shape)
        return
    parts = [reader.parts(leaf) for reader, leaf in zip((a, b), pair.leaves, strict=True)]
    bands = [band_nbytes(own, spec.itemsize) for own, spec in zip(parts, pair.specs, strict=True)]
    larger = 0 if bands[0] >= bands[1] else 1
    if bands[larger] > a.cache_nbytes // 2:
        yield from tiles(parts[larger], itemsize, half_nbytes)
    else:
        yield from runs(shape, itemsize, half_nbytes)


def _with_values(described: LeafDifference | None, pair: _Pair) -> LeafDifference:
    first, second = (str(spec) for spec in pair.specs)
    base = described or LeafDifference(pair.path, "value", first, second)
    found = pair.found
    return dataclasses.replace(
        base,
        size=pair.specs[0].size,
        count=found.count,
        nan_count=found.nan_count,
        largest=found.largest_absolute,
        largest_relative=found.largest_relative,
        index=found.index,
    )
