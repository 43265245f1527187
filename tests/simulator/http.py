"""HTTP/1.1 on one connection of the server: heads, bodies into their buffers, answers.

Bodies of known length are received into the buffer in which they are stored; chunked ones, and the
`aws-chunked` bodies inside them, are decoded with one copy.
"""

# Rule 1: one request at a time; what a client sends ahead waits.
# Rule 2: reading goes on while a request is handled, so that a lost connection is noticed, but
#   nobody's handling ends because of it: a service applies what it has received.

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Protocol, cast

from asyncckpt.testing.objectstore.buffers import Buffers
from asyncckpt.testing.objectstore.requests import Request, Response

SCRATCH_NBYTES = 256 * 1024
"""Heads and chunked bodies are read into a buffer of this size."""

HEAD_MAX_NBYTES = 64 * 1024
AHEAD_MAX_NBYTES = 1024 * 1024
BODY_MAX_NBYTES = 5 * 1024**3
PIECE_NBYTES = 1024 * 1024
"""An answer is handed to the transport in pieces of this size, each when the last one is gone."""

KERNEL_PACES = sys.platform == "linux"
SO_MAX_PACING_RATE = 47
"""Of <asm-generic/socket.h>. Works on the loopback device, within 1 % at 8 to 85 MB/s."""

PACE_S = 0.004
"""Where the server itself limits a connection, it is at most this far ahead of its bandwidth."""

SMALL_NBYTES = 64 * 1024
"""Up to this size an answer is one write of head and body."""

REASONS = {status.value: status.phrase for status in HTTPStatus} | {308: "Resume Incomplete"}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BadRequest(Exception):
    """What came is not HTTP/1.1 as we know it."""


def parse_head(head: bytes) -> Request:
    """The request whose head this is, without the empty line."""
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


