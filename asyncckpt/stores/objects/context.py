"""State shared by all parts of an object store; reads of records and of fixed-name contents."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sized
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.flow.background import BackgroundTask
from asyncckpt.flow.shield import mapped, together
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import STEP_NAME
from asyncckpt.format.record_values import FixedName, Outline
from asyncckpt.options import KIB, MAX_RECORD_NBYTES
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.clients.client import INLINE_NBYTES, Body, unless_missing
from asyncckpt.stores.objects.counting import Claims
from asyncckpt.stores.objects.layout import LISTED_MAX, join, owner
from asyncckpt.stores.objects.probe import Probes
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.paths import CONTROL

T = TypeVar("T")
SizedT = TypeVar("SizedT", bound=Sized)

READS_MAX = 3
"""Reads of a long invalid record before it counts as damaged."""

HEAD_NBYTES = 4 * KIB
"""Size of a record's head, which holds its save id and usually all of its fixed names."""

READS = 16
"""Ranged reads in flight by default, which `Requests` adapts, and records read for a takeover."""


class Background:
    """Background tasks of a store, which begin once a record is written.

    Attributes:
        unnamed: checkpoints whose fixed names have not been written yet.
    """

    def __init__(self) -> None:
        self.unnamed: set[str] = set()
        self._tasks: list[tuple[BackgroundTask[None], str | None]] = []

    def begin(self, work: Coroutine[Any, Any, None], *, naming: str | None = None) -> None:
        """Begin a task, which may write the fixed names of the checkpoint `naming`."""
        self._tasks = [other for other in self._tasks if not other[0].done]
        self._tasks.append((BackgroundTask(work), naming))

    async def named(self, name: str | None = None) -> None:
        """Wait until no fixed names of this checkpoint, or of any, are being written."""
        for task, naming in tuple(self._tasks):
            if naming is not None and name in (None, naming):
                await task.settled()

    async def ended(self) -> None:
        """Wait until all tasks have ended, including those that they begin."""
        while self._tasks:
            await self._tasks[0][0].settled()
            self._tasks = [other for other in self._tasks if not other[0].done]


