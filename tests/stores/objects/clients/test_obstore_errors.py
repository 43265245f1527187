"""What the failures of a server look like through obstore, and that none of them shows a secret."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from obstore.store import S3Store

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients import obstore_client as obstore_client_module
from asyncckpt.stores.objects.clients.client import Kind, RequestError
from asyncckpt.stores.objects.clients.obstore_client import (
    ObstoreClient,
    made_store,
    obstore_client,
)
from asyncckpt.stores.objects.clients.obstore_options import StoreOptions
from tests.ports import closed_port
from tests.simulator import Credentials, Fault, Gate, Simulator, simulator
from tests.stores.objects.clients.opened import obstore_from

Call = Callable[[ObstoreClient], Awaitable[Any]]

KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN//////////wEaDNotARealOne"

CALLS: dict[str, Call] = {
    "put": lambda client: client.put("a", b"content"),
    "create": lambda client: client.put("new", b"content", create=True),
    "get": lambda client: client.get("a", 0, 4),
    "size": lambda client: client.size("a"),
    "list": lambda client: client.list("", recursive=False, limit=10),
    "list_all": lambda client: client.list("", recursive=True, limit=10),
    "delete": lambda client: client.delete(["a", "b"]),
}
WRITES = ("put", "create")
REGION = {"client_kwargs": {"region_name": "us-east-1"}}


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2, "test-clients")
    yield workers
    workers.shutdown()


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Simulator:
    running.clear()
    running.faults.clear()
    running.put("bucket", "root/a", b"content")
    return running


@asynccontextmanager
async def client_of(sim: Simulator, **more: Any) -> AsyncIterator[ObstoreClient]:
    client = obstore_from("s3://bucket/root", sim.s3_options(**more))
    assert client is not None
    yield client
    await client.close()


async def failure(client: ObstoreClient, name: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await CALLS[name](client)
    error = caught.value
    assert "\n" not in error.detail
    # Of the options nothing is shown but the host of the endpoint, at the end.
    assert "127.0.0.1" not in error.detail.partition(" (endpoint ")[0]
    assert "://" not in error.detail
    # Nor may the library's own error appear under ours, where it is shown with ours.
    assert error.__context__ is None
    assert error.__cause__ is None
    return error


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "InvalidArgument", "invalid"),
        (400, "ExpiredToken", "credentials"),
        (400, "RequestTimeout", "timeout"),
        (403, "AccessDenied", "forbidden"),
        (403, "SignatureDoesNotMatch", "credentials"),
        (403, "RequestTimeTooSkewed", "invalid"),
        (403, "InvalidObjectState", "invalid"),
        (403, "QuotaExceeded", "quota"),
        (404, "NoSuchBucket", "no_bucket"),
        (429, "TooManyRequests", "throttled"),
        (500, "InternalError", "unavailable"),
        (503, "ServiceUnavailable", "unavailable"),
        (503, "SlowDown", "throttled"),
    ],
)
async def test_an_answer_has_its_kind(sim: Simulator, status: int, code: str, kind: Kind) -> None:
    sim.faults.append(Fault(number=0, status=status, code=code, message="What happened."))
    async with client_of(sim) as client:
        for name in CALLS:
            sim.reset()
            error = await failure(client, name)
            assert (error.kind, error.status) == (kind, status)
            assert code in error.detail
            assert ("What happened." in error.detail) == (kind != "credentials")
            if name != "delete":
                assert len(sim.requests) == 1


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(("status", "code"), [(412, None), (409, "ConditionalRequestConflict")])
async def test_a_write_is_told_what_exists_or_conflicts(
    sim: Simulator, name: str, status: int, code: str | None
) -> None:
    sim.faults.append(Fault(number=0, status=status, code=code))
    async with client_of(sim) as client:
        error = await failure(client, name)
    assert error.kind == ("exists" if status == 412 else "conflict")


@pytest.mark.parametrize("fault", [{"reset": True}, {"close": True}], ids=["reset", "closed"])
async def test_a_connection_that_ends_is_a_connection(
    sim: Simulator, fault: dict[str, bool]
) -> None:
    sim.faults.append(Fault(number=0, **fault))
    async with client_of(sim) as client:
        for name in CALLS:
            assert (await failure(client, name)).kind == "connection"


async def test_a_lost_answer_is_asked_for_once_only(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="put_object", reset=True, applied=True, number=0))
    async with client_of(sim) as client:
        assert (await failure(client, "create")).kind == "connection"
    assert sim.get("bucket", "root/new") == b"content"
    assert [logged.kind for logged in sim.requests].count("put_object") == 1


@pytest.mark.parametrize("nbytes", [0, 3])
async def test_an_answer_that_ends_early_is_short(sim: Simulator, nbytes: int) -> None:
    sim.faults.append(Fault(kind="get_object", truncate=nbytes, number=0))
    async with client_of(sim) as client:
        assert (await failure(client, "get")).kind == "short"
    assert len(sim.requests) == 1


@pytest.mark.parametrize("name", ["put", "get", "list"])
async def test_the_timeout_of_a_store_object_is_a_timeout(sim: Simulator, name: str) -> None:
    sim.faults.append(Fault(number=0, hang=True))
    options = {"allow_http": True, "timeout": timedelta(seconds=0.1)}
    client = obstore_client(sim.obstore_s3("bucket", client_options=options), "root")
    assert (await failure(client, name)).kind == "timeout"
    await client.close()


async def test_nobody_listens() -> None:
    with closed_port() as port:
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        client = obstore_from("s3://bucket/root", options)
        assert client is not None
        for name in CALLS:
            error = await failure(client, name)
            assert error.kind == "connection"
            assert "refused" in error.detail.lower()
            assert error.detail.endswith(f"(endpoint 127.0.0.1:{port})")


async def test_a_name_that_nobody_knows_is_a_connection() -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://nobody.invalid:9"}
    client = obstore_from("s3://bucket/root", options)
    assert client is not None
    error = await failure(client, "put")
    assert error.kind == "connection"
    assert "name" in error.detail


async def test_a_server_without_tls_is_an_endpoint() -> None:
    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = S3Store(
            "bucket", endpoint=f"https://127.0.0.1:{port}", access_key_id="k", secret_access_key="s"
        )
        error = await failure(obstore_client(store, "root"), "put")
    assert error.kind == "endpoint"
    assert "TLS" in error.detail


async def test_http_that_was_not_allowed_is_an_endpoint(sim: Simulator) -> None:
    client = obstore_client(sim.obstore_s3("bucket", client_options={}), "root")
    assert (await failure(client, "put")).kind == "endpoint"


async def test_a_wrong_region_is_an_endpoint() -> None:
    """Of a store of the user, which is used as it is."""
    async with simulator(region="eu-west-1") as sim:
        store = sim.obstore_s3("bucket", region="us-east-1")
        for name in CALLS:
            error = await failure(obstore_client(store, "root"), name)
            assert error.kind == "endpoint"
            assert "eu-west-1" in error.detail


@pytest.mark.parametrize("name", CALLS)
async def test_a_bucket_in_another_region_is_found(name: str, workers: Workers) -> None:
    """By the first request, whichever it is; also where the server only closes the connection."""
    async with simulator(region="eu-west-1") as sim:
        for close in (False, True) if name in WRITES else (False,):
            sim.put("bucket", "root/a", b"content")
            client = obstore_from("s3://bucket/root", sim.s3_options(**REGION), workers)
            sim.faults[:] = [Fault(number=1, close=True)] * close
            await CALLS[name](client)
            await client.put("a", b"content")
            await client.close()
            sim.clear()


async def test_a_request_to_the_wrong_region_outlives_the_one_that_finds_the_right_one(
    workers: Workers,
) -> None:
    async with simulator(region="eu-west-1") as sim:
        client = obstore_from("s3://bucket/root", sim.s3_options(**REGION), workers)
        gate = Gate()
        sim.faults.append(Fault(kind="put_object", key="root/a", gate=gate))
        held = asyncio.ensure_future(client.put("a", b"content"))
        await gate.reached.wait()
        await client.put("b", b"content")
        gate.release()
        await held
        assert sim.objects() == {"root/a": b"content", "root/b": b"content"}
        await client.close()


async def test_requests_that_find_the_region_at_the_same_time_share_a_store(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a store of its own, each would leave the connections of the others unused."""
    made: list[StoreOptions] = []

    def recorded(options: StoreOptions) -> Any:
        made.append(options)
        return made_store(options)

    monkeypatch.setattr(obstore_client_module, "made_store", recorded)
    async with simulator(region="eu-west-1") as sim:
        client = obstore_from("s3://bucket/root", sim.s3_options(**REGION), workers)
        async with asyncio.TaskGroup() as group:
            for i in range(8):
                group.create_task(client.put(f"{i}", b"content"))
        await client.close()
        assert len(sim.objects()) == 8
    assert [options.config["region"] for options in made] == ["eu-west-1"]


