"""Comparison of two checkpoints of any formats, leaf by leaf, within bounded memory."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncckpt.arguments import Location, ProgressCallback, check_switch, guarded, typed
from asyncckpt.convert.differences import Difference, Values, described, notes, stored_number
from asyncckpt.convert.reader import LeafReader
from asyncckpt.convert.source import Runtimes, options_of, shares
from asyncckpt.convert.tiles import band_nbytes, tiles
from asyncckpt.flow.driver import check_loop
from asyncckpt.flow.shield import together, within
from asyncckpt.options import LOCAL_CONCURRENCY, RestoreOptions
from asyncckpt.planning.overlap import runs
from asyncckpt.reports import DiffReport, LeafDifference, Progress
from asyncckpt.runtime import Runtime
from asyncckpt.spec import DTYPES, ArraySpec, Box

BATCH_LEAVES = 1024
"""Most boxes compared in one call in a worker thread."""


class _Side(NamedTuple):
    """One checkpoint's values of a common leaf.

    `number` is the value of a scalar whose counterpart is an array; None for arrays.
    """

    reader: LeafReader
    leaf: int
    spec: ArraySpec
    number: Values | None = None

    def read(self, box: Box, out: Values) -> None:
        """Read the values of `box`. Blocking."""
        if self.number is None:
            self.reader.read(self.leaf, box, out)
        else:
            out[...] = self.number


@dataclass(slots=True, eq=False)
class _Pair:
    """Leaf of both checkpoints, with equal shapes; an array in at least one."""

    path: str
    sides: tuple[_Side, _Side]
    found: Difference = field(default_factory=Difference)

    @property
    def spec(self) -> ArraySpec:
        """Spec of the first side."""
        return self.sides[0].spec

    @property
    def itemsize(self) -> int:
        """Bytes of an element on the side where it is wider."""
        return max(side.spec.itemsize for side in self.sides)


async def diff(
    first: Location,
    second: Location,
    *,
    bitwise: bool = False,
    options: RestoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats: leaves, kinds, shapes, dtypes and values.

    Args:
        first: a checkpoint, a safetensors file, or the root of a run (its newest step).
        second: likewise.
        bitwise: compare bits, so that NaNs may differ, and 0.0 differs from -0.0.
        options: as for restoring; `host_memory_nbytes` covers both sides.
        storage_options: options of the file system for URLs.
        progress: called on an engine's thread with a `Progress`.

    Cancellation: waits for running reads, then raises.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at one of the locations.
        CorruptCheckpointError: names leaf, file and offset.
    """
    check_loop()
    check_switch("bitwise", bitwise)
    chosen = typed("options", options, RestoreOptions)
    first_options, second_options = options_of((first, second), storage_options)
    reading, cache, working = shares(chosen.host_memory_nbytes)
    runtimes = Runtimes("compare", reading_nbytes=reading, working_nbytes=working // 2)
    values = _Values(
        runtimes.working,
        bitwise,
        LOCAL_CONCURRENCY if chosen.concurrency == "auto" else chosen.concurrency,
        guarded(progress),
    )

    async def work() -> DiffReport:
        begun = time.perf_counter()
        failure, option = "the comparison did not finish", "RestoreOptions.deadline_s"
        async with within(chosen.deadline_s, str(first), failure, option):
            a = await runtimes.open(first, first_options, cache // 2)
            b = await runtimes.open(second, second_options, cache // 2)
            return await _compare(a, b, values, begun)

    return await runtimes.run(work)


async def _compare(a: LeafReader, b: LeafReader, values: _Values, begun: float) -> DiffReport:
    of_path = {path: leaf for leaf, path in enumerate(b.paths)}
    common = of_path.keys() & set(a.paths)
    changed: dict[int, LeafDifference] = {}
    pairs: list[_Pair] = []
    for leaf, path in enumerate(a.paths):
        if path not in common:
            continue
        other = of_path[path]
        one, two = a.specs[leaf], b.specs[other]
        number = stored_number(a, leaf, b, other)
        if number is not None:
            spec, value = number
            first = _Side(a, leaf, spec, value if one is None else None)
            second = _Side(b, other, spec, value if two is None else None)
            pairs.append(_Pair(path, (first, second)))
            continue
        difference = described(a, leaf, b, other, bitwise=values.bitwise)
        if difference is not None:
            changed[leaf] = difference
        if one is not None and two is not None and one.shape == two.shape:
            pairs.append(_Pair(path, (_Side(a, leaf, one), _Side(b, other, two))))
    for index, reader in enumerate((a, b)):
        sides = [pair.sides[index] for pair in pairs]
        reader.in_order([side.leaf for side in sides if side.number is None])
    await values.compare(pairs)
    for pair in pairs:
        leaf = pair.sides[0].leaf
        if pair.found.count or leaf in changed:
            changed[leaf] = _with_values(changed.get(leaf), pair)
    return DiffReport(
        first=a.opened.location,
        second=b.opened.location,
        only_first=tuple(path for path in a.paths if path not in common),
        only_second=tuple(path for path in b.paths if path not in common),
        changed=tuple(changed[leaf] for leaf in sorted(changed)),
        leaf_count=len(common),
        nbytes=sum(pair.spec.nbytes for pair in pairs),
        total_s=time.perf_counter() - begun,
        notes=tuple(notes(a.opened, b.opened)),
    )


@dataclass(frozen=True, slots=True)
class _Values:
    """Comparison of values, in `streams` concurrent streams."""

    runtime: Runtime
    bitwise: bool
    streams: int
    progress: ProgressCallback | None

    async def compare(self, pairs: Sequence[_Pair]) -> None:
        """Add to each pair's `found` how its values differ."""
        pool, compute = self.runtime.pool, self.runtime.engine.compute
        waiting = _batches(pairs, pool.slot_nbytes // 2)
        total_nbytes = sum(pair.spec.nbytes for pair in pairs)
        done_nbytes = 0

        async def stream() -> None:
            nonlocal done_nbytes
            slots = await pool.take(1, grow=False)
            try:
                for batch in waiting:
                    # One half of the slot for each side.
                    halves = slots[0].buffer.reshape(2, -1)
                    found = await compute.run(_differences, batch, halves, self.bitwise)
                    for (pair, _), difference in zip(batch, found, strict=True):
                        pair.found.merge(difference)
                    done_nbytes += sum(box.size * pair.spec.itemsize for pair, box in batch)
                    if self.progress is not None:
                        self.progress(Progress("diff", done_nbytes, total_nbytes))
            finally:
                pool.release(slots, sys.exception())

        await together(stream() for _ in range(self.streams))


def _differences(
    batch: Sequence[tuple[_Pair, Box]], halves: Values, bitwise: bool
) -> list[Difference]:
    """Read the boxes of pairs, and return their differences. Blocking."""
    found = []
    for pair, box in batch:
        values = []
        for side, half in zip(pair.sides, halves, strict=True):
            data = half[: box.size * side.spec.itemsize]
            part = data.view(DTYPES[side.spec.dtype]).reshape(box.shape)
            side.read(box, part)
            values.append(part)
        difference = Difference()
        difference.add(box, values[0], values[1], bitwise=bitwise)
        found.append(difference)
    return found


def _batches(pairs: Sequence[_Pair], half_nbytes: int) -> Iterator[list[tuple[_Pair, Box]]]:
    """Yield batches of boxes to compare; each box takes at most half a slot on either side."""
    batch: list[tuple[_Pair, Box]] = []
    nbytes = 0
    for pair in pairs:
        for box in _boxes(pair, half_nbytes):
            batch.append((pair, box))
            nbytes += box.size * pair.itemsize
            if nbytes >= half_nbytes or len(batch) == BATCH_LEAVES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _boxes(pair: _Pair, half_nbytes: int) -> Iterator[Box]:
    """Yield boxes of a leaf, in the order of the side with the larger chunks."""
    spec = pair.spec
    if not spec.size:
        return
    if spec.size * pair.itemsize <= half_nbytes:
        yield Box.whole(spec.shape)
        return
    parts = [side.reader.parts(side.leaf) for side in pair.sides]
    bands = [band_nbytes(p, side.spec.itemsize) for p, side in zip(parts, pair.sides, strict=True)]
    larger = 0 if bands[0] >= bands[1] else 1
    if bands[larger] > pair.sides[0].reader.cache_nbytes // 2:
        yield from tiles(parts[larger], pair.itemsize, half_nbytes)
    else:
        yield from runs(spec.shape, pair.itemsize, half_nbytes)


def _with_values(described: LeafDifference | None, pair: _Pair) -> LeafDifference:
    first, second = (str(side.spec) for side in pair.sides)
    base = described or LeafDifference(pair.path, "value", first, second)
    found = pair.found
    return dataclasses.replace(
        base,
        size=pair.spec.size,
        count=found.count,
        nan_count=found.nan_count,
        largest=max(0.0, found.largest),
        largest_relative=found.largest_relative,
        index=found.index,
    )
