"""Requests of one object store, with deadlines, retries and hedges."""

# Rule: a try that was given up may still arrive. So a data object gets a new name for every try,
#   everything else is idempotent, and the caller learns of a body that such a try was sending.

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from asyncckpt.stores.objects.clients.client import (
    RETRYABLE,
    Body,
    ClientTraits,
    Listed,
    ObjectClient,
    PendingParts,
    RequestError,
)
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.requests.sending import Landing, Sender, Try
from asyncckpt.stores.paths import below


class Sent(NamedTuple):
    """A data object that is stored.

    Attributes:
        key: the object that holds the body.
        reusable: whether the body's memory may be used again: no try of it was cancelled or timed
            out, so no request can still be sending it.
        orphans: names of other tries that may have landed.
    """

    key: str
    reusable: bool
    orphans: tuple[str, ...]


class Sink(Protocol):
    """Where a range of an object goes, in order.

    Attributes:
        at: byte of the object up to which it has come.
        stop: end of the range.
    """

    at: int
    stop: int

    async def put(self, start: int, pieces: Sequence[Body]) -> None:
        """Take the bytes from `start` on, but not again those before `at`.

        Cancellation: waits until nothing is being copied; `at` then says what was.
        """
        ...


class Requests(Sender):
    """Every request of one store.

    Belongs to the event loop of its client. All methods raise `RequestError`, after the last try
    where trying again could help; its `detail` then says how often and how long it was tried. A
    cancelled call has ended all of its requests when it raises `CancelledError`; its body must not
    be used again.

    Attributes:
        client: client that makes the requests.
    """

    def __init__(
        self,
        client: ObjectClient,
        *,
        policy: RequestPolicy | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(client.url, policy or RequestPolicy(), rng or random.Random())
        self.client = client

    def __repr__(self) -> str:
        return f"Requests({self.url!r}, {self.limiter!r})"

    @property
    def traits(self) -> ClientTraits:
        """Capabilities of the client."""
        return self.client.traits

    def location(self, key: str) -> str:
        """Return the URL of an object, for errors."""
        return below(self.url, key) if key else self.url

    async def put(
        self, name: Callable[[int], str], body: Body, *, landing: Landing | None = None
    ) -> Sent:
        """Store the body in a data object.

        Args:
            name: returns the key for request 0, 1, …: never the same twice. A slow request is
                hedged by a second one.
            body: what to send.
            landing: as in `send`.
        """
        failed: list[Try[Any]] = []
        keys: list[str] = []
        refused: list[str] = []
        held, nbytes = [body], len(body)
        del body

        async def put() -> str:
            keys.append(key := name(len(keys)))
            try:
                await self.client.put(key, held[0])
            except RequestError as error:
                # A request that was refused for its rate was not carried out.
                if error.kind == "throttled":
                    refused.append(key)
                raise
            return key

        # The budget does not cover the copies of a second request.
        hedged = not self.traits.put_copies
        try:
            key = await self.send(
                put,
                direction="put",
                nbytes=nbytes,
                hedged=hedged,
                failed=failed,
                landing=landing,
            )
        finally:
            held.clear()  # an error keeps these functions, also when its frames were cleared
        landed = tuple(other for other in keys if other != key and other not in refused)
        raced = len(keys) > len(failed) + 1
        return Sent(key, not raced and not any(this.abandoned for this in failed), landed)

    async def create(
        self,
        key: str,
        body: Body,
        *,
        again: Callable[[], Awaitable[bool]] | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> bool:
        """Create an object; return whether the answer said that this call created it.

        False means that an object exists there, perhaps from an earlier try of this call whose
        answer was lost: the caller reads it back; or that `again` forbade another try. Once another
        is no longer `wanted`, the tries end with `timeout`.
        """
        put = partial(self.client.put, key, body, create=True)
        try:
            await self.send(
                put, direction="put", nbytes=len(body), conditional=True, again=again, wanted=wanted
            )
        except RequestError as error:
            if error.kind != "exists":
                raise
            return False
        return True

    async def replace(
        self,
        key: str,
        body: Body,
        *,
        version: str | None = None,
        again: Callable[[], Awaitable[bool]] | None = None,
        wanted: Callable[[], bool] | None = None,
        landing: Landing | None = None,
    ) -> None:
        """Put the body at the key, whatever was there before, or only if it had this version.

        `again` and `wanted` as in `create`, but False of `again` raises `exists`; `landing` as in
        `send`.
        """
        conditional = version is not None
        put = partial(self.client.put, key, body)
        if version is not None:
            put = partial(self.client.replace, key, body, version=version)
        await self.send(
            put,
            direction="put",
            nbytes=len(body),
            conditional=conditional,
            again=again,
            wanted=wanted,
            landing=landing,
        )

    async def version(self, key: str) -> str:
        """Return the version of the object, as `ObjectClient.version`."""
        return await self.send(partial(self.client.version, key))

    async def delete_version(self, key: str, version: str) -> None:
        """Delete the object if it has this version; a missing one is no error."""
        await self.send(partial(self.client.delete_version, key, version=version), conditional=True)

    async def get(self, key: str, start: int, stop: int) -> Body:
        """Return bytes `start` to `stop` of the object, fewer only where it ends before."""
        nbytes = stop - start

        async def read() -> Body:
            body = await self.client.get(key, start, stop)
            if len(body) > nbytes:
                text = f"{nbytes} bytes were requested and {len(body)} arrived"
                raise RequestError("invalid", f"{text}: the store ignores ranges")
            return body

        return await self.send(read, direction="get", nbytes=nbytes, hedged=True)

    async def fill(self, key: str, sink: Sink) -> None:
        """Pass the sink's range of the object on as it arrives; less only where the object ends.

        The sink gets every byte once, from whichever request has it first, and never two at a
        time: a hedge of a slow request asks for the bytes that are missing when it begins, as does
        the next try after one that failed.
        """
        if self.traits.receive_nbytes is None:
            # The whole response has come, and the next request begins while this one is copied.
            body = await self.get(key, sink.at, sink.stop)
            await sink.put(sink.at, [body])
            return
        lock = asyncio.Lock()
        failed: list[Exception] = []

        async def read() -> range:
            start = at = sink.at

            async def take(pieces: Sequence[Body]) -> None:
                nonlocal at
                begin, at = at, at + sum(map(len, pieces))
                if at > sink.stop:
                    text = f"{sink.stop - start} bytes were requested and more arrived"
                    raise RequestError("invalid", f"{text}: the store ignores ranges")
                async with lock:
                    if not failed:
                        try:
                            await sink.put(begin, pieces)
                        except Exception as error:
                            failed.append(error)
                if failed:
                    raise failed[0]

            try:
                if start < sink.stop:
                    await self.client.receive(key, start, sink.stop, take)
            except Exception:
                if not failed:
                    raise
            return range(start, at)

        nbytes = sink.stop - sink.at
        try:
            await self.send(read, direction="get", nbytes=nbytes, hedged=True)
        except BaseException:
            # A thread that was abandoned goes before the cancellation that it did not obey.
            if not failed:
                raise
        if failed:
            error = failed.pop()
            try:
                raise error
            finally:
                del error  # a cycle of error and frame would stay until it is collected

    async def read(self, key: str, *, max_nbytes: int) -> bytes | None:
        """Return the whole of a small object, or None if it is longer than `max_nbytes`."""
        parts: list[Body] = []
        stop, wanted = 0, self.policy.first_read_nbytes
        while True:
            start, stop = stop, min(stop + wanted, max_nbytes + 1)
            parts.append(await self.get(key, start, stop))
            if len(parts[-1]) < stop - start:
                return b"".join(parts)
            if stop > max_nbytes:
                return None
            wanted = self.policy.next_read_nbytes

    async def size(self, key: str) -> int:
        """Return the length of the object in bytes."""
        return await self.send(partial(self.client.size, key))

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        """List what is below `prefix`, as `ObjectClient.list` does."""
        return await self.send(
            partial(self.client.list, prefix, recursive=recursive, limit=limit),
            deadline_s=self.policy.list_timeout_s,
        )

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; missing ones are no error.

        Where the store throttles, what is left is tried again for as long as it becomes less.
        """
        left = tuple(keys)

        async def delete() -> None:
            nonlocal left
            try:
                await self.client.delete(left)
            except RequestError as error:
                # Some stores count deleting a missing object as a change: delete the rest only.
                left = left if error.left is None else tuple(error.left)
                raise

        while left:
            before = len(left)
            try:
                await self.send(
                    delete, deadline_s=self.policy.timeout_s + before * self.policy.per_key_s
                )
                return
            except RequestError as error:
                if not error.retryable or len(left) == before:
                    raise

    async def begin_parts(self, key: str, *, create: bool = False) -> tuple[str, bool]:
        """Begin a multipart upload; return its id, and whether there may be another one.

        A try whose answer was lost may have begun one, which `pending_parts` lists. With `create`
        the object must be new, as in `complete_parts`.
        """
        failed: list[Try[Any]] = []
        begin = partial(self.client.begin_parts, key, create=create)
        return await self.send(begin, conditional=create, failed=failed), bool(failed)

    async def put_part(
        self, key: str, upload: str, number: int, offset: int, body: Body
    ) -> tuple[str, bool]:
        """Store part `number`; return its tag, and whether the body's memory may be used again."""
        failed: list[Try[Any]] = []
        held, nbytes = [body], len(body)
        del body

        async def put() -> str:
            return await self.client.put_part(key, upload, number, offset, held[0])

        try:
            tag = await self.send(put, direction="put", nbytes=nbytes, failed=failed)
        finally:
            held.clear()  # as in `put`
        return tag, not any(this.abandoned for this in failed)

    async def complete_parts(
        self, key: str, upload: str, tags: Sequence[str], *, create: bool = False
    ) -> None:
        """Make the object of the parts with these tags, in order; with `create` it must be new.

        Where the next try finds no such upload because an answer was lost, the object is looked
        up instead.
        """
        failed: list[Try[Any]] = []

        async def complete() -> None:
            try:
                await self.client.complete_parts(key, upload, tags, create=create)
            except RequestError as error:
                if not failed:
                    raise
                if create and error.kind == "exists":
                    pending = await self.client.pending_parts(key.rpartition("/")[0])
                    if upload not in [found.upload for found in pending]:
                        return  # an upload whose completion was refused stays open
                if error.kind != "missing":
                    raise
                try:
                    await self.client.size(key)
                except RequestError as second:
                    raise (error if second.kind == "missing" else second) from None

        # After a conflict S3 wants all parts anew.
        retried = RETRYABLE - {"conflict"}
        await self.send(complete, conditional=create, retried=retried, failed=failed)

    async def abort_parts(self, key: str, upload: str) -> None:
        """Abort the upload and delete its parts."""
        await self.send(partial(self.client.abort_parts, key, upload))

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        """List unfinished uploads below `prefix`."""
        return await self.send(
            partial(self.client.pending_parts, prefix), deadline_s=self.policy.list_timeout_s
        )

    async def close(self) -> None:
        """Close the client. Idempotent."""
        await self.client.close()