@pytest.mark.parametrize(
    "wrong",
    [{"key": KEY}, {"secret": SECRET}, {"token": TOKEN}, {"key": KEY, "token": TOKEN}],
    ids=["key", "secret", "token", "key and token"],
)
async def test_no_credential_is_shown(wrong: dict[str, str]) -> None:
    async with simulator(credentials=Credentials(expired_tokens=frozenset((TOKEN,)))) as sim:
        client = obstore_from("s3://bucket/root", sim.s3_options(**wrong))
        assert client is not None
        for name in CALLS:
            error = await failure(client, name)
            assert error.kind == "credentials"
            shown = "".join(traceback.format_exception(error)) + repr(error) + repr(client)
            for value in wrong.values():
                assert value not in shown
            assert "AWS4-HMAC" not in shown


@pytest.mark.parametrize("given", ["options", "store"])
async def test_no_option_is_shown_that_a_server_repeats(sim: Simulator, given: str) -> None:
    values = ("a-key-id", "a-secret", "a-token")
    sim.faults.append(Fault(number=0, status=400, message=f"Who is {', '.join(values)}, bucket?"))
    if given == "options":
        options = dict(zip(("key", "secret", "token"), values, strict=True))
        client = obstore_from("s3://bucket/root", sim.s3_options(**options))
    else:
        names = ("access_key_id", "secret_access_key", "session_token")
        options = dict(zip(names, values, strict=True))
        client = obstore_client(sim.obstore_s3("bucket", **options), "root")
    error = await failure(client, "get")
    assert "Who is …, …, …, bucket?" in error.detail
    await client.close()


