"""One call is one request, on whichever loop, and what goes wrong with it is told."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiobotocore.session import AioSession
from fsspec.asyn import get_loop
from gcsfs.core import GCSFileSystem
from google.oauth2.credentials import Credentials
from s3fs import S3FileSystem

from asyncckpt.flow.threads import Workers
from asyncckpt.options import MIB
from asyncckpt.stores.objects.clients.client import ObjectClient, RequestError
from asyncckpt.stores.objects.clients.fsspec_apis import SlicedBody
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.requests.requests import Requests
from tests.simulator import Credentials as Known
from tests.simulator import Fault, Gate, Simulator, simulator, simulator_process
from tests.stores.objects.hasty import HASTY
from tests.stores.objects.stores import new_session

SCHEMES = ("s3", "gs")


@pytest.fixture(scope="module")
def shared() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(shared: Simulator) -> Simulator:
    shared.reset()
    shared.clear()
    shared.faults.clear()
    return shared


@pytest.fixture(scope="module")
def session() -> AioSession:
    """What botocore knows about this machine, read once."""
    found = new_session()

    async def read() -> None:
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
        async with found.create_client("s3", region_name="us-east-1", **keys):
            pass

    asyncio.run(read())
    return found


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4, "test-clients")
    yield workers
    workers.shutdown()


class Given:
    """What the tests open clients with."""

    def __init__(self, sim: Simulator, workers: Workers, session: AioSession) -> None:
        self.sim, self.workers, self.session = sim, workers, session

    def options(self, scheme: str, **more: Any) -> dict[str, Any]:
        if scheme == "gs":
            return self.sim.gcs_options(**more)
        return self.sim.s3_options(**({"client": "fsspec", "session": self.session} | more))

    @asynccontextmanager
    async def opened(self, scheme: str, **options: Any) -> AsyncIterator[ObjectClient]:
        options = options or self.options(scheme)
        client = open_client(
            f"{scheme}://bucket/run", storage_options=options, workers=self.workers
        )
        try:
            yield client
        finally:
            await client.close()

    def kinds(self) -> list[str]:
        """Kinds of the requests since the last call."""
        found = [request.kind for request in self.sim.requests]
        self.sim.reset()
        return found


@pytest.fixture
def given(sim: Simulator, workers: Workers, session: AioSession) -> Given:
    return Given(sim, workers, session)


# ------------------------------------------------------------------------- one call, one request


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_one_call_is_one_request(given: Given, scheme: str, no_blocking: list[str]) -> None:
    async with given.opened(scheme) as client:
        await client.put("a", np.ones(3_000_000, np.uint8))
        assert "expect" not in given.sim.requests[0].headers
        assert given.kinds() == ["put_object"]
        await client.put("b", b"", create=True)
        assert given.kinds() == ["put_object"]
        await client.get("a", 10, 2_000_000)
        assert given.kinds() == ["get_object"]
        await client.get("a", 3_000_000, 3_000_001)
        assert given.kinds() == ["get_object"]
        await client.list("", recursive=True, limit=1000)
        await client.list("", recursive=False, limit=1000)
        assert given.kinds() == ["list_objects", "list_objects"]
        await client.delete(["a"])
        assert given.kinds() == ["delete_object"]
        await client.delete([f"{i}" for i in range(50)])
        assert given.kinds() == ["delete_object"] * 50
        # Last, since not every request of gcsfs has ended when it returns: it looks for an object
        # and a directory at once, and again where the object is empty.
        assert await client.size("b") == 0
        assert 1 <= len(given.kinds()) <= (1 if scheme == "s3" else 3)


async def test_a_body_is_sent_again_only_after_it_was_rewound() -> None:
    """Versions of aiohttp before 3.14.4 repeat a PUT whose body they can read again."""
    body = SlicedBody(b"abc")
    assert [bytes(part) async for part in body] == [b"abc"]
    with pytest.raises(ConnectionError, match="closed the connection without an answer"):
        [part async for part in body]
    body.seek(0)
    assert [bytes(part) async for part in body] == [b"abc"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"status": 503}, ("throttled", "unavailable")),
        ({"status": 429, "retry_after_s": 3}, ("throttled",)),
        ({"status": 500}, ("unavailable",)),
        ({"status": 403}, ("forbidden",)),
        ({"status": 409}, ("conflict",)),
        ({"reset": True}, ("connection",)),
        ({"close": True}, ("connection",)),
        ({"close": True, "applied": True}, ("connection",)),
    ],
)
async def test_no_library_repeats_a_put(
    given: Given, scheme: str, fault: dict[str, Any], kind: tuple[str, ...]
) -> None:
    async with given.opened(scheme) as client:
        await client.put("warm", b"x")
        given.kinds()
        given.sim.faults.append(Fault(kind="put_object", number=0, times=9, **fault))
        with pytest.raises(RequestError) as caught:
            await client.put("a", bytes(1_000_000))
        assert caught.value.kind in kind
        # aiohttp would repeat one on a connection that the server has closed.
        assert given.kinds() == ["put_object"]
        if "retry_after_s" in fault:
            assert caught.value.retry_after_s == 3.0
        given.sim.faults.clear()
        await client.put("a", bytes(1_000_000))
        assert await client.size("a") == 1_000_000


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_conflict_is_tried_again_whatever_was_asked_for(given: Given, scheme: str) -> None:
    """Of a conditional request it is a conflict; of another one it is a server's trouble."""
    async with given.opened(scheme) as client:
        requests = Requests(client, policy=HASTY)
        for create in (False, True):
            given.sim.faults[:] = [Fault(kind="put_object", number=1, status=409)]
            with pytest.raises(RequestError) as caught:
                await client.put(f"told-{create}", b"x", create=create)
            assert caught.value.kind == "conflict"
            given.sim.faults[:] = [Fault(kind="put_object", number=1, times=2, status=409)]
            if create:
                assert await requests.create("a", b"x")
            else:
                await requests.replace("b", b"x")
            assert given.sim.faults[0].happened == 2
            given.sim.faults.clear()
        assert {"run/a", "run/b"} <= set(given.sim.objects("bucket"))


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_an_answer_that_ends_early_is_short(given: Given, scheme: str) -> None:
    async with given.opened(scheme) as client:
        await client.put("a", bytes(1_000_000))
        for kept in (0, 1, 999_999):
            given.sim.faults[:] = [Fault(kind="get_object", number=1, truncate=kept)]
            with pytest.raises(RequestError) as caught:
                await client.get("a", 0, 1_000_000)
            assert caught.value.kind == "short"
        given.sim.faults.clear()
        assert bytes(await client.get("a", 0, 1_000_000)) == bytes(1_000_000)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_store_that_never_answers_is_left_promptly(given: Given, scheme: str) -> None:
    async with given.opened(scheme) as client:
        await client.put("a", b"x")
        for call, kind in (
            (lambda: client.put("b", bytes(5_000_000)), "put_object"),
            (lambda: client.get("a", 0, 1), "get_object"),
            (lambda: client.list("", recursive=True, limit=1), "list_objects"),
        ):
            gate = Gate()
            given.sim.faults[:] = [Fault(kind=kind, number=0, gate=gate)]
            async with asyncio.timeout(10), asyncio.TaskGroup() as group:
                task = group.create_task(call())
                await gate.reached.wait()
                task.cancel()
            assert task.cancelled()
            gate.release()
        given.sim.faults.clear()
        assert bytes(await client.get("a", 0, 1)) == b"x"


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_deletion_of_many_tells_what_is_left(given: Given, scheme: str) -> None:
    async with given.opened(scheme) as client:
        for key in "abc":
            await client.put(key, b"x")
        given.sim.faults.append(Fault(kind="delete_object", number=2, status=503))
        with pytest.raises(RequestError) as caught:
            await client.delete(["a", "b", "c"])
        assert caught.value.kind in ("throttled", "unavailable")
        assert [f"run/{key}" for key in caught.value.left or ()] == list(
            given.sim.objects("bucket")
        )


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_listing_goes_through_all_pages(given: Given, scheme: str) -> None:
    for i in range(1100):
        given.sim.put("bucket", f"run/d/{i:04}", b"x")
    given.sim.put("bucket", "run/d/", b"")  # what consoles make for a directory
    given.sim.put("bucket", "run/d/sub/", b"")
    async with given.opened(scheme) as client:
        listing = await client.list("d", recursive=True, limit=2000)
        assert [entry.key for entry in listing] == [f"d/{i:04}" for i in range(1100)]
        assert given.kinds() == ["list_objects"] * 2
        level = await client.list("d", recursive=False, limit=2000)
        assert [entry.key for entry in level][-2:] == ["d/1099", "d/sub"]
        assert len(await client.list("d", recursive=True, limit=1050)) == 1051
        assert [entry.key for entry in await client.list("", recursive=False, limit=9)] == ["d"]
        assert await client.list("d/sub", recursive=False, limit=9) == []


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_keys_with_odd_parts_hide_no_others(given: Given, scheme: str) -> None:
    for key in ("run//x", "run/./x", "run/d//x", "run/1/a", "run/2"):
        given.sim.put("bucket", key, b"x")
    async with given.opened(scheme) as client:
        for recursive, keys in ((True, ["1/a", "2"]), (False, ["1", "2", "d"])):
            listing = await client.list("", recursive=recursive, limit=9)
            assert [entry.key for entry in listing] == keys


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_listing_of_nothing_reads_nothing_beside_it(given: Given, scheme: str) -> None:
    for i in range(1100):
        given.sim.put("bucket", f"run/one-{i:04}/checkpoint.json", b"x")
    async with given.opened(scheme) as client:
        for recursive in (True, False):
            assert await client.list("one", recursive=recursive, limit=9) == []
            assert given.kinds() == ["list_objects"]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_listing_reads_no_more_pages_than_its_limit_needs(
    given: Given, scheme: str
) -> None:
    for i in range(2500):
        given.sim.put("bucket", f"run/{i:04}", b"")
    async with given.opened(scheme) as client:
        for recursive in (True, False):
            for limit, pages in ((10, 1), (1500, 2)):
                assert len(await client.list("", recursive=recursive, limit=limit)) == limit + 1
                assert given.kinds() == ["list_objects"] * pages


