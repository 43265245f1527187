"""HTTP/1.1 on one connection: heads, bodies into their buffers, responses.

Bodies are received into the buffer in which they are stored; `aws-chunked` ones are decoded with
one copy. A body of unknown length is refused: no client in use sends one.
"""

# Rule 1: one coroutine per connection reads a request, answers it, and reads the next one.
# Rule 2: a connection reads ahead a little while a request is handled, so that it notices when the
#   client disconnects. Handling never ends because of that: a service applies what it received.

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

import numpy as np
import numpy.typing as npt

from tests.simulator.requests import Request, Response

KIB = 1024
MIB = 1024 * KIB
HEAD_MAX_NBYTES = 64 * KIB
BODY_MAX_NBYTES = 5 * 1024 * MIB
LINE_MAX_NBYTES = KIB
SCRATCH_NBYTES = 64 * KIB
"""Heads and bytes that nobody waits for yet are received in pieces of this size."""

AHEAD_MAX_NBYTES = 64 * KIB
"""A connection stops reading once it holds more than this ahead of its coroutine."""

PIECE_NBYTES = MIB
"""A response is handed to the transport in pieces of this size, each once the last one is gone."""

SMALL_NBYTES = 64 * KIB
"""Up to this size a response is one write of head and body, and a body's buffer a bytearray."""

REUSED_NBYTES = MIB
"""Buffers of this size and more are reused. They are multiples of it, and there are at most four
sizes from one power of two to the next, so that a spare buffer often fits a new body."""

KERNEL_PACES = sys.platform == "linux"
SO_MAX_PACING_RATE = 47
"""Of <asm-generic/socket.h>. Works on the loopback device, within 1 % at 8 to 85 MB/s."""

PACE_S = 0.004
"""Where the server itself limits a connection, it moves this much time's worth of bytes at once."""

REASONS = {status.value: status.phrase for status in HTTPStatus} | {308: "Resume Incomplete"}

Room = npt.NDArray[np.uint8]


class BadRequest(Exception):
    """The client sent something else than the HTTP/1.1 that the simulator knows."""