async def test_keys_that_cannot_be_renewed_are_credentials(sim: Simulator) -> None:
    def expired() -> Any:
        raise RuntimeError(f"the token {TOKEN} has expired")

    store = S3Store(
        "bucket",
        endpoint=sim.s3_endpoint,
        region="us-east-1",
        client_options={"allow_http": True},
        credential_provider=expired,
    )
    error = await failure(obstore_client(store, "root"), "get")
    assert error.kind == "credentials"
    assert TOKEN not in "".join(traceback.format_exception(error))


async def test_a_machine_without_a_role_has_no_credentials(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with closed_port() as port:
        store = S3Store(
            "bucket",
            endpoint=sim.s3_endpoint,
            client_options={"allow_http": True},
            metadata_endpoint=f"http://127.0.0.1:{port}",
        )
        assert (await failure(obstore_client(store, "root"), "get")).kind == "credentials"


async def test_a_client_that_was_closed_says_so(sim: Simulator) -> None:
    async with client_of(sim) as client:
        await client.close()
        for name in CALLS:
            assert (await failure(client, name)).kind == "invalid"
    assert sim.requests == []


@pytest.mark.parametrize("key", ["a//b", "../a", "a/./b"])
async def test_a_key_that_obstore_does_not_take_is_invalid(sim: Simulator, key: str) -> None:
    async with client_of(sim) as client:
        for call in (client.put(key, b""), client.get(key, 0, 1), client.size(key)):
            with pytest.raises(RequestError) as caught:
                await call
            assert caught.value.kind == "invalid"
    assert sim.requests == []


async def test_keys_with_odd_parts_hide_no_others(sim: Simulator, workers: Workers) -> None:
    """Such listings go through s3fs; without it, the error names the key and the remedy."""
    sim.clear()
    for key in ("root//x", "root/./x", "root/1/a", "root/2"):
        sim.put("bucket", key, b"x")
    client = obstore_from("s3://bucket/root", sim.s3_options(), workers)
    for recursive, keys in ((False, ["1", "2"]), (True, ["1/a", "2"])):
        listing = await client.list("", recursive=recursive, limit=9)
        assert [entry.key for entry in listing] == keys
    await client.close()
    alone = obstore_client(sim.obstore_s3("bucket"), "root")
    for recursive in (False, True):
        with pytest.raises(RequestError, match="install s3fs or gcsfs, or delete") as caught:
            await alone.list("", recursive=recursive, limit=9)
        assert "root/" in caught.value.detail
    await alone.close()


async def test_parts_are_refused(sim: Simulator) -> None:
    async with client_of(sim) as client:
        assert not client.traits.multipart
        for call in (
            client.begin_parts("a"),
            client.put_part("a", "upload", 0, 0, b"x"),
            client.complete_parts("a", "upload", ["tag"]),
            client.abort_parts("a", "upload"),
        ):
            with pytest.raises(RequestError) as caught:
                await call
            assert caught.value.kind == "invalid"
        assert await client.pending_parts("") is None
    assert sim.requests == []


async def test_a_server_that_is_no_web_server_is_a_failed_connection(workers: Workers) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = {"key": KEY, "secret": SECRET, "endpoint_url": url}
        client = obstore_from("s3://bucket/run", options, workers)
        with pytest.raises(RequestError) as caught:
            await client.get("a", 0, 1)
        assert caught.value.kind == "connection"
        await client.close()