# ------------------------------------------------------------------------------------ credentials


async def test_bodies_are_signed_unless_they_are_safe_without(given: Given) -> None:
    """On this machine, or under TLS; and always where the user says so."""
    async with given.opened("s3") as client:
        await client.put("a", b"x")
        assert given.sim.requests[-1].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    config = {"s3": {"payload_signing_enabled": True}}
    options = given.options("s3", config_kwargs=config)
    async with given.opened("s3", **options) as client:
        data = np.arange(750_000, dtype=np.uint32).view(np.uint8)
        await client.put("a", data)
        signed = given.sim.requests[-1].headers["x-amz-content-sha256"]
        assert signed == hashlib.sha256(data.tobytes()).hexdigest()
        assert bytes(await client.get("a", 0, 3_000_000)) == data.tobytes()


async def test_checksums_that_the_user_asks_for_are_sent(given: Given) -> None:
    config = {"request_checksum_calculation": "when_supported"}
    async with given.opened("s3", **given.options("s3", config_kwargs=config)) as client:
        data = np.arange(700_000, dtype=np.uint8)
        await client.put("a", data)
        assert bytes(await client.get("a", 0, 700_000)) == data.tobytes()
        assert any("checksum" in name for name in given.sim.requests[0].headers)


class Renewed(Credentials):  # type: ignore[misc]
    """A token that Google gives out when it is asked, and who asked."""

    def __init__(self, token: str) -> None:
        super().__init__(None)
        self.given = token
        self.threads: list[str] = []

    def refresh(self, request: object) -> None:
        self.threads.append(threading.current_thread().name)
        self.token = self.given


