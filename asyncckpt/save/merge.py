"""Commit of a save by several processes: process 0 makes one index from the entries of all."""

# Rule 1: every chunk of the plan is in exactly one place, or nothing is committed.
# Rule 2: replicas are compared before anything is committed. If they differed, one array would
#   silently be assembled from parts of different values.
# Rule 3: entries count only once their process has posted that it is ready: by then all of its
#   files are durable. Entries that are written again get another name, like an index
#   (`save/commit.py`).

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import MismatchError, UsageError
from asyncckpt.flow.shield import mapped
from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.crc import crc32c
from asyncckpt.format.entries import (
    MAX_ENTRIES_NBYTES,
    Entries,
    Parts,
    WrittenFile,
    decode_entries,
    encode_entries,
)
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import INLINE_NBYTES
from asyncckpt.planning.replicas import checked_rows
from asyncckpt.reports import Timeline
from asyncckpt.save.commit import DATABASE, Commit, Committable, Opened
from asyncckpt.save.contribution import entries_of, part_of
from asyncckpt.save.index import InlineChunks, Payload
from asyncckpt.save.plan_cache import Layout, LayoutCache
from asyncckpt.save.save import SaveState
from asyncckpt.save.shared_plan import out_of_step, taken
from asyncckpt.save.snapshot import Snapshot
from asyncckpt.spec import DTYPES
from asyncckpt.tree import where

READS = 16
"""Entries read at a time."""


@dataclass(eq=False, repr=False)
class SharedCommit(Commit):
    """Commits what all processes have written, as process 0; the others pass their entries on.

    Attributes:
        round_: messages of the processes about this save.
        files: returns where the files of this process go, once that is open.
        state: when all was staged.
        layouts: learns that the trees of the processes may differ.
        Others: as `Commit`; `after_data` always where this process passes its entries on, because
            they say when its files were durable.
    """

    _: KW_ONLY
    round_: Round
    files: Opened
    state: SaveState
    layouts: LayoutCache

    def __post_init__(self) -> None:
        super().__post_init__()
        self.writers = self.round_.group.process_count
        self.after_data |= not self.round_.leads
        self.checked = checked_rows(self.layout.plan, self.round_.number, whole=self.layout.fresh)
        self._others: list[Entries] | None = None

    async def put_index(self, payload: Payload) -> Committable:
        """Write the index of what all processes have written, once all are ready.

        Processes other than 0 pass their entries on. Errors: as `Commit.put_index`, and:

        Raises:
            MismatchError: replicas or local values differ, or `overwrite` does; names the leaf or
                argument, and the processes.
            UsageError: entries of a process cannot be seen here; names it and its host.
        """
        if not self.round_.leads:
            return await self._pass_on(self._entries(payload))
        if self._others is None:
            refuse = (
                None if self.layout.compared else partial(out_of_step, self.round_, self.layouts)
            )
            ready = await self.round_.gathered("ready", instead="plan", refuse=refuse)
            self._others = await mapped(self._read, sorted(ready.items()), READS)
        snapshot, layout = self.request.snapshot, self.layout
        entries = [self._entries(payload), *self._others]
        self._check_overwrite(entries)
        hosts = self.round_.group.hosts
        parts = tuple([part_of(one, hosts[one.process]) for one in entries])
        spans = [one.facts.get("spans", ()) for one in self._others]
        timelines = list(map(Timeline.from_rows, spans))
        for one in self._others:
            for leaf, value in one.facts.get("scalars", ()):
                snapshot.values[leaf] = value
        run = self.compute.run
        boxes = await run(BoxesOfParts, entries)
        await run(compare, layout, snapshot, entries, boxes, self.round_.group.named)
        merged, late = await run(merge, layout, entries, boxes, self.round_.group.named)
        merged = replace(merged, timeline=payload.timeline.joined(timelines))
        if late:
            await self._put_late(merged, late)
        return replace(await super().put_index(merged), parts=parts, timelines=timelines)

    def _entries(self, payload: Payload) -> Entries:
        return entries_of(
            payload,
            self.layout,
            self.request.snapshot,
            save_id=self.save_id,
            process=self.round_.group.process_index,
            overwrite=self.request.overwrite,
            times=(self.state.blocked_s, time.perf_counter() - self.request.begun),
        )

    def _check_overwrite(self, entries: Sequence[Entries]) -> None:
        named, asked = self.round_.group.named, self.request.overwrite
        for one in entries:
            if (other := one.facts["overwrite"]) != asked:
                raise MismatchError(
                    f"overwrite={asked!r} on {named(0)}, overwrite={other!r} on "
                    f"{named(one.process)}: pass the same overwrite= on all processes; nothing was "
                    "committed",
                    expected=asked,
                    found=other,
                )

    async def _pass_on(self, entries: Entries) -> Committable:
        path = f"{self.save_id}-entries-{entries.process}-{next(self._numbers)}"
        data = await self.compute.run(encode_entries, entries)
        await (await self.files()).pass_on(path, data)
        part = part_of(entries, self.round_.group.host)
        return Committable(path.encode(), part.written_nbytes, part.file_count, (part,))

    async def _read(self, one: tuple[int, bytes]) -> Entries:
        """Return the entries of one process, given its number and their path."""
        process, path = one[0], one[1].decode()
        attempt = await self.files()
        data = await taken(attempt, path, self.round_, max_nbytes=MAX_ENTRIES_NBYTES)
        entries = await self.compute.run(decode_entries, data, file=path)
        if (entries.save_id, entries.process) != (self.save_id, process):
            raise _disagreement(f"{path} is of process {entries.process}, {entries.save_id}")
        return entries

    async def _put_late(self, merged: Payload, late: Mapping[int, bytes]) -> None:
        """Write the chunks that were assembled here, and add their places."""
        path = f"d/{self.save_id}-parts{next(self._numbers)}"
        data = b"".join(late.values())
        assert self.attempt is not None
        await self.attempt.put(f"{DATABASE}/{path}", data)
        chunks, offset = merged.chunks, 0
        for chunk, stored in late.items():
            chunks.file[chunk], chunks.offset[chunk] = len(merged.files), offset
            chunks.nbytes[chunk] = len(stored)
            chunks.crc32c[chunk] = int.from_bytes(stored[-CRC_NBYTES:], "little")
            offset += len(stored)
        merged.files.append(WrittenFile(path, len(data), crc32c(data)))


