"""Conformance suite for clients of object stores: laws that every client keeps.

Make a subclass in a test module, with pytest and pytest-asyncio installed::

    class TestMyClient(ClientConformance):
        @asynccontextmanager
        async def opened(self, prefix):
            client = MyClient(f"mine://bucket/{prefix}")
            yield client
            await client.close()

`prefix` is a new one for each test; clients that are opened with the same one see the same
objects. A law about something that the client's traits do not declare holds by itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress

import numpy as np
import pytest

from asyncckpt.options import MIB
from asyncckpt.stores.objects.clients.client import Body, Listed, ObjectClient, RequestError

KIB = 1024
LENGTHS = (0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 3 * MIB + 5)
"""Object lengths around the sizes of reads and writes of a connection."""

ODD_KEYS = (
    "plain",
    "a/b/c",
    "space and + plus",
    "per%20cent",
    "question?mark=1",
    "hash#tag",
    "star*[a]{b}",
    "umlaut-ü-雪",
    "quote'\"&<>",
    "semi;colon,comma=equals",
    "tilde~dot.name",
    "at@sign:colon",
)
"""Keys are literal: nothing in them is a pattern, a query or an escape."""

PART_NBYTES = 5 * MIB
"""Length of a part that is not the last; S3 takes no shorter ones."""

PROMPTLY_S = 10.0
"""Limit for the end of a cancelled call, far above what it takes."""

CLOCKS_S = 24 * 3600.0
"""Most that a server's clock may differ from ours; modification times have whole seconds."""


def content(nbytes: int, seed: int = 0) -> bytes:
    """Return pseudo-random bytes, the same for the same seed."""
    return np.random.default_rng([nbytes, seed]).bytes(nbytes)


def bodies(nbytes: int) -> list[Body]:
    """Return the same bytes in every kind of buffer."""
    data = content(nbytes)
    array = np.frombuffer(data, np.uint8).copy()
    return [data, bytearray(data), memoryview(bytearray(data)), array]


async def whole(client: ObjectClient, key: str) -> bytes:
    """Read all bytes of an object, after a request for its size."""
    return bytes(await client.get(key, 0, max(await client.size(key), 1)))


async def received(client: ObjectClient, key: str, start: int, stop: int) -> bytes:
    """Return what `receive` passes on, which is what `get` returns."""
    found: list[bytes] = []

    async def take(pieces: Sequence[Body]) -> None:
        found.extend(map(bytes, pieces))

    await client.receive(key, start, stop, take)
    assert b"".join(found) == bytes(await client.get(key, start, stop))
    return b"".join(found)


async def expect_failure(kind: str, call: object) -> RequestError:
    """Check that the awaitable fails with this kind, and a text of one line."""
    with pytest.raises(RequestError) as caught:
        await call  # type: ignore[misc]
    assert caught.value.kind == kind, caught.value
    assert "\n" not in caught.value.detail
    return caught.value


def keys(listing: list[Listed]) -> list[str]:
    """Return the keys of a listing, with `/` behind those that are prefixes."""
    return [entry.key + "/" * entry.is_prefix for entry in listing]