async def test_a_token_of_google_is_renewed_in_a_thread(given: Given) -> None:
    token = Renewed("renewed-token")
    with simulator(credentials=Known(token="renewed-token")) as sim:
        async with given.opened("gs", **sim.gcs_options(token=token)) as client:
            await client.put("a", b"x")
            await client.put("b", b"x")
        assert sorted(sim.objects("bucket")) == ["run/a", "run/b"]
    assert len(token.threads) == 1
    assert token.threads[0].startswith("test-clients")


async def test_who_is_not_let_in_is_told_why(given: Given) -> None:
    known = Known(
        access_key="AKIAKNOWN", secret_key="right-secret", expired_tokens=frozenset(("expired-t",))
    )
    more = {"session": given.session, "client": "fsspec"}
    with simulator(credentials=known, region="eu-west-1") as sim:
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("s3", {"key": "AKIAKNOWN", "secret": "wrong-secret"} | more, "credentials"),
            ("s3", {"key": "AKIAOTHER", "secret": "right-secret"} | more, "credentials"),
            (
                "s3",
                {"key": "AKIAKNOWN", "secret": "right-secret", "token": "expired-t"} | more,
                "credentials",
            ),
            ("s3", {"anon": True} | more, "forbidden"),
            ("gs", {"token": Renewed("wrong-token")}, "credentials"),
            ("gs", {"token": "anon"}, "credentials"),
        ]
        for scheme, options, kind in cases:
            made = sim.gcs_options(**options) if scheme == "gs" else sim.s3_options(**options)
            async with given.opened(scheme, **made) as client:
                for call in (
                    client.put("a", b"x"),
                    client.get("a", 0, 1),
                    client.size("a"),
                    client.list("", recursive=True, limit=1),
                    client.delete(["a"]),
                ):
                    found = await refused(call)
                    assert found is not None and found.kind == kind, (options, found)
                    for value in ("right-", "wrong-", "expired-t", "AKIA", "127.0.0.1"):
                        assert value not in str(found)