@dataclass(slots=True, eq=False)
class Context:
    """State that a store shares with its attempts and readers.

    Attributes:
        requests: makes every request; closed with the store.
        workers: threads for copies and checks of more than `INLINE_NBYTES`.
        save_id_of: `asyncckpt.format.record.save_id_of`, or the same for another format.
        outline_of: likewise; long records are parsed in `workers`.
        epoch_of: likewise.
        claims: decides which records count.
        probes: finds out which conditional requests work.
    """

    requests: Requests
    workers: Workers
    save_id_of: Callable[[bytes], str | None]
    outline_of: Callable[..., Outline | None]
    epoch_of: Callable[[bytes], int | None]
    claims: Claims = field(init=False)
    probes: Probes = field(init=False)
    background: Background = field(init=False, default_factory=Background)

    def __post_init__(self) -> None:
        self.claims = Claims(self.requests)
        self.probes = Probes(self.requests)

    @property
    def google(self) -> bool:
        """Whether to write `commit_success.txt` last, which Orbax expects on Google's store."""
        return self.requests.url.startswith("gs://")

    async def checkpoint_names(self) -> list[str]:
        """Return the prefixes below the root, in no order, including those of open attempts.

        Includes `RECORD_NAME` if the root is itself a checkpoint. Raises as `Requests.list_all`.
        """
        return [
            entry.key
            for entry in await self.requests.list_all("", recursive=False)
            if entry.key == RECORD_NAME or (entry.is_prefix and entry.key not in ("", CONTROL))
        ]

    async def read_record(self, name: str, *, max_nbytes: int = MAX_RECORD_NBYTES) -> Record | None:
        """Return the object at the record's key, or None. Raises `RequestError`.

        Reading a long record takes several requests: if it is replaced in between, it is read
        again.
        """
        with unless_missing():
            for _ in range(READS_MAX):
                data = await self.requests.read(join(name, RECORD_NAME), max_nbytes=max_nbytes)
                if data is None:
                    return Record(None, None)
                save_id = await self.run_sized(self.save_id_of, data)
                if save_id is not None or len(data) <= self.requests.policy.first_read_nbytes:
                    break
            epoch = self.epoch_of(data) if data and save_id is not None else None
            return Record(data, save_id, epoch or 0)
        return None

    async def counts(self, record: Record) -> bool:
        """Return whether a record counts, or is not a valid record. Raises `StoreError`.

        A record does not count if its writer was fenced before it wrote the record.
        """
        return record.save_id is None or await self.claims.counts(record.save_id, record.epoch)

    async def outline(self, record: Record | None) -> Outline:
        """Return the outline of a record; empty if it is missing or not valid."""
        if record is None or record.data is None or record.save_id is None:
            return Outline("")
        return await self.run_sized(self.outline_of, record.data) or Outline(record.save_id)

    async def committed(self) -> list[str]:
        """Return the save ids of the steps' records of claimed epochs that count now."""

        async def look(name: str) -> str | None:
            record = await self._record_or_head(name)
            if record is None or not record.epoch or not await self.counts(record):
                return None
            return record.save_id

        steps = list(filter(STEP_NAME.fullmatch, await self.checkpoint_names()))
        return [save_id for save_id in await mapped(look, steps, READS) if save_id is not None]

    async def _record_or_head(self, name: str) -> Record | None:
        """Return the record, from its unchecked head if possible."""
        head = await self.read_head(name)
        if head is None:
            return None
        # A list may name too many records: readers check whether a record is valid.
        outline, epoch = self.outline_of(head, head=True), self.epoch_of(head)
        if outline is None or epoch is None:
            return await self.read_record(name)
        return Record(head, outline.save_id, epoch)

    async def read_head(self, name: str) -> bytes | None:
        """Return the first `HEAD_NBYTES` of the record, which identify its save.

        None if it is missing. Raises `RequestError`.
        """
        with unless_missing():
            return bytes(await self.requests.get(join(name, RECORD_NAME), 0, HEAD_NBYTES))
        return None

    async def paths_of(self, name: str, save_id: str | None) -> list[str]:
        """Return the paths below a checkpoint that carry this save id. Raises `RequestError`."""
        listed = await self.requests.list(name, recursive=True, limit=LISTED_MAX)
        paths = [entry.key.removeprefix(f"{name}/") for entry in listed]
        return [path for path in paths if owner(path) == save_id]

    async def delete_paths(self, name: str, paths: Iterable[str]) -> None:
        """Delete these paths of a checkpoint. Raises `RequestError`."""
        await self.requests.delete([join(name, path) for path in paths])

    async def load_fixed(
        self, name: str, outline: Outline, names: Iterable[FixedName]
    ) -> dict[str, bytes]:
        """Return the contents of these fixed names, from the record and the attempt's objects.

        Raises:
            CorruptCheckpointError: a content is missing or damaged.
            RequestError: a content could not be read.
        """
        location = self.requests.location(name)

        async def load(fixed: FixedName) -> tuple[str, bytes]:
            data = outline.contents.get(fixed.path)
            if data is None and fixed.object is not None:
                with unless_missing():
                    key = join(name, fixed.object)
                    data = await self.requests.read(key, max_nbytes=fixed.nbytes)
            if data is None or not await self.run_sized(fixed.matches, data):
                raise CorruptCheckpointError(
                    f"{location}/{fixed.object or RECORD_NAME}: the copy of {fixed.path} is "
                    "missing or damaged; only other programs need that file, not the checkpoint "
                    "itself",
                    file=fixed.object or RECORD_NAME,
                    location=location,
                    expected=f"{fixed.nbytes} bytes with CRC-32C {fixed.crc32c:08x}",
                    found=None if data is None else f"{len(data)} bytes",
                )
            return fixed.path, data

        return dict(await together(load(fixed) for fixed in names))

    async def run_sized(self, work: Callable[[SizedT], T], data: SizedT) -> T:
        """Return `work(data)`, computed in a worker thread if the data are large."""
        if len(data) <= INLINE_NBYTES:
            return work(data)
        return await self.workers.run(work, data)

    async def owned(self, *blocks: Body) -> bytes:
        """Return the bytes of these blocks as one immutable object."""
        if len(blocks) == 1 and isinstance(blocks[0], bytes):
            return blocks[0]
        if sum(map(len, blocks)) <= INLINE_NBYTES:
            return b"".join(blocks)
        return await self.workers.run(b"".join, blocks)


@dataclass(frozen=True, slots=True)
class Record:
    """An object at a record's key.

    Attributes:
        data: its bytes; None if it is larger than the reader allows.
        save_id: save that it commits; None if it is not a valid record.
        epoch: claim under which it was written, 0 for none.
    """

    data: bytes | None
    save_id: str | None
    epoch: int = 0


def shared_paths(outline: Outline) -> frozenset[str]:
    """Return the files of a checkpoint whose names carry no save id."""
    return frozenset(path for path in outline.paths if owner(path) is None)
