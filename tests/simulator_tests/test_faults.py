"""Each fault happens to the requests it is meant for, before or after they take effect."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulator import Fault, Gate, Request, Simulator, simulator
from tests.simulator_tests.asking import Answer, ask

LOST = (ConnectionError, http.client.HTTPException)


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Iterator[Simulator]:
    running.clear()
    yield running
    running.faults.clear()


def put(sim: Simulator, key: str, body: bytes = b"body") -> Answer:
    return ask(sim.s3_endpoint, "PUT", f"/bucket/{key}", body)


def get(sim: Simulator, key: str) -> Answer:
    return ask(sim.s3_endpoint, "GET", f"/bucket/{key}")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (409, "ConditionalRequestConflict"),
        (412, "PreconditionFailed"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "SlowDown"),
    ],
)
def test_a_status_comes_instead_of_the_effect(sim: Simulator, status: int, code: str) -> None:
    sim.faults.append(Fault(status=status, retry_after_s=2))
    answer = put(sim, "a")
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (status, code, "2")
    assert sim.objects() == {}
    assert put(sim, "a").status == 200


def test_errors_of_gcs_are_json(sim: Simulator) -> None:
    sim.faults.append(
        Fault(when=lambda r: r.service == "gcs", status=503, number=0, message="later")
    )
    answer = ask(sim.gcs_endpoint, "GET", "/storage/v1/b/bucket/o")
    assert answer.json["error"]["errors"][0]["reason"] == "backendError"
    assert answer.json["error"] | {"errors": []} == {"code": 503, "message": "later", "errors": []}
    assert get(sim, "none").status == 404


@pytest.mark.parametrize("kind", ["reset", "close", "early reset", "early close"])
def test_a_connection_ends_before_the_effect(sim: Simulator, kind: str) -> None:
    how: dict[str, Any] = {kind.split()[-1]: True, "early": kind.startswith("early")}
    sim.faults.append(Fault(**how))
    with pytest.raises(LOST):
        put(sim, "a")
    assert sim.objects() == {}
    assert (sim.requests[0].status, sim.requests[0].applied_s) == (0, 0.0)


@pytest.mark.parametrize("how", [{"reset": True}, {"close": True}, {"status": 503}])
def test_an_answer_is_lost_after_the_effect(sim: Simulator, how: dict[str, Any]) -> None:
    sim.faults.append(Fault(**how, applied=True))
    if "status" in how:
        assert put(sim, "a").status == 503
    else:
        with pytest.raises(LOST):
            put(sim, "a")
    assert sim.objects() == {"a": b"body"}
    assert sim.requests[0].applied_s > 0.0
    again = ask(sim.s3_endpoint, "PUT", "/bucket/a", b"2", {"If-None-Match": "*"})
    assert (again.status, sim.objects()) == (412, {"a": b"body"})


@pytest.mark.parametrize("applied", [False, True])
async def test_a_request_is_never_answered(sim: Simulator, applied: bool) -> None:
    sim.faults.append(Fault(kind="put_object", hang=True, applied=applied))
    host, _, port = sim.s3_endpoint.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
    async with asyncio.timeout(30):
        while not sim.stats().in_flight:
            await asyncio.sleep(0.001)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    assert sim.stats().in_flight == 1
    writer.close()
    await writer.wait_closed()
    while sim.stats().in_flight:
        await asyncio.sleep(0.001)
    assert sim.objects() == ({"a": b"body"} if applied else {})
    assert sim.requests[0].status == 0


async def test_a_gate_holds_a_request_until_it_is_released(sim: Simulator) -> None:
    gate = Gate()
    sim.faults.append(Fault(kind="put_object", key="b", gate=gate))
    thread = asyncio.get_running_loop().run_in_executor(None, put, sim, "b")
    await gate.reached.wait()
    assert put(sim, "a").status == 200
    assert sim.objects() == {"a": b"body"}
    assert sim.stats().max_in_flight == 2
    gate.release()
    assert (await thread).status == 200
    assert sim.objects() == {"a": b"body", "b": b"body"}


async def test_what_was_received_is_applied_though_its_client_is_gone(sim: Simulator) -> None:
    gate = Gate()
    sim.faults.append(Fault(gate=gate))
    host, _, port = sim.s3_endpoint.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
    await gate.reached.wait()
    writer.transport.abort()
    gate.release()
    while sim.stats().in_flight:
        await asyncio.sleep(0.001)
    assert sim.objects() == {"a": b"body"}


async def test_a_body_that_does_not_end_has_no_effect(sim: Simulator) -> None:
    host, _, port = sim.s3_endpoint.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PUT /bucket/a HTTP/1.1\r\nContent-Length: 400\r\n\r\nbody")
    while not sim.requests:
        await asyncio.sleep(0.001)
    writer.close()
    await writer.wait_closed()
    while sim.stats().in_flight:
        await asyncio.sleep(0.001)
    assert sim.objects() == {}
    assert (sim.requests[0].received_s, sim.requests[0].status) == (0.0, 0)


def test_a_gate_may_be_waited_for_without_a_loop() -> None:
    gate = Gate()
    with pytest.raises(TimeoutError):
        gate.reached.wait_blocking(0.01)
    gate.reached.set()
    gate.reached.wait_blocking()


def test_an_answer_is_delayed(sim: Simulator) -> None:
    sim.faults.append(Fault(hook=lambda _: asyncio.sleep(0.1)))
    put(sim, "a")
    assert sim.requests[0].ended_s - sim.requests[0].received_s >= 0.1


@pytest.mark.parametrize("nbytes", [0, 3, 100_000])
def test_an_answer_is_truncated(sim: Simulator, nbytes: int) -> None:
    sim.put("bucket", "a", bytes(200_000))
    sim.faults.append(Fault(kind="get_object", truncate=nbytes))
    with pytest.raises(http.client.IncompleteRead) as raised:
        get(sim, "a")
    assert len(raised.value.partial) == nbytes
    assert len(get(sim, "a").body) == 200_000


async def test_an_answer_stalls_in_its_middle(sim: Simulator) -> None:
    sim.put("bucket", "a", bytes(200_000))
    sim.faults.append(Fault(kind="get_object", stall=70_000))
    host, _, port = sim.s3_endpoint.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /bucket/a HTTP/1.1\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    assert len(await reader.readexactly(70_000)) == 70_000
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.05)
    writer.close()
    await writer.wait_closed()


def test_an_answer_without_so_many_bytes_does_not_stall(sim: Simulator) -> None:
    """Its connection is used again, and would leave the next request without an answer."""
    put(sim, "a")
    sim.faults.append(Fault(kind="delete_object", stall=20))
    with contextlib.closing(http.client.HTTPConnection(sim.s3_endpoint[7:], timeout=30)) as client:
        for method, path, status in (("DELETE", "/bucket/a", 204), ("GET", "/bucket/a", 404)):
            client.request(method, path)
            answer = client.getresponse()
            answer.read()
            assert answer.status == status


@pytest.mark.parametrize("offset", [0, 150_000, -1])
def test_one_bit_of_an_answer_is_changed(sim: Simulator, offset: int) -> None:
    data = bytes(200_000)
    sim.put("bucket", "a", data)
    sim.faults.append(Fault(kind="get_object", flip=offset))
    found = get(sim, "a").body
    assert [at for at, byte in enumerate(found) if byte] == [offset % len(data)]
    assert found[offset] == 1
    assert get(sim, "a").body == data


def test_one_bit_is_stored_wrong(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="put_object", flip=1, number=0))
    assert put(sim, "a", b"body").status == 200
    target = "/upload/storage/v1/b/bucket/o?uploadType=multipart"
    kind = {"Content-Type": "multipart/related; boundary=x"}
    text = b'--x\n\n{"name": "b"}\n--x\nContent-Type: a/b\n\nbody\n--x--'
    assert ask(sim.gcs_endpoint, "POST", target, text, kind).status == 200
    assert sim.objects() == {"a": b"bndy", "b": b"bndy"}


def test_a_hook_runs_at_the_moment_of_the_request(sim: Simulator) -> None:
    """Another writer comes between: the one whose request came first loses."""

    def overtake(request: Request) -> None:
        sim.put("bucket", request.key, b"winner")

    sim.faults.append(Fault(kind="put_object", hook=overtake))
    answer = ask(sim.s3_endpoint, "PUT", "/bucket/a", b"loser", {"If-None-Match": "*"})
    assert (answer.status, sim.objects()) == (412, {"a": b"winner"})


async def test_a_hook_may_be_a_coroutine_and_come_before_the_body(sim: Simulator) -> None:
    seen: list[str] = []

    async def look(request: Request) -> None:
        await asyncio.sleep(0)
        seen.append(request.key)

    sim.faults.append(Fault(early=True, hook=look))
    assert put(sim, "a").status == 200
    assert seen == ["a"]


def test_a_failing_hook_fails_the_test() -> None:
    def fail(_: Request) -> None:
        raise AssertionError("not what the test wants")

    with pytest.raises(ExceptionGroup) as raised:
        with simulator(faults=[Fault(hook=fail)]) as sim:
            with pytest.raises(LOST):
                put(sim, "a")
    assert raised.group_contains(AssertionError, match="not what the test wants")


def test_requests_are_counted_as_the_fault_sees_them(sim: Simulator) -> None:
    faults = [
        Fault(kind="put_object", key="b*", number=2, times=2, status=503, name="second and third"),
        Fault(kind=("get_object", "head_object"), number=0, status=500, name="every"),
        Fault(kind="delete_object", when=lambda request: request.key == "b2", status=403),
        Fault(number=3, status=429, name="third of all"),
    ]
    sim.faults.extend(faults)
    assert [put(sim, key).status for key in ("a", "b0", "c", "b1", "b2", "b3")] == [
        200,
        200,
        429,
        503,
        503,
        200,
    ]
    assert [get(sim, "a").status for _ in range(3)] == [500] * 3
    assert ask(sim.s3_endpoint, "DELETE", "/bucket/b1").status == 204
    assert ask(sim.s3_endpoint, "DELETE", "/bucket/b2").status == 403
    assert [(fault.met, fault.happened) for fault in faults] == [(4, 2), (3, 3), (1, 1), (11, 1)]
    assert sim.requests[3].faults == ("second and third",)
    sim.reset()
    assert [fault.met for fault in faults] == [0] * 4


def test_a_fault_before_the_body_cannot_be_applied() -> None:
    with pytest.raises(ValueError, match="an early fault is not applied"):
        Fault(early=True, applied=True, reset=True)


def test_a_small_upload_can_fail_at_every_request(sim: Simulator) -> None:
    """What a sweep over requests and faults is made of."""

    def upload() -> None:
        begun = ask(sim.s3_endpoint, "POST", "/bucket/a?uploads").body.decode()
        name = begun.partition("<UploadId>")[2].partition("<")[0]
        where = f"/bucket/a?uploadId={name}"
        etag = ask(sim.s3_endpoint, "PUT", f"{where}&partNumber=1", b"x").headers["etag"]
        part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
        whole = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
        assert ask(sim.s3_endpoint, "POST", where, whole).status == 200

    upload()
    kinds = [logged.kind for logged in sim.requests]
    assert kinds == ["create_upload", "put_part", "complete_upload"]
    for number, kind in enumerate(kinds, 1):
        for applied in (False, True):
            sim.faults[:] = [Fault(number=number, reset=True, applied=applied)]
            sim.clear()
            with pytest.raises(LOST):
                upload()
            assert sim.requests[-1].kind == kind
            complete = kind == "complete_upload" and applied
            assert sim.objects() == ({"a": b"x"} if complete else {})
            begun = kind != "create_upload" or applied
            assert len(sim.uploads) == (begun and not complete)


def test_a_failing_condition_of_a_fault_fails_the_test_too() -> None:
    def fail(_: Request) -> bool:
        raise LookupError("no such thing")

    with pytest.raises(ExceptionGroup) as raised:
        with simulator(faults=[Fault(when=fail)]) as sim:
            with pytest.raises(LOST):
                put(sim, "a")
    assert raised.group_contains(LookupError, match="no such thing")