async def test_the_region_of_a_bucket_is_found_out(given: Given) -> None:
    """By botocore, with the first request; the others go there at once."""
    with simulator(region="eu-west-1") as sim:
        wrong = {"client_kwargs": {"region_name": "us-east-1"}}
        async with given.opened("s3", **sim.s3_options(client="fsspec", **wrong)) as client:
            await client.put("a", b"first")
            sim.reset()
            await client.put("b", np.ones(1_000_000, np.uint8))
            assert bytes(await client.get("a", 0, 9)) == b"first"
            assert [request.kind for request in sim.requests] == ["put_object", "get_object"]


async def test_no_other_client_is_made_for_the_region_of_a_bucket(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take a login page for an empty listing, and stay open."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", given.sim.s3_endpoint)
    options = {"client": "fsspec", "key": "a", "secret": "b", "cache_regions": True}
    given.sim.faults.append(Fault(kind="list_objects", status=200, page=b"<html>"))
    async with given.opened("s3", **options) as client:
        await client.put("a", b"x")
        assert "expect" not in given.sim.requests[0].headers
        assert given.kinds() == ["put_object"]
        with pytest.raises(RequestError, match="not a store's answer"):
            await client.list("", recursive=False, limit=9)


@pytest.mark.parametrize("sync", [False, True])
async def test_first_puts_reach_a_bucket_in_another_region(given: Given, sync: bool) -> None:
    """Also those that are sent at the same time, with large bodies."""
    with simulator(region="eu-west-1") as sim:
        options = sim.s3_options(client="fsspec", client_kwargs={"region_name": "us-east-1"})
        if sync:
            options.pop("client")
            filesystem = S3FileSystem(**options, skip_instance_cache=True)
            options = {"filesystem": filesystem}
        body = np.ones(3_000_000, np.uint8)
        async with given.opened("s3", **options) as client, asyncio.TaskGroup() as group:
            for i in range(8):
                group.create_task(client.put(f"{i}", body))
        assert len(sim.objects("bucket")) == 8
        if sync:
            close = asyncio.run_coroutine_threadsafe(_closed(filesystem), get_loop())
            await asyncio.wrap_future(close)


