"""Commit of a save by several processes: process 0 makes one index from the entries of all."""

# Rule 1: every chunk of the plan is in exactly one place, or nothing is committed.
# Rule 2: replicas are compared before anything is committed. If they differed, one array would
#   silently be assembled from parts of different values.
# Rule 3: entries count only once their process has posted that it is ready: by then all of its
#   files are durable. Entries that are written again get another name, like an index (`commit.py`).

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
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
    decode_entries,
    encode_entries,
)
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import INLINE_NBYTES
from asyncckpt.planning.replicas import checked_rows
from asyncckpt.reports import FileInfo, ProcessPart, Timeline
from asyncckpt.save.commit import DATABASE, Commit, Committable, Opened
from asyncckpt.save.index import Payload
from asyncckpt.save.plan_cache import Layout, LayoutCache
from asyncckpt.save.save import SaveState
from asyncckpt.save.shared_plan import out_of_step, taken
from asyncckpt.save.snapshot import Snapshot
from asyncckpt.spec import DTYPES
from asyncckpt.tree import where

READS = 16
"""Entries read concurrently."""


@dataclass(eq=False, repr=False)
class SharedCommit(Commit):
    """Commit of what all processes have written; processes other than 0 pass on their entries.

    Attributes:
        round_: messages of the processes about this save.
        state: has the time until all was staged.
        layouts: learns that the trees of the processes may differ.
        after_data: always set for processes other than 0, because their entries say when their
            files were durable.
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

        Processes other than 0 pass on their entries. Errors: as `Commit.put_index`, and:

        Raises:
            MismatchError: replicas, local values or `overwrite` differ; names the leaf or argument,
                and the processes.
            UsageError: a process's entries are not visible here; names it and its host.
        """
        if not self.round_.leads:
            return await self._pass_on(self._entries(payload))
        if self._others is None:

            def refuse(process: int, message: bytes) -> MismatchError:
                change = json.loads(message)[0]
                return out_of_step(self.round_, self.layouts, process, 0, change)

            ready = await self.round_.gathered(
                "ready", instead="plan", refuse=None if self.layout.compared else refuse
            )
            self._others = await mapped(self._read, sorted(ready.items()), READS)
        snapshot, layout = self.request.snapshot, self.layout
        entries = [self._entries(payload), *self._others]
        self._check_overwrite(entries)
        hosts = self.round_.group.hosts
        parts = tuple([_part_of(one, hosts[one.process]) for one in entries])
        spans = [one.facts.get("spans", ()) for one in self._others]
        timelines = list(map(Timeline.from_rows, spans))
        for one in self._others:
            for leaf, value in one.facts.get("scalars", ()):
                snapshot.values[leaf] = value
        named = self.round_.group.named
        merged, late = await self.compute.run(merge, layout, snapshot, entries, named)
        merged = replace(merged, timeline=payload.timeline.joined(timelines))
        if late:
            await self._put_late(merged, late)
        return replace(await super().put_index(merged), parts=parts, timelines=timelines)

    def _entries(self, payload: Payload) -> Entries:
        """Return the entries of this process."""
        plan, extents, snapshot = self.layout.plan, payload.chunks, self.request.snapshot
        process = self.round_.group.process_index
        written = np.flatnonzero((extents.file >= 0) & (plan.row_writer == process))
        inline = list(plan.inline)
        ends = [0, *np.cumsum(extents.nbytes[inline]).tolist()]
        values = [bytes(payload.inline[start:end]) for start, end in itertools.pairwise(ends)]
        parts = [
            (held.array, held.box, data if held.writer == process else b"", crc32c(data))
            for held, data in payload.parts
        ]
        scalars = [[snapshot.kinds[leaf], snapshot.values[leaf]] for leaf in snapshot.scalars]
        return Entries(
            save_id=self.save_id,
            process=process,
            digest=self.layout.schema_digest,
            files=payload.files,
            chunk=plan.row_chunk[written],
            file=extents.file[written],
            offset=extents.offset[written],
            nbytes=extents.nbytes[written],
            crc=extents.crc32c[written],
            values=dict(zip(plan.row_chunk[inline].tolist(), values, strict=True)),
            parts=Parts.of(parts),
            checked=plan.row_chunk[self.checked],
            checked_crc=payload.checked_crc,
            scalar=np.array(list(snapshot.scalars), np.int64),
            scalar_crc=np.array([crc32c(json.dumps(s).encode()) for s in scalars], np.uint32),
            facts={
                "scalars": [(leaf, snapshot.values[leaf]) for leaf in snapshot.only_here],
                "spans": payload.timeline.rows(1),
                "times": (self.state.blocked_s, time.perf_counter() - self.request.begun),
                "overwrite": self.request.overwrite,
            },
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
        part = _part_of(entries, self.round_.group.host)
        return Committable(path.encode(), part.written_nbytes, part.file_count, (part,))

    async def _read(self, one: tuple[int, bytes]) -> Entries:
        """Return the entries of a process, given its number and their path."""
        process, path = one[0], one[1].decode()
        attempt = await self.files()
        data = await taken(attempt, path, self.round_, max_nbytes=MAX_ENTRIES_NBYTES)
        entries = await self.compute.run(decode_entries, data, file=path)
        if (entries.save_id, entries.process) != (self.save_id, process):
            raise _disagreement(f"{path} is of process {entries.process}, {entries.save_id}")
        return entries

    async def _put_late(self, merged: Payload, late: Mapping[int, bytes]) -> None:
        """Write the chunks assembled from parts, and add their places."""
        path = f"d/{self.save_id}-parts{next(self._numbers)}"
        data = b"".join(late.values())
        await (await self.opened()).put(f"{DATABASE}/{path}", data)
        chunks, offset = merged.chunks, 0
        for chunk, stored in late.items():
            chunks.file[chunk], chunks.offset[chunk] = len(merged.files), offset
            chunks.nbytes[chunk] = len(stored)
            chunks.crc32c[chunk] = int.from_bytes(stored[-CRC_NBYTES:], "little")
            offset += len(stored)
        merged.files.append(FileInfo(path, len(data), crc32c(data)))


def _part_of(entries: Entries, host: str) -> ProcessPart:
    """Return a process's line of the report."""
    nbytes = sum(file.nbytes for file in entries.files)
    return ProcessPart(entries.process, host, nbytes, len(entries.files), *entries.facts["times"])


class BoxesOfParts:
    """The parts of small leaves that all processes have sent, sorted.

    Attributes:
        parts: sorted by array, then box in C order, then process; their values stay in the order in
            which they were sent.
        process: holder of each part.
        start: offset of its values.
        first: row of the first part of the same box.
    """

    def __init__(self, entries: Sequence[Entries]) -> None:
        every = Parts.joined([one.parts for one in entries])
        process = np.repeat([one.process for one in entries], [len(one.parts) for one in entries])
        columns = every.box.reshape(len(every), 2 * every.box.shape[2]).T
        # The last key is the primary one.
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
        """Yield each array and its rows with values: one holder of each box sends them."""
        sent = np.flatnonzero(self.parts.nbytes)
        arrays, starts = np.unique(self.parts.array[sent], return_index=True)
        yield from zip(arrays.tolist(), np.split(sent, starts[1:]), strict=False)

    def chunk(self, layout: Layout, array: int, rows: npt.NDArray[np.int64]) -> bytes:
        """Assemble the only chunk of a small array from its parts.

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
            return b"".join(pieces)  # consecutive rows of the array
        values = np.zeros(part.grid.chunk_shape, dtype)
        begins = (offset - part.offset).tolist()
        for begin, extent, piece in zip(begins, shape.tolist(), pieces, strict=True):
            inside: Any = (*map(slice, begin, map(add, begin, extent)), ...)
            values[inside] = np.frombuffer(piece, dtype).reshape(extent)
        return values.tobytes()


def merge(
    layout: Layout, snapshot: Snapshot, entries: Sequence[Entries], named: Callable[[int], str]
) -> tuple[Payload, dict[int, bytes]]:
    """Return places and checksums of all chunks, and the stored bytes of chunks without a place.

    Chunks without a place are assembled from the parts of several processes. Blocking.

    Raises:
        MismatchError: as `compare`.
        UsageError: a chunk was written by no process, or twice; names the processes.
    """
    boxes = BoxesOfParts(entries)
    compare(layout, snapshot, entries, boxes, named)
    arrays = layout.plan.arrays
    count = arrays.chunk_count
    file = np.full(count, -1, np.int64)
    offset, nbytes = np.zeros(count, np.int64), np.zeros(count, np.int64)
    crc = np.zeros(count, np.uint32)
    seen = np.zeros(count, np.int64)
    files: list[FileInfo] = []
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
            continue  # a process has written all of it
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
    inline = b"".join(map(small.__getitem__, own.tolist()))
    return Payload(ChunkIndex(file, offset, nbytes, crc), inline, files), late


def _disagreement(reason: str) -> UsageError:
    return UsageError(
        f"the processes planned differently ({reason}); nothing was committed. Save again: all "
        "cached plans were dropped"
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
        MismatchError: some differ; names the first such leaf and two processes.
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
        names = named(one_process), named(other_process)
        raise _difference(snapshot.paths[leaf], *names, array=what != "scalar")
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

    `what` is ``scalar`` or ``checked``; the numbers are below `count`.
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
    first[list(arrays.tied)] = arrays.chunk_count  # they share the chunks of earlier arrays
    array = int(np.flatnonzero(first <= chunk)[-1])
    return snapshot.array_leaf[int(arrays.leaf[array])]


def _difference(path: str, one: str, other: str, *, array: bool = True) -> MismatchError:
    # `leaf_options` is not called for scalars.
    first = (
        "if any one of the values will do, as for BatchNorm's statistics, return "
        'LeafOptions(replicas="first") for it in leaf_options; '
    )
    return MismatchError(
        f"{where(path)}: {one} and {other} hold different values of this leaf, or of one of its "
        "shards; nothing was committed. To save the value of each process, wrap the leaf in "
        f"asyncckpt.PerProcess; {first if array else ''}else find out why they differ",
        path=path,
        expected="equal values",
        found="different values",
    )
