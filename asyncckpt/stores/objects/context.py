"""State that all parts of an object store share, and reads of the record and of fixed contents."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.flow.beside import Beside
from asyncckpt.flow.shield import together
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import FixedName, Outline
from asyncckpt.options import KIB, MAX_RECORD_NBYTES
from asyncckpt.stores.objects.claims.counting import Claims
from asyncckpt.stores.objects.clients.client import Body, RequestError, unless_missing
from asyncckpt.stores.objects.layout import RECORD, join, owner
from asyncckpt.stores.objects.requests.requests import Requests

T = TypeVar("T")

READS_MAX = 3
"""Reads of a long record that is not valid before it is taken for damaged."""

HEAD_NBYTES = 4 * KIB
"""Beginning of a record that tells which save it is of and which fixed names it lists."""

OBJECTS_MAX = 1 << 20
"""Objects of one checkpoint that are listed to be removed."""

INLINE_NBYTES = 64 * KIB
"""Up to here bytes are copied and checked on the loop (some 5 µs); above, in a worker thread."""


class Background:
    """Work of a store that goes on after its records were written.

    Attributes:
        unnamed: checkpoints whose fixed names could not be written, to be tried again.
    """

    def __init__(self) -> None:
        self.unnamed: set[str] = set()
        self._naming: list[tuple[str, Beside[None]]] = []
        self._tidying: list[Beside[None]] = []

    def name(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Begin to write the fixed names of a checkpoint."""
        self._naming = [other for other in self._naming if not other[1].done]
        self._naming.append((name, Beside(work)))

    def tidy(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin what nobody waits for before the store is closed."""
        self._tidying = [other for other in self._tidying if not other.done]
        self._tidying.append(Beside(work))

    async def named(self, name: str | None = None) -> None:
        """Wait until no fixed names are being written, of one checkpoint or of any."""
        for other, work in tuple(self._naming):
            if name in (None, other):
                await work.settled()

    async def ended(self) -> None:
        """Wait until all work has ended."""
        await self.named()
        while self._tidying:
            await self._tidying.pop().settled()


@dataclass(frozen=True, slots=True)
class Context:
    """State that all attempts and readers of a store share.

    Attributes:
        requests: every request goes through it.
        workers: threads for copies and checks of more than `INLINE_NBYTES`.
        save_id_of: returns the save id in a commit record, or None for anything else.
        outline_of: returns the outline of a commit record, or None for anything else; with
            ``head=True`` that of its beginning alone, unchecked.
        epoch_of: returns the epoch of a commit record or of its beginning, None if it does not say.
        claims: decide which records count.
        google: Orbax's mark is written last.
        background: what goes on after a record was written.
    """

    requests: Requests
    workers: Workers
    save_id_of: Callable[[bytes], str | None]
    outline_of: Callable[..., Outline | None]
    epoch_of: Callable[[bytes], int | None]
    claims: Claims
    google: bool = False
    background: Background = field(default_factory=Background)


@dataclass(frozen=True, slots=True)
class Record:
    """An object at a record's key.

    Attributes:
        data: its bytes; empty where they are too many for a record.
        save_id: identity of the save that it commits; None if it is not a valid record.
        epoch: the claim under which it was written, 0 for none.
    """

    data: bytes
    save_id: str | None
    epoch: int = 0

    async def counts(self, context: Context) -> bool:
        """Return whether it is none that was written after its writer was taken over.

        What is no valid record counts as what it is. Raises `StoreError`.
        """
        return self.save_id is None or await context.claims.counts(self.save_id, self.epoch)

    async def outline(self, context: Context) -> Outline:
        """Return its outline, which is empty if it is not a valid record."""
        found = None
        if self.save_id is not None:
            found = await run_sized(context, len(self.data), context.outline_of, self.data)
        return found or Outline(self.save_id or "")


def shared_paths(outline: Outline) -> frozenset[str]:
    """Return the files of a checkpoint that have no save id in their names."""
    return frozenset(path for path in outline.paths if owner(path) is None)


async def read_record(context: Context, name: str) -> Record | None:
    """Return what is at the record's key now; None if nothing is.

    Raises:
        RequestError: it could not be read, and may be anything.
    """
    try:
        data, save_id = await read_at_once(context, name, max_nbytes=MAX_RECORD_NBYTES)
    except RequestError as error:
        if error.kind == "missing":
            return None
        raise
    epoch = context.epoch_of(data) if data and save_id is not None else None
    return Record(data or b"", save_id, epoch or 0)


async def read_at_once(
    context: Context, name: str, *, max_nbytes: int
) -> tuple[bytes | None, str | None]:
    """Return the bytes at the record's key (None: more than `max_nbytes`), and their save id.

    A record that takes several requests may be replaced between them, and is then read again.

    Raises:
        RequestError: it could not be read.
    """
    for _ in range(READS_MAX):
        data = await context.requests.read(join(name, RECORD), max_nbytes=max_nbytes)
        if data is None:
            return None, None
        save_id = await run_sized(context, len(data), context.save_id_of, data)
        if save_id is not None or len(data) <= context.requests.policy.first_read_nbytes:
            break
    return data, save_id


async def read_head(context: Context, name: str) -> bytes | None:
    """Return the first `HEAD_NBYTES` of the record, which differ between saves; None if it is gone.

    Raises:
        RequestError: it could not be read.
    """
    try:
        return bytes(await context.requests.get(join(name, RECORD), 0, HEAD_NBYTES))
    except RequestError as error:
        if error.kind == "missing":
            return None
        raise


async def paths_of(context: Context, name: str, save_id: str | None) -> list[str]:
    """Return the paths below a checkpoint that carry this save id. Raises `RequestError`."""
    listed = await context.requests.list(name, recursive=True, limit=OBJECTS_MAX)
    paths = [entry.key.removeprefix(f"{name}/") for entry in listed]
    return [path for path in paths if owner(path) == save_id]


async def delete_paths(context: Context, name: str, paths: Iterable[str]) -> None:
    """Delete these paths of a checkpoint. Raises `RequestError`."""
    await context.requests.delete([join(name, path) for path in paths])


async def load_fixed(
    context: Context, name: str, outline: Outline, names: Iterable[FixedName]
) -> dict[str, bytes]:
    """Return the contents of these fixed names, from the record and the attempt's objects.

    Raises:
        CorruptCheckpointError: one is missing or damaged.
        RequestError: one could not be read.
    """
    location = context.requests.location(name)

    async def load(fixed: FixedName) -> tuple[str, bytes]:
        data = outline.contents.get(fixed.path)
        if data is None and fixed.object is not None:
            with unless_missing():
                key = join(name, fixed.object)
                data = await context.requests.read(key, max_nbytes=fixed.nbytes)
        if data is None or not await run_sized(context, len(data), fixed.matches, data):
            raise CorruptCheckpointError(
                f"{location}/{fixed.object or RECORD}: the copy of {fixed.path} is missing or "
                "damaged; only other programs need that file, and the checkpoint itself does not",
                file=fixed.object or RECORD,
                location=location,
                expected=f"{fixed.nbytes} bytes with CRC-32C {fixed.crc32c:08x}",
                found=None if data is None else f"{len(data)} bytes",
            )
        return fixed.path, data

    return dict(await together(load(fixed) for fixed in names))


async def run_sized(context: Context, nbytes: int, work: Callable[..., T], data: object) -> T:
    """Return `work(data)`, run in a worker thread where the data are large."""
    if nbytes <= INLINE_NBYTES:
        return work(data)
    return await context.workers.run(work, data)


def as_view(data: Body) -> memoryview:
    """Return the bytes of any buffer."""
    return memoryview(data).cast("B")


async def owned(context: Context, data: Body) -> bytes:
    """Return a copy of the bytes that never changes."""
    if isinstance(data, bytes):
        return data
    view = as_view(data)
    return await run_sized(context, len(view), bytes, view)