async def refused(call: Awaitable[object]) -> RequestError | None:
    try:
        await call
    except RequestError as error:
        return error
    return None


async def test_credentials_that_are_none_are_told(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("s3", {"client": "fsspec", "endpoint_url": given.sim.s3_endpoint}),
        ("s3", {"client": "fsspec", "profile": "s3cr3t-profile"}),
        ("gs", {"token": {"client_email": "s3cr3t"}, "endpoint_url": given.sim.gcs_endpoint}),
    ]
    for scheme, options in cases:
        async with given.opened(scheme, **options) as client:
            for _ in range(2):
                with pytest.raises(RequestError) as caught:
                    await client.get("a", 0, 1)
                assert caught.value.kind == "credentials", caught.value
                assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_server_that_is_not_there_is_named(
    workers: Workers, scheme: str, session: AioSession
) -> None:
    endpoint = "http://127.0.0.1:1"
    options: dict[str, Any] = {"endpoint_url": endpoint, "token": "anon"}
    if scheme == "s3":
        options = {"endpoint_url": endpoint, "key": "a", "secret": "b", "client": "fsspec"}
    client = open_client(f"{scheme}://bucket/run", storage_options=options, workers=workers)
    with pytest.raises(RequestError) as caught:
        await client.put("a", b"x")
    await client.close()
    assert caught.value.kind == "connection"
    assert str(caught.value).endswith("(endpoint 127.0.0.1:1)")
    # Nothing of the library hangs on the error: no text of its own, no body that its frames hold.
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_closed_client_says_so(given: Given, scheme: str) -> None:
    async with given.opened(scheme) as client:
        await client.put("a", b"x")
        await client.close()
        with pytest.raises(RequestError, match="the client is closed"):
            await client.put("a", b"x")


# ------------------------------------------------------------------------ filesystems of any kind


async def test_an_async_filesystem_of_which_only_reading_works(given: Given) -> None:
    """HTTP, where the server takes ranges: enough to restore from it."""
    data = bytes(range(256)) * 100
    given.sim.put("bucket", "run/a/b", data)
    client = open_client(f"{given.sim.s3_endpoint}/bucket/run", workers=given.workers)
    assert client.traits.name == "HTTPFileSystem"
    assert await client.size("a/b") == len(data)
    assert bytes(await client.get("a/b", 10, 3000)) == data[10:3000]
    assert bytes(await client.get("a/b", 25_000, 30_000)) == data[25_000:]
    assert bytes(await client.get("a/b", 25_600, 25_601)) == b""
    for call in (client.get("none", 0, 1), client.size("none"), client.get("none", 9, 10)):
        found = await refused(call)
        assert found is not None
        assert found.kind == "missing", found
    given.sim.faults.append(Fault(kind="get_object", number=1, truncate=5))
    found = await refused(client.get("a/b", 0, 10_000))
    assert found is not None
    assert found.kind == "short", found
    await client.close()


# ------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_body_is_sent_from_where_it_lies(
    workers: Workers, session: AioSession, scheme: str, part: bool
) -> None:
    """As `put_copies` declares, by which budgets count."""
    body = np.full(16 * MIB, 7, np.uint8)
    with simulator_process(keep_log=False) as sim:
        given = Given(sim, workers, session)  # type: ignore[arg-type]
        async with given.opened(scheme) as client:
            await client.put("a", b"x")
            upload = await client.begin_parts("b")
            tracemalloc.start()
            try:
                if part:
                    await client.put_part("b", upload, 0, 0, body)
                else:
                    await client.put("b", body)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert client.traits.put_copies == 0
    assert peak < body.size // 4


# ------------------------------------------------------------------- filesystems and loops of users


def made(given: Given, scheme: str, **more: Any) -> Any:
    options = given.options(scheme, skip_instance_cache=True, **more)
    options.pop("client", None)
    return GCSFileSystem(**options) if scheme == "gs" else S3FileSystem(**options)


