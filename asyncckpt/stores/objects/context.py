"""What all parts of an object store share, and how they read what stands at a record's key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncckpt.flow.threads import Workers
from asyncckpt.options import KIB, MAX_RECORD_NBYTES
from asyncckpt.ports import Bytes
from asyncckpt.stores.objects.client import Body, RequestError
from asyncckpt.stores.objects.layout import RECORD, join
from asyncckpt.stores.objects.requests import Requests

READS_MAX = 3
"""Reads of a long record that is no valid one before it is taken for damaged."""

INLINE_NBYTES = 64 * KIB
"""Up to here bytes are copied and checked on the loop (some 5 µs); above, in a worker thread."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all attempts and readers of a store share.

    Attributes:
        requests: every request goes through it.
        workers: threads for copies and checks of more than `INLINE_NBYTES`.
        save_id_of: the save id in a commit record, or None for anything that is not a valid one.
        google: Orbax's mark is written last.
    """

    requests: Requests
    workers: Workers
    save_id_of: Callable[[bytes], str | None]
    google: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """What stands at a record's key.

    Attributes:
        data: its bytes; empty where they are too many for a record.
        save_id: of the save that it commits; None if it is no valid record.
    """

    data: bytes
    save_id: str | None


async def read_record(context: Context, name: str) -> Record | None:
    """What stands at the record's key now; None if there is nothing.

    Raises:
        RequestError: it could not be read, and may be anything.
    """
    try:
        data, save_id = await read_at_once(context, name, max_nbytes=MAX_RECORD_NBYTES)
    except RequestError as error:
        if error.kind == "missing":
            return None
        raise
    return Record(data or b"", save_id)


async def read_at_once(
    context: Context, name: str, *, max_nbytes: int
) -> tuple[bytes | None, str | None]:
    """What stands at the record's key (None: more bytes than that), and its save id.

    A record that takes several requests may be replaced between them, and is then read again.

    Raises:
        RequestError: it could not be read.
    """
    for _ in range(READS_MAX):
        data = await context.requests.read(join(name, RECORD), max_nbytes=max_nbytes)
        if data is None:
            return None, None
        if len(data) <= INLINE_NBYTES:
            save_id = context.save_id_of(data)
        else:
            save_id = await context.workers.run(context.save_id_of, data)
        if save_id is not None or len(data) <= context.requests.policy.first_read_nbytes:
            break
    return data, save_id


def as_view(data: Body) -> memoryview:
    """The bytes of any buffer."""
    return memoryview(data).cast("B")


async def owned(context: Context, data: Body) -> bytes:
    """A copy of the bytes that nobody changes."""
    if isinstance(data, bytes):
        return data
    view = as_view(data)
    if len(view) <= INLINE_NBYTES:
        return bytes(view)
    return await context.workers.run(bytes, view)


async def sendable(context: Context, data: Bytes | bytes | bytearray) -> tuple[Body, bool]:
    """What the client takes with these bytes, and whether it is a copy of ours."""
    if context.requests.traits.body == "any" or isinstance(data, (bytes, bytearray)):
        return data, False
    if data.nbytes <= INLINE_NBYTES:
        return data.tobytes(), True
    return await context.workers.run(_copy, data), True


def _copy(data: Bytes) -> bytearray:
    # `copyto` releases the GIL, `bytes(view)` does not.
    copy = bytearray(data.nbytes)
    np.copyto(np.frombuffer(copy, np.uint8), data)
    return copy
