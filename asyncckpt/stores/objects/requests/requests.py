"""Requests of one object store, with deadlines, retries and hedges."""

# Rule: an abandoned try may still arrive. So a data object gets a new name for every try, all other
#   requests are idempotent, and the caller learns whether an abandoned try may be sending its body.

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from asyncckpt.errors import StoreError
from asyncckpt.stores.objects.clients.client import (
    RETRYABLE,
    Body,
    ClientTraits,
    Listed,
    ObjectClient,
    PendingParts,
    RequestError,
    unless_missing,
)
from asyncckpt.stores.objects.layout import LISTED_MAX
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.requests.sending import Landing, Request, Sender
from asyncckpt.stores.paths import below

T = TypeVar("T")


class Sent(NamedTuple):
    """A stored data object.

    Attributes:
        key: the object that holds the body.
        reusable: whether the body's memory may be reused: no try was cancelled or timed out, so no
            request can still be sending it.
        orphans: keys of other tries that may have landed.
    """

    key: str
    reusable: bool
    orphans: tuple[str, ...]


class Sink(Protocol):
    """Consumer of a range of an object, in order.

    Attributes:
        at: offset in the object of the next byte.
        stop: end of the range.
    """

    at: int
    stop: int

    async def put(self, start: int, pieces: Sequence[Body]) -> None:
        """Take bytes that begin at `start`; skip those before `at`.

        Cancellation: waits until nothing is being copied; `at` then says how much was.
        """