async def used(client: ObjectClient) -> None:
    data = bytes(range(256)) * 1100  # more than a part of gcsfs
    await client.put("a", np.frombuffer(data, np.uint8), create=True)
    with pytest.raises(RequestError) as caught:
        await client.put("a", b"x", create=True)
    assert caught.value.kind == "exists"
    assert bytes(await client.get("a", 5, 300_000)) == data[5:]
    upload = await client.begin_parts("b")
    tag = await client.put_part("b", upload, 0, 0, data)
    await client.complete_parts("b", upload, [tag])
    listing = await client.list("", recursive=False, limit=9)
    assert [(entry.key, entry.nbytes) for entry in listing] == [("a", len(data)), ("b", len(data))]
    await client.delete(["a", "b"])
    with pytest.raises(RequestError) as caught:
        await client.size("a")
    assert caught.value.kind == "missing"


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_sync_filesystem_of_the_user_works_on_its_own_loop(
    given: Given, scheme: str
) -> None:
    filesystem = made(given, scheme)
    async with given.opened(scheme, filesystem=filesystem) as client:
        await used(client)
        # A server that does not know the question would never answer it.
        assert all("expect" not in request.headers for request in given.sim.requests)
        gate = Gate()
        given.sim.faults[:] = [Fault(kind="put_object", number=0, gate=gate)]
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            task = group.create_task(client.put("b", bytes(1_000_000)))
            await gate.reached.wait()
            task.cancel()
        gate.release()
        # The request has ended on the other loop as well.
        left = asyncio.run_coroutine_threadsafe(_requests_of("S3Client", "GcsClient"), get_loop())
        assert await asyncio.wrap_future(left) == []
    given.sim.faults.clear()
    # It is the user's: it goes on after the client was closed.
    await asyncio.get_running_loop().run_in_executor(
        None, filesystem.pipe_file, "bucket/run/mine", b"x"
    )
    assert given.sim.objects("bucket")["run/mine"] == b"x"
    close = asyncio.run_coroutine_threadsafe(_closed(filesystem), get_loop())
    await asyncio.wrap_future(close)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_an_async_filesystem_of_the_user_is_made_again_for_this_loop(
    given: Given, scheme: str
) -> None:
    filesystem = made(given, scheme, asynchronous=True)
    async with given.opened(scheme, filesystem=filesystem) as client:
        await used(client)
    assert getattr(filesystem, "_s3", None) is None
    assert getattr(filesystem, "_session", None) is None


async def test_a_filesystem_whose_loop_has_ended_is_told(given: Given) -> None:
    loop = asyncio.new_event_loop()
    filesystem = made(given, "s3", loop=loop)
    loop.close()
    async with given.opened("s3", filesystem=filesystem) as client:
        with pytest.raises(RequestError, match="the event loop of the given file system") as caught:
            await client.size("a")
        assert caught.value.kind == "invalid"


async def _requests_of(*names: str) -> list[str]:
    """Names of coroutines of these classes that run on this loop."""
    for _ in range(3):  # a cancellation takes some turns of the loop
        await asyncio.sleep(0)
    return [
        task.get_coro().__qualname__  # type: ignore[union-attr]
        for task in asyncio.all_tasks()
        if task.get_coro().__qualname__.startswith(names)  # type: ignore[union-attr]
    ]


async def _closed(filesystem: Any) -> None:
    if isinstance(filesystem, S3FileSystem):
        await filesystem._s3creator.__aexit__(None, None, None)
    else:
        await filesystem._session.close()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_client_of_its_own_leaves_no_connection_open(
    given: Given, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[aiohttp.ClientSession] = []
    begin = aiohttp.ClientSession.__init__

    def watched(self: aiohttp.ClientSession, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        opened.append(self)

    monkeypatch.setattr(aiohttp.ClientSession, "__init__", watched)
    async with given.opened(scheme) as client:
        async with asyncio.TaskGroup() as group:
            for i in range(10):
                group.create_task(client.put(f"{i}", b"x"))
        assert len(opened) == 1
    assert all(session.closed for session in opened)