class ChunkDecoder:
    """Chunks, as in `Transfer-Encoding: chunked` and in `aws-chunked`: size, data, trailers."""

    def __init__(self, emit: Callable[[memoryview], None]) -> None:
        self._emit = emit
        self._line = bytearray()
        self._left = 0
        self._state = "size"
        self.trailers: dict[str, str] = {}

    @property
    def ended(self) -> bool:
        """Whether the last byte of the body came."""
        return self._state == "end"

    def feed(self, data: memoryview) -> int:
        """Decode `data`; returns how many bytes belonged to the body."""
        at = 0
        while at < len(data) and self._state != "end":
            if self._state == "data":
                piece = data[at : at + self._left]
                self._emit(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = "after"
                continue
            end = bytes(data[at : at + HEAD_MAX_NBYTES]).find(b"\n")
            if end < 0:
                self._line += data[at:]
                if len(self._line) > HEAD_MAX_NBYTES:
                    raise BadRequest("a chunk without a length")
                return len(data)
            self._line += data[at : at + end]
            at += end + 1
            line = bytes(self._line).rstrip(b"\r").decode("latin-1")
            self._line.clear()
            self._take(line)
        return at

    def _take(self, line: str) -> None:
        if self._state == "after":
            if line:
                raise BadRequest("a chunk longer than it said")
            self._state = "size"
        elif self._state == "size":
            try:
                self._left = int(line.partition(";")[0], 16)
            except ValueError:
                raise BadRequest(f"no length of a chunk: {line[:40]!r}") from None
            self._state = "data" if self._left else "trailers"
        elif line:
            name, _, value = line.partition(":")
            self.trailers[name.strip().lower()] = value.strip()
        else:
            self._state = "end"


class Body:
    """Receives the body of one request."""

    def __init__(self, request: Request, buffers: Buffers) -> None:
        headers = request.headers
        self.request = request
        self.position = 0
        self._decoders: list[ChunkDecoder] = []
        self._growing = False
        aws = "aws-chunked" in headers.get("content-encoding", "") or headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING-")
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("x-amz-decoded-content-length") if aws else None
        if length is None and not chunked and not aws:
            length = headers.get("content-length", "0")
        if length is None:
            self._growing = True
            length = "0"
        if not length.isdecimal() or int(length) > BODY_MAX_NBYTES:
            raise BadRequest(f"a body of {length[:40]!r} bytes")
        self.nbytes = int(length)
        self._grown = bytearray()
        request.body = buffers.get(self.nbytes)
        emit = self._store
        if aws:
            self._decoders.append(ChunkDecoder(emit))
            emit = self._feed_inner
        if chunked:
            self._decoders.append(ChunkDecoder(emit))
        # Without an outer layer, aws-chunked bytes come as they are.
        self._raw_left = int(headers.get("content-length", "0")) if aws and not chunked else 0

    def _feed_inner(self, piece: memoryview) -> None:
        self._decoders[0].feed(piece)

    def _store(self, piece: memoryview) -> None:
        end = self.position + len(piece)
        if self._growing:
            if end > BODY_MAX_NBYTES:
                raise BadRequest("a body without an end")
            self._grown += piece
        elif end > self.nbytes:
            raise BadRequest("a body longer than it said")
        else:
            self.request.body[self.position : end] = piece
        self.position = end

    @property
    def direct(self) -> memoryview | None:
        """Where the next bytes go as they are, or None if they must be decoded."""
        return None if self._decoders else self.request.body[self.position :]

    @property
    def complete(self) -> bool:
        """Whether the last byte has come."""
        if self._decoders:
            return self._decoders[-1].ended and self._raw_left <= 0
        return self.position == self.nbytes

    def feed(self, data: memoryview) -> int:
        """Take what belongs to the body; returns how many bytes that were."""
        if not self._decoders:
            piece = data[: self.nbytes - self.position]
            self._store(piece)
            return len(piece)
        taken = self._decoders[-1].feed(data)
        self._raw_left -= taken
        return taken

    def end(self) -> None:
        """The body is complete, its trailers are known."""
        if self._growing:
            self.request.body = memoryview(self._grown)
        for decoder in self._decoders:
            self.request.trailers |= decoder.trailers
        if self._decoders and not self._growing and self.position != self.nbytes:
            raise BadRequest("a body shorter than it said")


class Served(Protocol):
    """What a connection asks of the server behind it."""

    buffers: Buffers

    def connected(self, connection: Connection) -> None:
        """A client is there."""
        ...

    def head(self, connection: Connection, request: Request) -> float | None:
        """A request has begun; returns the bandwidth of its body, or None for no limit."""
        ...

    def complete(self, connection: Connection, request: Request) -> None:
        """All of a request is there: handle it, then call `connection.next()`."""
        ...

    def disconnected(self, connection: Connection) -> None:
        """A client is gone."""
        ...

    def failed(self, error: Exception) -> None:
        """What the server raised where no client is to blame."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One connection of a client."""

    def __init__(self, served: Served, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.closed: asyncio.Future[None] = loop.create_future()
        self._served = served
        self._loop = loop
        self._transport: asyncio.Transport = asyncio.Transport()
        self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        self._ahead = bytearray()
        self._body: Body | None = None
        self._request: Request | None = None
        self._drained: asyncio.Future[None] | None = None
        self._paused = False
        self._keep_alive = True
        self._rate: float | None = None
        self._body_began = 0.0
        self._body_nbytes = 0
        self._pace: float | None = None

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio says."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=PIECE_NBYTES, low=PIECE_NBYTES // 4)
        self._served.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio says."""
        if not self.closed.done():
            self.closed.set_result(None)
        self.resume_writing()
        self._served.disconnected(self)

    def eof_received(self) -> bool:
        """As asyncio says; a client that sends no more reads no more."""
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """As asyncio says."""
        if self._body is not None and (direct := self._body.direct) is not None:
            return direct
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        """As asyncio says."""
        with self._refusing():
            if self._body is not None and self._body.direct is not None:
                self._body.position += nbytes
                self._received(nbytes)
            else:
                self._take(self._scratch[:nbytes])

    def pause_writing(self) -> None:
        """As asyncio says."""
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """As asyncio says."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    # Requests

    def _take(self, data: memoryview) -> None:
        body = self._body
        if body is not None:
            taken = body.feed(data)
            data = data[taken:]
            if data:
                self._ahead += data
            self._received(taken)
            return
        self._ahead += data
        if self._request is None:
            self._parse()
        elif len(self._ahead) > AHEAD_MAX_NBYTES:
            self._transport.pause_reading()

    def _parse(self) -> None:
        end = self._ahead.find(b"\r\n\r\n")
        if end < 0:
            if len(self._ahead) > HEAD_MAX_NBYTES:
                raise BadRequest("a head without an end")
            return
        request = parse_head(bytes(self._ahead[:end]))
        rest = bytes(self._ahead[end + 4 :])
        self._ahead.clear()
        self._keep_alive = request.headers.get("connection", "").lower() != "close"
        body = Body(request, self._served.buffers)
        self._request = request
        self._rate = self._served.head(self, request)
        if self._transport.is_closing():
            return
        self._body = body
        self._body_began = self._loop.time()
        self._body_nbytes = 0
        if request.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(CONTINUE)
        self._take(memoryview(rest))

    def _received(self, nbytes: int) -> None:
        body, request = self._body, self._request
        assert body is not None and request is not None
        self._body_nbytes += nbytes
        if self._rate is not None:
            ahead_s = self._body_began + self._body_nbytes / self._rate - self._loop.time()
            if ahead_s > PACE_S or (body.complete and ahead_s > 0.0):
                self._transport.pause_reading()
                self._loop.call_later(ahead_s, self._paced)
                return
        self._complete()

    def _paced(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
        with self._refusing():
            self._complete()

    def _complete(self) -> None:
        body, request = self._body, self._request
        if body is not None and request is not None and body.complete:
            self._body = None
            body.end()
            self._served.complete(self, request)

    def next(self) -> None:
        """The request has been answered: go on with the next one."""
        self._request = None
        if self._transport.is_closing():
            return
        if not self._keep_alive:
            self._transport.close()
            return
        if self._ahead:
            self._transport.resume_reading()
            with self._refusing():
                self._parse()

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except BadRequest as error:
            self._refuse(str(error))
        except Exception as error:  # of ours, or of a hook
            self._served.failed(error)
            self.reset()

    def _refuse(self, reason: str) -> None:
        self._body = None
        text = f"{reason}\n".encode()
        self._keep_alive = False
        self._transport.write(encode_head(Response(400, length=len(text)), keep_alive=False))
        self._transport.write(text)
        self._transport.close()

    # Answers

    async def send(
        self, response: Response, *, rate: float | None = None, stop: int | None = None
    ) -> int:
        """The answer is handed to the kernel; returns how many bytes of its body were.

        `rate` limits bytes per second; `stop` ends it before that byte of the body, with the
        connection still open.
        """
        if self._transport.is_closing():
            return 0
        head = encode_head(response, keep_alive=self._keep_alive)
        total = response.nbytes
        left = total if stop is None else max(0, min(stop, total))
        if total <= SMALL_NBYTES:
            body = b"".join(response.body)[:left]
            self._transport.write(head + body)
            return len(body)
        if rate is not None and self._set_pace(rate):
            rate = None
        self._transport.write(head)
        sent = 0
        began = self._loop.time()
        piece_nbytes = PIECE_NBYTES if rate is None else max(16 * 1024, int(rate * PACE_S))
        for buffer in response.body:
            view = memoryview(buffer)
            at = 0
            while at < view.nbytes and left:
                piece = view[at : at + min(piece_nbytes, left)]
                self._transport.write(piece)
                if (drained := self._drained) is not None:
                    await drained
                if self._transport.is_closing():
                    return sent
                at += len(piece)
                sent += len(piece)
                left -= len(piece)
                if rate is not None:
                    ahead_s = began + sent / rate - self._loop.time()
                    if ahead_s > 0.0:
                        await asyncio.wait((self.closed,), timeout=ahead_s)
        return sent

    async def wait_closed(self) -> None:
        """The client has closed the connection, or it is lost."""
        await asyncio.wait((self.closed,))

    def _set_pace(self, rate: float) -> bool:
        """Whether the kernel limits what is sent from now on."""
        if not KERNEL_PACES:
            return False
        if rate != self._pace and self._set_option(
            socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate)
        ):
            self._pace = rate
        return rate == self._pace

    def close(self) -> None:
        """What was handed over is sent, then the connection ends."""
        self._transport.close()

    def reset(self) -> None:
        """The client gets ECONNRESET."""
        self._set_option(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _set_option(self, level: int, name: int, value: int | bytes) -> bool:
        """Whether the socket has taken the option."""
        own = self._transport.get_extra_info("socket")
        if own is None or own.fileno() < 0:
            return False
        # uvloop's socket has no setsockopt; one more name for the descriptor does.
        try:
            with socket.socket(fileno=os.dup(own.fileno())) as other:
                other.setsockopt(level, name, value)
        except OSError:
            return False
        return True


def encode_head(response: Response, *, keep_alive: bool) -> bytes:
    """Status line, headers and the empty line."""
    status = response.status
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if status != 204:
        length = response.nbytes if response.length is None else response.length
        lines.append(f"Content-Length: {length}")
    lines.append(f"Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n")
    return "\r\n".join(lines).encode("latin-1", "replace")