class Buffers:
    """Buffers for bodies; those of objects that are gone are used again.

    The kernel clears every new page, which costs more than receiving the bytes.

    Attributes:
        spare_max_nbytes: most bytes kept for later.
        spare_nbytes: bytes kept now.
    """

    def __init__(self, spare_max_nbytes: int) -> None:
        self.spare_max_nbytes = spare_max_nbytes
        self.spare_nbytes = 0
        self._spare: defaultdict[int, list[Room]] = defaultdict(list)

    def get(self, nbytes: int) -> memoryview:
        """Return a buffer of this length, with any contents."""
        if nbytes <= SMALL_NBYTES:
            return memoryview(bytearray(nbytes))
        if nbytes < REUSED_NBYTES:
            return memoryview(np.empty(nbytes, np.uint8))
        step = max(REUSED_NBYTES, 1 << (nbytes.bit_length() - 3))
        size = -(-nbytes // step) * step
        if spare := self._spare[size]:
            room = spare.pop()
            self.spare_nbytes -= size
        else:
            room = np.empty(size, np.uint8)
        view = np.frombuffer(room, np.uint8, nbytes)
        # The array `view` dies with the last memoryview of it; `room`, which the finalizer holds,
        # does not.
        weakref.finalize(view, self._take_back, room).atexit = False
        return memoryview(view)

    def _take_back(self, room: Room) -> None:
        if self.spare_nbytes + room.nbytes <= self.spare_max_nbytes:
            self.spare_nbytes += room.nbytes
            self._spare[room.nbytes].append(room)

    def close(self) -> None:
        """Drop the spare buffers, and keep none from now on."""
        self.spare_max_nbytes = self.spare_nbytes = 0
        self._spare.clear()


class Inbox:
    """Bytes in the order in which a client sends them; `resume` makes its connection read on."""

    def __init__(self, resume: Callable[[], None]) -> None:
        self._resume = resume
        self._ahead = bytearray()
        self._ended = False
        self._discards = False
        self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        self._target: memoryview | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._rate: float | None = None
        self._paced_from_s = self._paced_nbytes = 0.0

    # The connection's side

    def room(self) -> memoryview:
        """Return where the next bytes go."""
        return self._scratch if self._target is None else self._target

    def received(self, nbytes: int) -> bool:
        """Take `nbytes` that were written to `room()`; return whether more should be read now."""
        if self._target is not None:
            rest = self._target[nbytes:]
            self._target = rest if rest.nbytes else None
            if self._target is None:
                self._wake()
            return True
        if self._discards:
            return True
        self._ahead += self._scratch[:nbytes]
        self._wake()
        return self._waiter is not None or len(self._ahead) <= AHEAD_MAX_NBYTES

    def end(self) -> None:
        """Expect no more bytes."""
        self._ended = True
        self._wake()

    def discard(self) -> None:
        """Drop what was received and what will be."""
        self._discards = True
        self._ahead.clear()
        self._resume()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The reader's side; every method raises EOFError if the bytes end before

    async def _more(self) -> None:
        if self._ended:
            raise EOFError
        self._waiter = asyncio.get_running_loop().create_future()
        self._resume()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def pace(self, rate: float | None) -> None:
        """Limit the bytes per second of the body that begins now."""
        self._rate = rate
        self._paced_from_s, self._paced_nbytes = asyncio.get_running_loop().time(), 0.0

    async def until(self, mark: bytes) -> bytes:
        """Return the bytes before `mark`, and drop the mark."""
        while (end := self._ahead.find(mark)) < 0:
            if len(self._ahead) > HEAD_MAX_NBYTES:
                raise BadRequest("a head without an end")
            await self._more()
        found = bytes(self._ahead[:end])
        del self._ahead[: end + len(mark)]
        return found

    async def into(self, view: memoryview) -> None:
        """Fill `view`."""
        if self._rate is None:
            return await self._fill(view)
        step = max(16 * KIB, int(self._rate * PACE_S))
        for at in range(0, view.nbytes, step):
            await self._fill(view[at : at + step])
            self._paced_nbytes += min(step, view.nbytes - at)
            until_s = self._paced_from_s + self._paced_nbytes / self._rate
            await asyncio.sleep(until_s - asyncio.get_running_loop().time())

    async def _fill(self, view: memoryview) -> None:
        have = min(view.nbytes, len(self._ahead))
        view[:have] = self._ahead[:have]
        del self._ahead[:have]
        self._target = view[have:] if have < view.nbytes else None
        try:
            while self._target is not None:
                await self._more()
        finally:
            self._target = None


class Connection(asyncio.BufferedProtocol):
    """One connection of a client.

    Attributes:
        inbox: what the client sends.
        closed: resolves when the connection is closed or lost.
        keep_alive: whether it is used for another request after this one.
        number: of the connection, from 1.
    """

    def __init__(
        self, begin: Callable[[Connection], None], number: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.inbox = Inbox(self._resume_reading)
        self.closed: asyncio.Future[None] = loop.create_future()
        self.keep_alive = True
        self.number = number
        self._begin = begin
        self._loop = loop
        self._transport: asyncio.Transport = asyncio.Transport()
        self._reads = True
        self._drained: asyncio.Future[None] | None = None
        self._pace: float | None = None

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve the client."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=PIECE_NBYTES, low=PIECE_NBYTES // 4)
        self._begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake all that wait for the client."""
        if not self.closed.done():
            self.closed.set_result(None)
        self.inbox.end()
        self.resume_writing()

    def eof_received(self) -> bool:
        """Close the connection: a client that sends no more is not answered either."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self.inbox.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes, and stop reading once there are enough ahead."""
        if not self.inbox.received(nbytes):
            self._reads = False
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Make `send` wait for the client."""
        self._drained = self._drained or self._loop.create_future()

    def resume_writing(self) -> None:
        """Let `send` go on."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def _resume_reading(self) -> None:
        if not self._reads and not self._transport.is_closing():
            self._reads = True
            self._transport.resume_reading()

    # Requests and responses

    async def head(self) -> Request:
        """Receive the head of the next request. Raises `BadRequest` or EOFError."""
        request = parse_head(await self.inbox.until(b"\r\n\r\n"))
        self.keep_alive = request.headers.get("connection", "").lower() != "close"
        return request

    async def body(self, request: Request, buffers: Buffers, rate: float | None) -> None:
        """Receive the body of the request. Raises `BadRequest` or EOFError."""
        self.inbox.pace(rate)
        if request.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await receive_body(self.inbox, request, buffers)

    async def send(
        self, response: Response, *, rate: float | None = None, stop: int | None = None
    ) -> int:
        """Hand the response to the kernel, and return how many bytes of its body were taken.

        `rate` limits bytes per second. `stop` ends the response before that byte of the body, with
        the connection still open.
        """
        if self._transport.is_closing():
            return 0
        head = encode_head(response, keep_alive=self.keep_alive)
        total = response.nbytes
        left = total if stop is None else max(0, min(stop, total))
        if total <= SMALL_NBYTES:
            body = b"".join(response.body)[:left]
            self._transport.write(head + body)
            return len(body)
        if rate is not None and self._kernel_paces(rate):
            rate = None
        self._transport.write(head)
        sent = 0
        began_s = self._loop.time()
        step = PIECE_NBYTES if rate is None else max(16 * KIB, int(rate * PACE_S))
        for buffer in response.body:
            view = memoryview(buffer)
            for at in range(0, view.nbytes, step):
                piece = view[at : at + min(step, left - sent)]
                self._transport.write(piece)
                if (drained := self._drained) is not None:
                    await drained
                if self._transport.is_closing():
                    return sent
                sent += piece.nbytes
                if sent == left:
                    return sent
                if rate is not None:
                    ahead_s = began_s + sent / rate - self._loop.time()
                    await asyncio.wait((self.closed,), timeout=max(0.0, ahead_s))
        return sent

    async def refuse(self, reason: str) -> None:
        """Answer a request that makes no sense, and close the connection."""
        self.keep_alive = False
        text = f"{reason}\n".encode()
        await self.send(Response(400, body=(text,)))
        self.close()

    async def wait_closed(self) -> None:
        """Wait until the client has closed the connection, or it is lost."""
        self.inbox.discard()
        await asyncio.wait((self.closed,))

    def close(self) -> None:
        """Send what was handed over, then end the connection."""
        self._transport.close()

    def reset(self) -> None:
        """End the connection so that the client gets ECONNRESET."""
        self._set_option(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _kernel_paces(self, rate: float) -> bool:
        if KERNEL_PACES and rate != self._pace:
            if self._set_option(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate)):
                self._pace = rate
        return rate == self._pace

    def _set_option(self, level: int, name: int, value: int | bytes) -> bool:
        own = self._transport.get_extra_info("socket")
        if own is None or own.fileno() < 0:
            return False
        # uvloop's socket has no setsockopt; a duplicate of the descriptor does.
        try:
            with socket.socket(fileno=os.dup(own.fileno())) as other:
                other.setsockopt(level, name, value)
        except OSError:
            return False
        return True


def parse_head(head: bytes) -> Request:
    """Parse a head without its empty line."""
    lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
    except ValueError:
        raise BadRequest(f"no request line: {lines[0][:80]!r}") from None
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest(f"not HTTP/1: {version[:20]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadRequest(f"no header: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip()
    return Request(method, target, headers)


def encode_head(response: Response, *, keep_alive: bool) -> bytes:
    """Encode status line, headers and the empty line."""
    status = response.status
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if status != 204:
        length = response.nbytes if response.length is None else response.length
        lines.append(f"Content-Length: {length}")
    lines.append(f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n")
    return "\r\n".join(lines).encode("latin-1", "replace")


async def receive_body(inbox: Inbox, request: Request, buffers: Buffers) -> None:
    """Receive the body of the request, and decode it and its trailers if it is `aws-chunked`."""
    headers = request.headers
    if "transfer-encoding" in headers:
        raise BadRequest("a body of unknown length")
    request.body = buffers.get(_length(headers.get("content-length", "0")))
    await inbox.into(request.body)
    sha256 = headers.get("x-amz-content-sha256", "")
    if "aws-chunked" in headers.get("content-encoding", "") or sha256.startswith("STREAMING-"):
        body, request.trailers = decode_chunks(request.body)
        wanted = headers.get("x-amz-decoded-content-length")
        if wanted is not None and _length(wanted) != len(body):
            raise BadRequest(f"a body of {len(body)} bytes, not {wanted}")
        request.body = memoryview(body)


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) > BODY_MAX_NBYTES:
        raise BadRequest(f"a body of {text[:40]!r} bytes")
    return int(text)


def decode_chunks(text: memoryview) -> tuple[bytearray, dict[str, str]]:
    """Decode a chunked body: size, data and so on, then trailers. Returns body and trailers."""
    body = bytearray()
    at = 0

    def line() -> bytes:
        nonlocal at
        found, newline, _ = bytes(text[at : at + LINE_MAX_NBYTES]).partition(b"\n")
        if not newline:
            raise BadRequest("a line without an end")
        at += len(found) + 1
        return found.strip()

    while True:
        size = line()
        try:
            nbytes = int(size.partition(b";")[0], 16)
        except ValueError:
            raise BadRequest(f"no length of a chunk: {size[:40]!r}") from None
        if not nbytes:
            break
        chunk = text[at : at + max(nbytes, 0)]
        body += chunk
        at += len(chunk)
        if len(chunk) != nbytes or line():
            raise BadRequest("a chunk of another length than it said")
    trailers = {}
    while trailer := line():
        name, _, value = trailer.decode("latin-1").partition(":")
        trailers[name.strip().lower()] = value.strip()
    return body, trailers
