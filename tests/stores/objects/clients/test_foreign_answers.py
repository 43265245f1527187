"""Answers that no store has sent, like a login page: neither stored, nor empty, nor damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product

import pytest

from asyncckpt.flow.threads import Workers
from asyncckpt.options import KIB
from asyncckpt.stores.objects.clients.client import ObjectClient, RequestError
from asyncckpt.stores.objects.clients.opening import open_client
from tests.simulator import Fault, Simulator
from tests.stores.objects.stores import KINDS, options_of

FSSPEC = ("s3fs", "gcsfs")
WELL_FORMED = b"<!DOCTYPE html><html><body>Please sign in</body></html>"
MALFORMED = b"<!doctype html><html><body>Please sign in<br></body></html>"
PAGES = [(200, WELL_FORMED), (200, MALFORMED), (200, b""), (200, b"{}"), (204, b"")]
REDIRECTIONS = (300, 301, 302, 303, 304, 307, 308)
DATA = bytes(256 * KIB + 1)
"""GCS stores the last byte with the request that completes the object."""


@asynccontextmanager
async def opened(kind: str, sim: Simulator) -> AsyncIterator[ObjectClient]:
    """The client of a library on the simulator."""
    scheme, options = options_of(kind, sim)
    workers = Workers(2, "test-answers")
    client = open_client(f"{scheme}://bucket/run", storage_options=options, workers=workers)
    try:
        yield client
    finally:
        await client.close()
        workers.shutdown()


async def refused(call: Awaitable[object]) -> RequestError:
    """Return the error of a call."""
    async with asyncio.timeout(10):
        with pytest.raises(RequestError) as caught:
            await call
    return caught.value


async def in_parts(client: ObjectClient) -> None:
    upload = await client.begin_parts("b")
    try:
        tag = await client.put_part("b", upload, 0, 0, DATA)
        await client.complete_parts("b", upload, [tag])
    except RequestError:
        await client.abort_parts("b", upload)
        raise


async def replaced(client: ObjectClient) -> None:
    await client.replace("a", b"other", version=await client.version("a"))


WRITES: dict[str, tuple[str, Callable[[ObjectClient], Awaitable[object]]]] = {
    "put": ("put_object", lambda client: client.put("b", b"body")),
    "create": ("put_object", lambda client: client.put("b", b"body", create=True)),
    "replace": ("put_object", replaced),
    "begin": ("create_upload", in_parts),
    "part": ("put_part", in_parts),
    "complete": ("complete_upload", in_parts),
}
READS: dict[str, tuple[str, Callable[[ObjectClient], Awaitable[object]]]] = {
    "get": ("get_object", lambda client: client.get("a", 0, 4)),
    "list": ("list_objects", lambda client: client.list("", recursive=True, limit=9)),
    "level": ("list_objects", lambda client: client.list("", recursive=False, limit=9)),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*product(FSSPEC, WRITES), *product(["obstore"], ["put", "create", "replace"])],
)
async def test_a_write_that_a_page_answers_is_like_one_without_an_answer(
    sim: Simulator, kind: str, name: str
) -> None:
    what, call = WRITES[name]
    async with opened(kind, sim) as client:
        await client.put("a", b"body")
        for status, page in PAGES:
            sim.faults[:] = [Fault(kind=what, number=0, status=status, page=page)]
            error = await refused(call(client))
            assert error.retryable, (status, page, error)
        sim.faults.clear()
        await call(client)


@pytest.mark.parametrize(("kind", "name"), [*product(FSSPEC, READS), ("obstore", "get")])
async def test_a_page_is_neither_a_listing_nor_bytes_of_an_object(
    sim: Simulator, kind: str, name: str
) -> None:
    what, call = READS[name]
    async with opened(kind, sim) as client:
        await client.put("a", b"body")
        for status, page in PAGES:
            sim.faults[:] = [Fault(kind=what, number=0, status=status, page=page)]
            error = await refused(call(client))
            assert error.kind == "endpoint"
            assert "this is not a store's answer; check endpoint_url and proxies" in error.detail
        sim.faults.clear()
        assert await call(client)


@pytest.mark.parametrize(
    ("kind", "name"), [*product(FSSPEC, [*READS, "put", "complete"]), *product(["obstore"], READS)]
)
async def test_a_redirection_without_a_target_is_told(sim: Simulator, kind: str, name: str) -> None:
    """GCS answers 308 to a part of an upload that goes on."""
    what, call = {**READS, **WRITES}[name]
    async with opened(kind, sim) as client:
        await client.put("a", b"body")
        for status in REDIRECTIONS:
            sim.faults[:] = [Fault(kind=what, number=0, status=status, page=b"")]
            error = await refused(call(client))
            if status != 308 or name in READS:
                assert (error.kind, error.retryable) == ("endpoint", False)


@pytest.mark.parametrize("recursive", [False, True])
async def test_where_pages_answer_obstore_lists_nothing_either(
    sim: Simulator, recursive: bool
) -> None:
    async with opened("obstore", sim) as client:
        for status, page in PAGES:
            sim.faults[:] = [Fault(number=0, status=status, page=page)]
            error = await refused(client.list("", recursive=recursive, limit=9))
            assert error.kind == "endpoint" or (error.kind == "short" and not page)
        sim.faults.clear()
        assert await client.list("", recursive=recursive, limit=9) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_listing_of_an_empty_bucket_is_empty(sim: Simulator, kind: str) -> None:
    async with opened(kind, sim) as client:
        for recursive in (False, True):
            for prefix in ("", "a/b"):
                assert await client.list(prefix, recursive=recursive, limit=9) == []