class BoxesOfParts:
    """The parts that all processes have sent of small leaves, sorted.

    Attributes:
        parts: array by array, the boxes of each in C order, equal boxes of several holders by
            process; their values stay in the order in which they were sent.
        process: the holder of each.
        start: where its values begin.
        first: row of the first part of the same box.
    """

    def __init__(self, entries: Sequence[Entries]) -> None:
        every = Parts.joined([one.parts for one in entries])
        process = np.repeat([one.process for one in entries], [len(one.parts) for one in entries])
        columns = every.box.reshape(len(every), 2 * every.box.shape[2]).T
        # The last key counts most.
        order = np.lexsort((process, *columns[::-1], every.array))
        self.parts = Parts(
            every.array[order],
            every.nbytes[order],
            every.crc[order],
            every.box[order],
            every.values,
        )
        self.process = process[order]
        self.start = (np.cumsum(every.nbytes) - every.nbytes)[order]
        array, box = self.parts.array, self.parts.box
        same = (array[1:] == array[:-1]) & (box[1:] == box[:-1]).all(axis=(1, 2))
        self.first = np.arange(len(array))
        self.first[1:][same] = 0
        np.maximum.accumulate(self.first, out=self.first)

    def by_array(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield each array, and its rows with values: one of the holders of a box sends it."""
        sent = np.flatnonzero(self.parts.nbytes)
        arrays, starts = np.unique(self.parts.array[sent], return_index=True)
        yield from zip(arrays.tolist(), np.split(sent, starts[1:]), strict=False)

    def chunk(self, layout: Layout, array: int, rows: npt.NDArray[np.int64]) -> bytes:
        """Return the only chunk of a small array, assembled from its parts.

        Raises:
            UsageError: parts are missing.
        """
        part = layout.plan.arrays.of(array)
        dtype, rank = DTYPES[part.spec.dtype], len(part.spec.shape)
        offset, shape = self.parts.box[rows, 0, :rank], self.parts.box[rows, 1, :rank]
        nbytes, starts = self.parts.nbytes[rows], self.start[rows]
        whole = part.spec.size * dtype.itemsize
        if int(nbytes.sum()) != whole:
            raise _disagreement(f"{nbytes.sum()} of {whole} bytes of one leaf were sent")
        view = memoryview(self.parts.values)
        pieces = [*map(view.__getitem__, map(slice, starts.tolist(), (starts + nbytes).tolist()))]
        if part.grid.chunk_shape == part.spec.shape and (shape[:, 1:] == part.spec.shape[1:]).all():
            return b"".join(pieces)  # rows of the array, which follow each other
        values = np.zeros(part.grid.chunk_shape, dtype)
        begins = (offset - part.offset).tolist()
        for begin, extent, piece in zip(begins, shape.tolist(), pieces, strict=True):
            inside: Any = (*map(slice, begin, map(add, begin, extent)), ...)
            values[inside] = np.frombuffer(piece, dtype).reshape(extent)
        return values.tobytes()


def merge(
    layout: Layout, entries: Sequence[Entries], boxes: BoxesOfParts, named: Callable[[int], str]
) -> tuple[Payload, dict[int, bytes]]:
    """Return places and checksums of all chunks, and the stored bytes of those without a place.

    Without a place are the chunks of small leaves whose parts several processes hold.

    Raises:
        UsageError: a chunk has no place, or two; names the processes.
    """
    arrays = layout.plan.arrays
    count = arrays.chunk_count
    file = np.full(count, -1, np.int64)
    offset, nbytes = np.zeros(count, np.int64), np.zeros(count, np.int64)
    crc = np.zeros(count, np.uint32)
    seen = np.zeros(count, np.int64)
    files: list[WrittenFile] = []
    small: dict[int, bytes] = {}
    for one in entries:
        if one.chunk.size and int(one.chunk.max()) >= count:
            raise _disagreement(named(one.process))
        np.add.at(seen, one.chunk, 1)
        file[one.chunk] = one.file + len(files)
        offset[one.chunk], nbytes[one.chunk], crc[one.chunk] = one.offset, one.nbytes, one.crc
        files += one.files
        for chunk, value in one.values.items():
            small[chunk] = value
            seen[chunk] += 1
    late: dict[int, bytes] = {}
    for array, rows in boxes.by_array():
        chunk = int(arrays.first_chunk[array])
        if seen[chunk]:
            continue  # a process holds all of it
        seen[chunk] = 1
        payload = boxes.chunk(layout, array, rows)
        stored = payload + crc32c(payload).to_bytes(CRC_NBYTES, "little")
        (small if len(stored) <= INLINE_NBYTES else late)[chunk] = stored
    if (seen != 1).any():
        chunk = int(np.flatnonzero(seen != 1)[0])
        raise _disagreement(f"chunk {chunk} of {count} was written {seen[chunk]} times")
    for chunk, value in small.items():
        nbytes[chunk] = len(value)
        crc[chunk] = int.from_bytes(value[-CRC_NBYTES:], "little")
    own = arrays.first_chunk[arrays.inline]
    inline = InlineChunks(b"".join(map(small.__getitem__, own.tolist())), nbytes[own])
    return Payload(ChunkIndex(file, offset, nbytes, crc), inline, files), late


def _disagreement(reason: str) -> UsageError:
    return UsageError(
        f"the processes planned differently ({reason}); nothing was committed. Save again: all "
        "plans that were kept are dropped"
    )


def compare(
    layout: Layout,
    snapshot: Snapshot,
    entries: Sequence[Entries],
    boxes: BoxesOfParts,
    named: Callable[[int], str],
) -> None:
    """Check that replicas and local values are equal on all processes.

    Raises:
        MismatchError: some are not; names the first such leaf and two processes.
    """
    for one in entries:
        if one.digest != entries[0].digest:
            raise _disagreement(f"{named(one.process)} has another schema than {named(0)}")
    counts = {"scalar": len(snapshot.paths), "checked": layout.plan.arrays.chunk_count}
    for what, count in counts.items():
        found = _first_difference(entries, what, count, named)
        if found is None:
            continue
        number, one_process, other_process = found
        leaf = number if what == "scalar" else _leaf_of(layout, snapshot, number)
        raise _difference(snapshot.paths[leaf], named(one_process), named(other_process))
    parts, first = boxes.parts, boxes.first
    differ = np.flatnonzero(parts.crc != parts.crc[first])
    if differ.size:
        row = int(differ[0])
        leaf = snapshot.array_leaf[int(layout.plan.arrays.leaf[parts.array[row]])]
        processes = boxes.process[[first[row], row]].tolist()
        raise _difference(snapshot.paths[leaf], *map(named, processes))


def _first_difference(
    entries: Sequence[Entries], what: str, count: int, named: Callable[[int], str]
) -> tuple[int, int, int] | None:
    """Return the lowest number with different checksums, and two processes that have them.

    `what` is ``scalar`` or ``checked``, and `count` the number of those.
    """
    crcs, owners = np.zeros(count, np.uint32), np.full(count, -1, np.int64)
    found: tuple[int, int, int] | None = None
    for one in entries:
        numbers, theirs = getattr(one, what), getattr(one, f"{what}_crc")
        if numbers.size and int(numbers.max()) >= count:
            raise _disagreement(named(one.process))
        first = owners[numbers] < 0
        crcs[numbers[first]], owners[numbers[first]] = theirs[first], one.process
        differ = numbers[crcs[numbers] != theirs]
        if differ.size and (found is None or differ.min() < found[0]):
            number = int(differ.min())
            found = number, int(owners[number]), one.process
    return found


def _leaf_of(layout: Layout, snapshot: Snapshot, chunk: int) -> int:
    """Return the leaf that a chunk belongs to."""
    arrays = layout.plan.arrays
    first = arrays.first_chunk.copy()
    first[list(arrays.tied)] = arrays.chunk_count  # they have the numbers of earlier arrays
    array = int(np.flatnonzero(first <= chunk)[-1])
    return snapshot.array_leaf[int(arrays.leaf[array])]


def _difference(path: str, one: str, other: str) -> MismatchError:
    return MismatchError(
        f"{where(path)}: {one} and {other} hold different values of this leaf, or of one shard of "
        "it; nothing was committed. If every process is to keep its own, wrap it in "
        "asyncckpt.PerProcess; if the values may differ and one will do, as BatchNorm's statistics "
        'do, return LeafOptions(replicas="first") for it in leaf_options; else find out why they '
        "differ",
        path=path,
        expected="equal values",
        found="different values",
    )