@pytest.mark.asyncio
class ClientConformance:
    """All laws of clients. Subclass it as `Test…` and define `opened`.

    Attributes:
        missing_count: keys without an object among those deleted together; with the others, more
            than a server takes in one request.
    """

    missing_count = 1000

    def opened(self, prefix: str) -> AbstractAsyncContextManager[ObjectClient]:
        """Open a client with this prefix, and close it at the end."""
        raise NotImplementedError

    def opened_without_bucket(self) -> AbstractAsyncContextManager[ObjectClient] | None:
        """Open a client of a bucket that does not exist; None where there are no buckets."""
        return None

    @pytest.fixture
    def prefix(self) -> str:
        """Return a prefix that no other test uses."""
        return f"run-{uuid.uuid4().hex}/deep"

    # -------------------------------------------------------------------------- objects and ranges

    async def test_an_object_of_any_length_comes_back(self, prefix: str) -> None:
        """From every kind of buffer, and `size` knows how long it is."""
        async with self.opened(prefix) as client:
            for nbytes in LENGTHS:
                expected = content(nbytes)
                for i, body in enumerate(bodies(nbytes)):
                    await client.put(f"d/{i}", body)
                    assert await client.size(f"d/{i}") == nbytes
                    assert await whole(client, f"d/{i}") == expected
                    assert bytes(body) == expected

    async def test_a_put_replaces_the_object(self, prefix: str) -> None:
        """With a shorter one too."""
        async with self.opened(prefix) as client:
            await client.put("a", content(1000))
            await client.put("a", content(10, 1))
            assert await whole(client, "a") == content(10, 1)

    async def test_a_range_is_exactly_what_was_asked_for(self, prefix: str) -> None:
        """Fewer bytes where the object ends before, none past its end."""
        async with self.opened(prefix) as client:
            data = content(1000)
            await client.put("a", data)
            for start, stop in ((0, 1), (0, 1000), (1, 999), (999, 1000), (500, 501)):
                assert bytes(await client.get("a", start, stop)) == data[start:stop]
            assert bytes(await client.get("a", 990, 2000)) == data[990:]
            assert bytes(await client.get("a", 0, 5 * MIB)) == data
            for start in (1000, 1001, 5 * MIB):
                assert await received(client, "a", start, start + 10) == b""
            large = content(5 * MIB)
            await client.put("large", large)
            for start, stop in ((0, 5 * MIB), (1, 3 * MIB), (5 * MIB - 9, 6 * MIB)):
                assert await received(client, "large", start, stop) == large[start:stop]
            await client.put("empty", b"")
            assert bytes(await client.get("empty", 0, 1)) == b""
            assert bytes(await client.get("empty", 5, 9)) == b""

    async def test_what_is_not_there_is_missing(self, prefix: str) -> None:
        """To every call that needs it; also where only longer keys exist."""
        async with self.opened(prefix) as client:
            await client.put("there/below", b"x")
            for key in ("not", "there", "the", "there/belo", "there/below/more"):
                await expect_failure("missing", client.get(key, 0, 10))
                await expect_failure("missing", received(client, key, 0, 10))
                await expect_failure("missing", client.size(key))

    async def test_keys_are_literal(self, prefix: str) -> None:
        """Put, read, listed and deleted as they are."""
        async with self.opened(prefix) as client:
            for key in ODD_KEYS:
                await client.put(f"odd/{key}", key.encode())
            listing = await client.list("odd", recursive=True, limit=100)
            assert sorted(keys(listing)) == sorted(f"odd/{key}" for key in ODD_KEYS)
            for i, key in enumerate(ODD_KEYS, 1):
                assert await whole(client, f"odd/{key}") == key.encode()
                await client.delete([f"odd/{key}"])
                await expect_failure("missing", client.size(f"odd/{key}"))
                left = await client.list("odd", recursive=True, limit=100)
                assert len(left) == len(ODD_KEYS) - i

    async def test_many_requests_at_once(self, prefix: str) -> None:
        """Each gets what is its own."""
        async with self.opened(prefix) as client:

            async def one(i: int) -> None:
                await client.put(f"many/{i}", content(1000 + i, i))
                assert await whole(client, f"many/{i}") == content(1000 + i, i)

            async with asyncio.TaskGroup() as group:
                for i in range(40):
                    group.create_task(one(i))
            assert len(await client.list("many", recursive=True, limit=100)) == 40

    async def test_two_clients_see_the_same_objects(self, prefix: str) -> None:
        """At once: nothing is cached."""
        async with self.opened(prefix) as one, self.opened(prefix) as other:
            await expect_failure("missing", other.size("a"))
            assert await other.list("", recursive=True, limit=10) == []
            await one.put("a", b"first")
            assert await other.size("a") == 5
            assert keys(await other.list("", recursive=True, limit=10)) == ["a"]
            await one.put("a", b"the second")
            assert await whole(other, "a") == b"the second"
            assert [entry.nbytes for entry in await other.list("", recursive=False, limit=9)] == [
                10
            ]
            await one.delete(["a"])
            assert await other.list("", recursive=False, limit=10) == []
            await expect_failure("missing", other.get("a", 0, 10))

    # ------------------------------------------------------------------------------------- listing

    async def test_a_listing_tells_keys_sizes_and_times(self, prefix: str) -> None:
        """By key, of one level or of all."""
        async with self.opened(prefix) as client:
            for key in ("b", "a/2", "a/1", "a/deep/x", "ab/1", "a!/1"):
                await client.put(key, content(len(key)))
            everything = await client.list("", recursive=True, limit=100)
            assert keys(everything) == ["a!/1", "a/1", "a/2", "a/deep/x", "ab/1", "b"]
            assert all(entry.nbytes == len(entry.key) for entry in everything)
            level = await client.list("", recursive=False, limit=100)
            assert sorted(keys(level)) == ["a!/", "a/", "ab/", "b"]
            assert [entry.key for entry in level] == sorted(entry.key for entry in level)
            below = await client.list("a", recursive=False, limit=100)
            assert keys(below) == ["a/1", "a/2", "a/deep/"]
            assert [entry.nbytes for entry in below] == [3, 3, 0]
            assert keys(await client.list("a", recursive=True, limit=9)) == [
                "a/1",
                "a/2",
                "a/deep/x",
            ]
            assert keys(await client.list("a/deep", recursive=False, limit=9)) == ["a/deep/x"]
            for entry in everything:
                assert abs(entry.modified_s - time.time()) < CLOCKS_S

    async def test_a_listing_of_nothing_is_empty(self, prefix: str) -> None:
        """Of a prefix that was never there, of one that is an object, and of a part of a name."""
        async with self.opened(prefix) as client:
            for recursive in (False, True):
                assert await client.list("", recursive=recursive, limit=10) == []
                assert await client.list("none/at/all", recursive=recursive, limit=10) == []
            await client.put("object", b"x")
            await client.put("dir/x", b"x")
            for recursive in (False, True):
                assert await client.list("object", recursive=recursive, limit=10) == []
                assert await client.list("di", recursive=recursive, limit=10) == []

    async def test_a_listing_ends_after_its_limit(self, prefix: str) -> None:
        """With one entry more, which tells that there are more."""
        async with self.opened(prefix) as client:
            async with asyncio.TaskGroup() as group:
                for i in range(7):
                    group.create_task(client.put(f"o/{i}", b"x"))
                    group.create_task(client.put(f"p/{i}/x", b"x"))
            for recursive in (False, True):
                for prefix_ in ("o", "p"):
                    for limit, found in ((3, 4), (6, 7), (7, 7), (100, 7)):
                        listing = await client.list(prefix_, recursive=recursive, limit=limit)
                        assert len(listing) == found, (recursive, prefix_, limit)

    # ------------------------------------------------------------------------------------ deletion

    async def test_deleting_removes_these_objects_only(self, prefix: str) -> None:
        """What is missing is no error, also when nothing is there at all."""
        async with self.opened(prefix) as client:
            await client.delete([])
            await client.delete(["never/there"])
            for key in ("a", "a/1", "ab", "b", "c/d"):
                # An object and others below it: possible in a store, not in a file system.
                with suppress(RequestError):
                    await client.put(key, b"x")
            before = set(keys(await client.list("", recursive=True, limit=100)))
            await client.delete(["a", "missing", "c/d"])
            after = set(keys(await client.list("", recursive=True, limit=100)))
            assert after == before - {"a", "c/d"}
            await expect_failure("missing", client.size("c/d"))

    async def test_many_objects_are_deleted(self, prefix: str) -> None:
        """More than a server takes in one request, where it takes several."""
        async with self.opened(prefix) as client:
            names = [f"bulk/{i:04}" for i in range(25)]
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(client.put(name, b"x"))
            await client.delete(names + [f"bulk/missing-{i}" for i in range(self.missing_count)])
            assert await client.list("bulk", recursive=True, limit=10) == []

    # ------------------------------------------------------------------------- conditional creation

    async def test_a_conditional_create_never_replaces(self, prefix: str) -> None:
        """It fails with `exists`, and the object is what it was."""
        async with self.opened(prefix) as client:
            if not client.traits.conditional_create:
                return
            await client.put("a", b"first", create=True)
            await expect_failure("exists", client.put("a", b"second", create=True))
            assert await whole(client, "a") == b"first"
            await client.put("a", b"third")
            await expect_failure("exists", client.put("a", b"fourth", create=True))
            assert await whole(client, "a") == b"third"
            await client.delete(["a"])
            await client.put("a", b"fifth", create=True)
            assert await whole(client, "a") == b"fifth"

    async def test_of_many_conditional_creates_exactly_one_wins(self, prefix: str) -> None:
        """From several clients at once; the object is what the winner put."""
        async with self.opened(prefix) as one, self.opened(prefix) as other:
            if not one.traits.conditional_create:
                return
            for round_number in range(5):
                winners: list[int] = []

                async def create(writer: int, key: str, into: list[int]) -> None:
                    client = one if writer % 2 else other
                    while True:
                        try:
                            await client.put(key, content(40_000, writer), create=True)
                        except RequestError as error:
                            assert error.kind in ("exists", "conflict"), error
                            if error.kind == "conflict":
                                continue
                        else:
                            into.append(writer)
                        return

                key = f"contended/{round_number}"
                async with asyncio.TaskGroup() as group:
                    for writer in range(6):
                        group.create_task(create(writer, key, winners))
                assert len(winners) == 1
                assert await whole(one, key) == content(40_000, winners[0])

    # -------------------------------------------------------- conditional replacement and deletion

    async def test_a_replacement_needs_the_version_that_was_read(self, prefix: str) -> None:
        """It fails with `exists` after any change in between, and changes nothing then."""
        async with self.opened(prefix) as client:
            if not client.traits.conditional_replace:
                return
            await client.put("a", b"first")
            version = await client.version("a")
            await client.replace("a", b"second", version=version)
            assert await whole(client, "a") == b"second"
            assert await client.version("a") != version
            await expect_failure("exists", client.replace("a", b"third", version=version))
            assert await whole(client, "a") == b"second"
            version = await client.version("a")
            await client.delete(["a"])
            with pytest.raises(RequestError) as caught:
                await client.replace("a", b"fourth", version=version)
            assert caught.value.kind in ("missing", "exists")
            await expect_failure("missing", client.version("a"))

    async def test_a_conditional_deletion_spares_another_version(self, prefix: str) -> None:
        """And what is missing is no error."""
        async with self.opened(prefix) as client:
            if not client.traits.conditional_delete:
                return
            await client.put("a", b"first")
            version = await client.version("a")
            await client.put("a", b"second")
            await expect_failure("exists", client.delete_version("a", version=version))
            assert await whole(client, "a") == b"second"
            version = await client.version("a")
            await client.delete_version("a", version=version)
            await expect_failure("missing", client.size("a"))
            await client.delete_version("a", version=version)

    async def test_of_many_conditional_replacements_exactly_one_wins(self, prefix: str) -> None:
        """From several clients at once; the object is what the winner put."""
        async with self.opened(prefix) as one, self.opened(prefix) as other:
            if not one.traits.conditional_replace:
                return
            await one.put("a", b"first")
            version = await one.version("a")
            winners: list[int] = []

            async def replace(writer: int) -> None:
                client = one if writer % 2 else other
                try:
                    await client.replace("a", content(40_000, writer), version=version)
                except RequestError as error:
                    assert error.kind in ("exists", "conflict"), error
                else:
                    winners.append(writer)

            async with asyncio.TaskGroup() as group:
                for writer in range(6):
                    group.create_task(replace(writer))
            assert len(winners) == 1
            assert await whole(one, "a") == content(40_000, winners[0])

    async def test_listings_tell_checksums_or_none(self, prefix: str) -> None:
        """Equal bytes have equal checksums, and other bytes have others."""
        async with self.opened(prefix) as client:
            for key, data in (("a", b"same"), ("b", b"same"), ("c", b"else")):
                await client.put(key, data)
            a, b, c = await client.list("", recursive=True, limit=9)
            assert a.checksum == b.checksum
            assert (a.checksum != c.checksum) == bool(a.checksum)

    # ---------------------------------------------------------------------------------------- parts

    async def test_an_object_is_made_of_its_parts(self, prefix: str) -> None:
        """Visible only when they are complete; in any order where the client says so."""
        async with self.opened(prefix) as client:
            if not client.traits.multipart:
                return
            step = PART_NBYTES
            data = content(2 * step + 1000)
            upload = await client.begin_parts("big")
            spans = [(0, 0, step), (1, step, 2 * step), (2, 2 * step, len(data))]
            tags: dict[int, str] = {}

            async def send(number: int, start: int, stop: int) -> None:
                tags[number] = await client.put_part("big", upload, number, start, data[start:stop])

            if client.traits.parallel_parts:
                async with asyncio.TaskGroup() as group:
                    for span in reversed(spans):
                        group.create_task(send(*span))
            else:
                for span in spans:
                    await send(*span)
            await expect_failure("missing", client.size("big"))
            assert await client.list("", recursive=True, limit=10) == []
            await client.complete_parts("big", upload, [tags[i] for i in range(3)])
            assert await client.size("big") == len(data)
            assert await whole(client, "big") == data
            assert not await client.pending_parts("")

    async def test_an_object_of_one_short_part(self, prefix: str) -> None:
        """The last part may be as short as it likes, also when it is the only one."""
        async with self.opened(prefix) as client:
            if not client.traits.multipart:
                return
            upload = await client.begin_parts("small")
            tag = await client.put_part("small", upload, 0, 0, b"tiny")
            await client.complete_parts("small", upload, [tag])
            assert await whole(client, "small") == b"tiny"

    async def test_a_part_may_be_sent_again(self, prefix: str) -> None:
        """After an answer was lost, with the same bytes."""
        async with self.opened(prefix) as client:
            if not client.traits.multipart:
                return
            step = PART_NBYTES
            data = content(step + 10)
            upload = await client.begin_parts("again")
            await client.put_part("again", upload, 0, 0, data[:step])
            first = await client.put_part("again", upload, 0, 0, data[:step])
            second = await client.put_part("again", upload, 1, step, data[step:])
            await client.complete_parts("again", upload, [first, second])
            assert await whole(client, "again") == data

    async def test_an_aborted_upload_leaves_nothing(self, prefix: str) -> None:
        """However far it had come; aborting again is no error."""
        async with self.opened(prefix) as client:
            if not client.traits.multipart:
                return
            for parts in range(2):
                upload = await client.begin_parts("gone")
                if parts:
                    await client.put_part("gone", upload, 0, 0, content(PART_NBYTES))
                await client.abort_parts("gone", upload)
                await client.abort_parts("gone", upload)
                assert not await client.pending_parts("")
                await expect_failure("missing", client.size("gone"))

    async def test_pending_uploads_are_told_where_they_can_be_listed(self, prefix: str) -> None:
        """Those below the prefix, with their keys."""
        async with self.opened(prefix) as client:
            if not client.traits.multipart:
                return
            upload = await client.begin_parts("x/pending")
            other = await client.begin_parts("y/pending")
            pending = await client.pending_parts("x")
            if pending is not None:
                assert [(p.key, p.upload) for p in pending] == [("x/pending", upload)]
                assert {p.key for p in await client.pending_parts("")} == {"x/pending", "y/pending"}
            await client.abort_parts("x/pending", upload)
            await client.abort_parts("y/pending", other)
            assert not await client.pending_parts("")

    # ------------------------------------------------------------------- cancellation, errors, end

    async def test_a_cancelled_call_ends_promptly(self, prefix: str) -> None:
        """At any point of it; the object is whole or was never there; the client goes on."""
        async with self.opened(prefix) as client:
            data = content(2 * MIB)
            await client.put("there", data)
            for yields in (0, 1, 2, 4, 8, 16, 32, 64):
                for call in (
                    client.put(f"cancelled/{yields}", bytearray(data)),
                    client.get("there", 0, len(data)),
                    received(client, "there", 0, len(data)),
                    client.list("", recursive=True, limit=10),
                    client.size("there"),
                ):
                    async with asyncio.timeout(PROMPTLY_S), asyncio.TaskGroup() as group:
                        task = group.create_task(call)
                        for _ in range(yields):
                            await asyncio.sleep(0)
                        task.cancel()
            for entry in await client.list("cancelled", recursive=True, limit=100):
                assert await whole(client, entry.key) == data
            assert await whole(client, "there") == data

    async def test_a_missing_bucket_is_told(self) -> None:
        """To every call; it is not taken for a missing object."""
        opened = self.opened_without_bucket()
        if opened is None:
            return
        async with opened as client:
            await expect_failure("no_bucket", client.put("a", b"x"))
            await expect_failure("no_bucket", client.get("a", 0, 1))
            await expect_failure("no_bucket", client.size("a"))
            await expect_failure("no_bucket", client.list("", recursive=False, limit=1))
            await expect_failure("no_bucket", client.list("", recursive=True, limit=1))

    async def test_closing_twice_is_closing_once(self, prefix: str) -> None:
        """Also when nothing was ever requested."""
        async with self.opened(prefix) as client:
            await client.put("a", b"x")
            await client.close()
            await client.close()
        async with self.opened(prefix) as unused:
            await unused.close()

    async def test_a_client_shows_where_it_is_and_nothing_else(self, prefix: str) -> None:
        """Its `repr` is the library and the URL."""
        async with self.opened(prefix) as client:
            assert client.url.endswith(prefix)
            assert client.traits.name in repr(client)
            assert client.url in repr(client)
            assert len(repr(client)) < len(client.url) + len(client.traits.name) + 40