class Requests(Sender):
    """Every request of one store.

    Bound to the event loop of its client. All methods raise `RequestError`, for retryable failures
    after the last try; its `detail` then says how often and how long the request was tried. When a
    cancelled call raises `CancelledError`, all of its requests have ended; its body must not be
    reused.
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
            name: returns the key for request 0, 1, … (retries and hedges), all different.
            body: what to send.
            landing: as in `Request`.
        """
        keys: list[str] = []
        refused: list[str] = []

        async def put(body: Body) -> str:
            keys.append(key := name(len(keys)))
            try:
                await self.client.put(key, body)
            except RequestError as error:
                if error.kind == "throttled":  # so it was not executed
                    refused.append(key)
                raise
            return key

        # The byte budget does not cover the client's copies for a hedge.
        hedged = not self.traits.put_copies
        key, request = await self._send_body(put, body, hedged=hedged, landing=landing)
        landed = tuple(other for other in keys if other != key and other not in refused)
        raced = len(keys) > request.failed + 1
        return Sent(key, not raced and not request.abandoned, landed)

    async def _send_body(
        self,
        put: Callable[[Body], Awaitable[T]],
        body: Body,
        *,
        hedged: bool = False,
        landing: Landing | None = None,
    ) -> tuple[T, Request[T]]:
        """Send a body; forget it at the end, since a kept error may keep the functions."""
        held = [body]
        request = Request(lambda: put(held[0]), "put", len(body), hedged=hedged, landing=landing)
        try:
            return await self.send(request), request
        finally:
            held.clear()

    async def create(
        self,
        key: str,
        body: Body,
        *,
        again: Callable[[], Awaitable[bool]] | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> bool:
        """Create an object; return whether the store said that this call created it.

        False means that an object exists, perhaps from an earlier try whose answer was lost (so
        read it back), or that `again` forbade another try. The tries end with `timeout` once
        another is not `wanted`.
        """
        put = partial(self.client.put, key, body, create=True)
        try:
            await self.send(
                Request(put, "put", len(body), conditional=True, again=again, wanted=wanted)
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
        """Store the body at the key; with `version`, only if the object has this version.

        `again`, `wanted` and `landing` as in `Request`.
        """
        put = partial(self.client.put, key, body)
        if version is not None:
            put = partial(self.client.replace, key, body, version=version)
        await self.send(
            Request(
                put,
                "put",
                len(body),
                conditional=version is not None,
                again=again,
                wanted=wanted,
                landing=landing,
            )
        )

    async def version(self, key: str) -> str:
        """Return the version of the object, as `ObjectClient.version`."""
        return await self.send(Request(partial(self.client.version, key)))

    async def delete_version(self, key: str, version: str) -> None:
        """Delete the object if it has this version; a missing object is no error."""
        delete = partial(self.client.delete_version, key, version=version)
        await self.send(Request(delete, conditional=True))

    async def get(self, key: str, start: int, stop: int) -> Body:
        """Return bytes `start` to `stop` of the object, fewer only if it ends earlier."""
        nbytes = stop - start

        async def read() -> Body:
            body = await self.client.get(key, start, stop)
            if len(body) > nbytes:
                text = f"{nbytes} bytes were requested and {len(body)} arrived"
                raise RequestError("invalid", f"{text}: the store ignores ranges")
            return body

        return await self.send(Request(read, "get", nbytes, hedged=True))

    async def fill(self, key: str, sink: Sink) -> None:
        """Pass the sink's range of the object on as it arrives; less only if the object ends.

        The sink gets every byte once, from the request that has it first, in one call at a time. A
        hedge or retry requests only the bytes that are still missing.
        """
        if self.traits.receive_nbytes is None:
            # The request has ended, so the next one begins while this response is copied.
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
            await self.send(Request(read, "get", nbytes, hedged=True))
        except BaseException:
            # The error of an abandoned thread takes precedence over the cancellation.
            if not failed:
                raise
        if failed:
            error = failed.pop()
            try:
                raise error
            finally:
                del error  # breaks the reference cycle of error and frame

    async def read(self, key: str, *, max_nbytes: int) -> bytes | None:
        """Return the content of a small object, or None if it is longer than `max_nbytes`."""
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
        return await self.send(Request(partial(self.client.size, key)))

    async def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        with unless_missing():
            await self.size(key)
            return True
        return False

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        """List the entries below `prefix`, as `ObjectClient.list`."""
        call = partial(self.client.list, prefix, recursive=recursive, limit=limit)
        return await self.send(Request(call, deadline_s=self.policy.list_timeout_s))

    async def list_all(self, prefix: str, *, recursive: bool) -> Sequence[Listed]:
        """List all entries below `prefix`; a list that was cut off might lack a claim.

        Raises `RequestError`, and `StoreError` if there are too many.
        """
        listed = await self.list(prefix, recursive=recursive, limit=LISTED_MAX)
        if len(listed) > LISTED_MAX:
            location = self.location(prefix)
            raise StoreError(
                f"{location}: more than {LISTED_MAX} names; checkpoints need a prefix of their "
                "own: remove the objects of other programs, or choose another root",
                location=location,
                expected=LISTED_MAX,
            )
        return listed

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects; missing ones are no error.

        If the store throttles, tries continue as long as the number of remaining keys shrinks.
        """
        left = tuple(keys)

        async def delete() -> None:
            nonlocal left
            try:
                await self.client.delete(left)
            except RequestError as error:
                # Some stores count the deletion of a missing object as a change, so delete only
                # the remaining keys.
                left = left if error.left is None else tuple(error.left)
                raise

        while left:
            before = len(left)
            try:
                deadline_s = self.policy.timeout_s + before * self.policy.per_key_s
                return await self.send(Request(delete, deadline_s=deadline_s))
            except RequestError as error:
                if not error.retryable or len(left) == before:
                    raise

    async def begin_parts(self, key: str, *, create: bool = False) -> tuple[str, bool]:
        """Begin a multipart upload; return its id, and whether there may be a second upload.

        A try whose answer was lost may have begun one, which `pending_parts` lists. With `create`
        the object must be new, as in `complete_parts`.
        """
        begin = partial(self.client.begin_parts, key, create=create)
        request = Request(begin, conditional=create)
        return await self.send(request), request.failed > 0

    async def put_part(
        self, key: str, upload: str, number: int, offset: int, body: Body
    ) -> tuple[str, bool]:
        """Store part `number`; return its tag, and whether the body's memory may be reused."""
        put = partial(self.client.put_part, key, upload, number, offset)
        tag, request = await self._send_body(put, body)
        return tag, not request.abandoned

    async def complete_parts(
        self, key: str, upload: str, tags: Sequence[str], *, create: bool = False
    ) -> None:
        """Make the object from the parts with these tags, in order; with `create` it must be new.

        If an answer was lost and the next try finds no such upload, checks for the object instead.
        """
        tried = 0

        async def complete() -> None:
            nonlocal tried
            tried += 1
            try:
                await self.client.complete_parts(key, upload, tags, create=create)
            except RequestError as error:
                if tried == 1:
                    raise
                if create and error.kind == "exists":
                    pending = await self.client.pending_parts(key.rpartition("/")[0])
                    # An upload whose completion was refused stays open. Where uploads cannot be
                    # listed (GCS), the retry of a completion that had succeeded is not refused.
                    if pending is not None and upload not in [found.upload for found in pending]:
                        return
                if error.kind != "missing":
                    raise
                try:
                    await self.client.size(key)
                except RequestError as second:
                    raise (error if second.kind == "missing" else second) from None

        # After a conflict, S3 requires all parts to be sent again.
        retried = RETRYABLE - {"conflict"}
        await self.send(Request(complete, conditional=create, retried=retried))

    async def abort_parts(self, key: str, upload: str) -> None:
        """Abort the upload and delete its parts."""
        await self.send(Request(partial(self.client.abort_parts, key, upload)))

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts] | None:
        """List unfinished uploads below `prefix`; None if the client cannot."""
        call = partial(self.client.pending_parts, prefix)
        return await self.send(Request(call, deadline_s=self.policy.list_timeout_s))

    async def close(self) -> None:
        """Close the client. Idempotent."""
        await self.client.close()
