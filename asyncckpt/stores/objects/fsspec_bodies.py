"""Bodies of requests and answers that pass through aiohttp without a copy of the whole."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, AsyncIterator
from typing import cast

import numpy as np

from asyncckpt.options import KIB
from asyncckpt.ports import Bytes
from asyncckpt.stores.objects.client import Body, RequestError

SLICE_NBYTES = 256 * KIB
"""What is handed to the connection or taken from it at a time, and what may be copied of it."""


def viewed(body: Body) -> memoryview:
    """The bytes of a body, one by one."""
    view = memoryview(body)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast


class SentBody:
    """A buffer as botocore and aiohttp like bodies best: with a length, and sent in slices.

    A whole `bytes` is copied by aiohttp when it sends it, and a `bytearray` twice.
    """

    def __init__(self, body: Body) -> None:
        self._view = viewed(body)
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"SentBody({len(self._view)} bytes)"

    def read(self, size: int | None = -1) -> memoryview:
        """The next bytes, for signatures and checksums."""
        stop = len(self._view) if size is None or size < 0 else self._at + size
        found = self._view[self._at : stop]
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """The next `read` begins there."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        """Where the next `read` begins."""
        return self._at

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        cuts = itertools.count(0, SLICE_NBYTES)
        for start in itertools.takewhile(len(self._view).__gt__, cuts):
            yield self._view[start : start + SLICE_NBYTES]


async def received(chunks: AsyncIterable[bytes], nbytes: int) -> Bytes:
    """The `nbytes` that an answer has announced, in one buffer.

    Raises:
        RequestError: `short` when there are fewer, `invalid` when there are more.
    """
    buffer = cast(Bytes, np.empty(nbytes, np.uint8))
    at = 0
    async for chunk in chunks:
        stop = at + len(chunk)
        if stop > nbytes:
            raise RequestError("invalid", f"the answer is longer than the {nbytes} bytes announced")
        buffer[at:stop] = np.frombuffer(chunk, np.uint8)
        at = stop
    if at < nbytes:
        raise RequestError("short", f"the answer ended after {at} of {nbytes} bytes")
    return buffer
