"""HTTP as clients speak it: kept connections, all kinds of bodies, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import gc
import random
import socket
import zlib
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulator import Fault, Simulator, simulator
from tests.simulator import http as protocol
from tests.simulator import running as running_module
from tests.simulator.http import (
    REUSED_NBYTES,
    BadRequest,
    Buffers,
    Inbox,
    decode_chunks,
    parse_head,
    receive_body,
)
from tests.simulator_tests.asking import ask

MIB = 1024**2


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Simulator:
    running.clear()
    return running


def talk(endpoint: str, *pieces: bytes, end: bytes) -> bytes:
    """Send these pieces, and return the response up to and with `end`."""
    parts = urlsplit(endpoint)
    with socket.create_connection((parts.hostname or "", parts.port or 0), 10) as client:
        for piece in pieces:
            client.sendall(piece)
        found = b""
        while end not in found:
            received = client.recv(65536)
            if not received:
                raise ConnectionError(found)
            found += received
        return found


def checksum(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def aws_chunks(data: bytes, size: int, *trailers: str, signed: bool = False) -> bytes:
    signature = ";chunk-signature=" + "0" * 64 if signed else ""
    found = b""
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        found += f"{len(piece):x}{signature}\r\n".encode() + piece + b"\r\n"
    return found + f"0{signature}\r\n{''.join(t + chr(10) for t in trailers)}\r\n".encode()


def test_one_connection_serves_many_requests(sim: Simulator) -> None:
    one = b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 3\r\n\r\none"
    two = b"PUT /bucket/b HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
    three = b"GET /bucket/a HTTP/1.1\r\nConnection: close\r\n\r\n"
    said = talk(sim.s3_endpoint, one + two + three, end=b"one")
    assert said.count(b"HTTP/1.1 200 OK") == 3
    assert said.count(b"keep-alive") == 2
    assert sim.objects() == {"a": b"one", "b": b""}
    assert len({logged.connection for logged in sim.requests}) == 1


def test_a_request_may_come_byte_by_byte(sim: Simulator) -> None:
    text = b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 3\r\n\r\none"
    pieces = [text[at : at + 1] for at in range(len(text))]
    assert b"200 OK" in talk(sim.s3_endpoint, *pieces, end=b"\r\n\r\n")
    assert sim.objects() == {"a": b"one"}


def test_a_client_that_asks_is_told_to_go_on(sim: Simulator) -> None:
    head = b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    assert talk(sim.s3_endpoint, head, end=b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert b"200 OK" in talk(sim.s3_endpoint, head, b"one", end=b"keep-alive\r\n\r\n")
    assert sim.objects() == {"a": b"one"}


@pytest.mark.parametrize("signed", [False, True])
def test_aws_chunks_are_decoded_and_their_trailers_checked(sim: Simulator, signed: bool) -> None:
    data = random.Random(0).randbytes(256_000)
    good = aws_chunks(data, 65536, f"x-amz-checksum-crc32:{checksum(data)}\r", signed=signed)
    bad = aws_chunks(data, 65536, f"x-amz-checksum-crc32:{checksum(b'')}\r", signed=signed)
    for body, status in ((good, 200), (bad, 400)):
        head = "PUT /bucket/a HTTP/1.1\r\nContent-Encoding: aws-chunked\r\n"
        head += f"X-Amz-Decoded-Content-Length: {len(data)}\r\n"
        head += "X-Amz-Trailer: x-amz-checksum-crc32\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        again = b"GET /bucket/a HTTP/1.1\r\nX-Amz-Checksum-Mode: ENABLED\r\n\r\n"
        said = talk(sim.s3_endpoint, head.encode(), body + again, end=data[-300:])
        assert said.startswith(f"HTTP/1.1 {status} ".encode())
        assert (b"BadDigest" in said) == (status == 400)
        assert said.endswith(data)
        assert f"x-amz-checksum-crc32: {checksum(data)}".encode() in said


AWS_CHUNKED = b"PUT /bucket/a HTTP/1.1\r\nContent-Encoding: aws-chunked\r\nContent-Length: "


@pytest.mark.parametrize(
    "text",
    [
        b"nonsense\r\n\r\n",
        b"PUT /bucket/a HTTP/2\r\n\r\n",
        b"PUT /bucket/a HTTP/1.1\r\nno header\r\n\r\n",
        b"PUT /bucket/a HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 6000000000\r\n\r\n",
        b"PUT /bucket/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        AWS_CHUNKED + b"4\r\n\r\nzz\r\n",
        AWS_CHUNKED + b"8\r\n\r\n1\r\nabc\r\n",
        AWS_CHUNKED + b"8\r\n\r\n9\r\nabc\r\n",
        AWS_CHUNKED + b"5\r\n\r\n0\r\nab",
        AWS_CHUNKED + b"5\r\nX-Amz-Decoded-Content-Length: 9\r\n\r\n0\r\n\r\n",
        b"X" * 70_000,
    ],
)
def test_what_is_no_request_is_refused(sim: Simulator, text: bytes) -> None:
    said = talk(sim.s3_endpoint, text, end=b"close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400 ")
    assert sim.objects() == {}
    assert ask(sim.s3_endpoint, "GET", "/bucket").status == 200


@given(st.binary(max_size=400), st.integers(1, 100), st.integers(1, 3))
def test_aws_chunks_of_any_length_are_decoded_or_refused_if_any_are_missing(
    data: bytes, chunk_nbytes: int, more: int
) -> None:
    text = aws_chunks(data, chunk_nbytes, "a: b\r")
    assert decode_chunks(memoryview(text)) == (data, {"a": "b"})
    request = parse_head(b"PUT /b/k HTTP/1.1\r\nContent-Encoding: aws-chunked")
    request.headers["content-length"] = str(len(text))
    request.headers["x-amz-decoded-content-length"] = str(len(data) + more)

    async def receive(inbox: Inbox) -> None:
        inbox.room()[: len(text)] = text
        inbox.received(len(text))
        await receive_body(inbox, request, Buffers(0))

    with pytest.raises(BadRequest, match=f"a body of {len(data)} bytes, not {len(data) + more}"):
        asyncio.run(receive(Inbox(lambda: None)))
    with pytest.raises(BadRequest):
        decode_chunks(memoryview(text[:-more]))


@given(st.binary(max_size=400), st.lists(st.integers(1, 60)))
def test_heads_and_bodies_are_received_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    text = b"head\r\n\r\n" + data + b"GET"

    async def receive_all() -> tuple[bytes, bytes, bytes]:
        pieces = iter(cuts)
        at = 0

        def receive() -> None:
            nonlocal at
            room = inbox.room()
            taken = text[at : at + min(next(pieces, len(text)), len(room))]
            room[: len(taken)] = taken
            at += len(taken)
            if inbox.received(len(taken)) and at < len(text):
                resume()

        def resume() -> None:
            loop.call_soon(receive)

        inbox = Inbox(resume)
        loop = asyncio.get_running_loop()
        head, body, rest = await inbox.until(b"\r\n\r\n"), bytearray(len(data)), bytearray(3)
        await inbox.into(memoryview(body))
        await inbox.into(memoryview(rest))
        return head, bytes(body), bytes(rest)

    assert asyncio.run(receive_all()) == (b"head", data, b"GET")


async def test_a_body_of_known_length_is_received_where_it_stays() -> None:
    request = parse_head(b"PUT /b/k HTTP/1.1\r\nContent-Length: 4")
    inbox = Inbox(lambda: None)
    inbox.room()[:1] = b"b"
    inbox.received(1)
    task = asyncio.ensure_future(receive_body(inbox, request, Buffers(0)))
    await asyncio.sleep(0)
    inbox.room()[:3] = b"ody"
    assert bytes(request.body) == b"body"
    inbox.received(3)
    await task


def test_room_of_objects_that_are_gone_is_used_again() -> None:
    buffers = Buffers(spare_max_nbytes=3 * MIB)
    first = buffers.get(REUSED_NBYTES + 5)
    assert (first.nbytes, buffers.spare_nbytes) == (REUSED_NBYTES + 5, 0)
    part = first[10:20]
    del first
    assert buffers.spare_nbytes == 0, "somebody still looks at it"
    del part
    assert buffers.spare_nbytes == 2 * MIB
    second = buffers.get(2 * MIB)
    assert buffers.spare_nbytes == 0
    third = buffers.get(2 * MIB)
    del second, third
    assert buffers.spare_nbytes == 2 * MIB, "no more than it may keep"


def test_overwritten_and_deleted_objects_are_freed(sim: Simulator) -> None:
    data = bytes(8 * MIB)
    for _ in range(4):
        assert ask(sim.s3_endpoint, "PUT", "/bucket/a", data).status == 200
    ask(sim.s3_endpoint, "DELETE", "/bucket/a")
    gc.collect()
    assert sim.stats().stored_nbytes == 0
    # One was being received while the one before it was still there.
    assert 0 < sim._buffers.spare_nbytes <= 2 * 8 * MIB


async def test_a_slow_reader_does_not_make_the_server_buffer(sim: Simulator) -> None:
    sim.put("bucket", "a", bytes(64 * MIB))
    parts = urlsplit(sim.s3_endpoint)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=65536)
    writer.write(b"GET /bucket/a HTTP/1.1\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    assert ask(sim.s3_endpoint, "HEAD", "/bucket/a").headers["content-length"] == str(64 * MIB)
    assert [logged.kind for logged in sim.requests if logged.ended_s] == ["head_object"]
    left = 64 * MIB
    while left:
        left -= len(await reader.read(MIB))
    writer.close()
    await writer.wait_closed()
    while sim.stats().in_flight:
        await asyncio.sleep(0.001)
    assert sim.requests[0].answered_nbytes == 64 * MIB


async def test_it_runs_on_asyncios_own_loop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_module, "_loop_factory", lambda: asyncio.new_event_loop)
    monkeypatch.setattr(protocol, "KERNEL_PACES", False)
    data = bytes(range(256)) * 40_000
    with simulator(faults=[Fault(kind="delete_object", reset=True)]) as sim:
        assert ask(sim.s3_endpoint, "PUT", "/bucket/a", data).status == 200
        assert ask(sim.s3_endpoint, "GET", "/bucket/a").body == data
        with pytest.raises(ConnectionResetError):
            ask(sim.s3_endpoint, "DELETE", "/bucket/a")


async def test_it_blocks_no_loop_and_leaves_nothing(no_blocking: None, leak_check: None) -> None:
    large = bytes(2 * MIB)
    loop = asyncio.get_running_loop()
    async with simulator() as sim:
        for endpoint in (sim.s3_endpoint, sim.gcs_endpoint):
            for body in (b"small", large):
                headers = {"x-amz-checksum-crc32": checksum(body)}
                answer = await loop.run_in_executor(
                    None, ask, endpoint, "PUT", "/bucket/a", body, headers
                )
                assert answer.status == 200
            answer = await loop.run_in_executor(None, ask, endpoint, "GET", "/bucket/a")
            assert answer.body == large
        sim.put("bucket", "b", large)
        assert sim.stats().objects == 2
        sim.clear()


def test_a_port_that_is_taken_is_an_error_at_the_start(sim: Simulator) -> None:
    port = urlsplit(sim.s3_endpoint).port or 0
    with pytest.raises(OSError, match="in use"), simulator(s3_port=port):
        raise AssertionError("it must not start")
