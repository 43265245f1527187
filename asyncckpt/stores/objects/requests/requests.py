"""The requests of one store, by what is true after them."""

# Rule: a try that was given up may still arrive. So a data object gets another name for every try,
#   everything else is idempotent, and a body that a given-up try was sending is reported.

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from asyncckpt.flow.climb import Climb
from asyncckpt.flow.hedge import HedgeBudget
from asyncckpt.flow.limiter import Limiter
from asyncckpt.flow.link import Direction, Link
from asyncckpt.planning.sizes import PartRules, Traffic
from asyncckpt.stores.objects.client import (
    RETRYABLE,
    Body,
    ClientTraits,
    Listed,
    ObjectClient,
    PendingParts,
    RequestError,
)
from asyncckpt.stores.objects.policy import HASTY, RequestPolicy
from asyncckpt.stores.objects.sending import Sender, Try

__all__ = ["HASTY", "RequestPolicy", "Requests", "Sent"]


SILENT_S = 5.0
"""What cleaning up gets at most on a store that has not answered since: it hardly holds anything,
and whoever gave a save a deadline does not wait for minutes."""


class Sent(NamedTuple):
    """A data object is stored.

    Attributes:
        key: the object that holds the body.
        reusable: nobody can still be sending the body: no try of it was cancelled or timed out.
        orphans: names of earlier tries that may have landed.
    """

    key: str
    reusable: bool
    orphans: tuple[str, ...]


# `Requests.list` hides the type in its class.
Keys = list[str]
Tried = list[Try]
Listing = list[Listed]


class Requests:
    """Every request of one store.

    It belongs to the event loop of its client. All methods raise `RequestError`, after the last
    try where trying again could help; its `detail` then says how often and how long it was tried.
    A cancelled call has ended all of its requests when `CancelledError` is raised; its body must
    not be used again.

    Attributes:
        client: whose requests these are.
        traits: of the client.
        url: of the client.
        link: latency and bandwidth as measured.
        limiter: the window of requests in flight, which the server's refusals cut.
        hedges: how many second transfers were made, either way.
    """

    def __init__(
        self,
        client: ObjectClient,
        *,
        policy: RequestPolicy | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.client = client
        self._sender = sender = Sender(
            client.url, policy or RequestPolicy(), random.Random() if rng is None else rng
        )
        self.link: Link = sender.link
        self.limiter: Limiter = sender.limiter
        self.hedges: Mapping[Direction, HedgeBudget] = sender.hedges
        self.policy = policy or RequestPolicy()

    def __repr__(self) -> str:
        return f"Requests({self.url!r}, {self.limiter!r}, {self.link!r})"

    @property
    def traits(self) -> ClientTraits:
        """What the client can do."""
        return self.client.traits

    @property
    def url(self) -> str:
        """Of the client."""
        return self.client.url

    @property
    def answers(self) -> int:
        """How many requests were answered so far, in whatever way."""
        return self._sender.answers

    def clean_up_s(self, usual_s: float, *, answers: int) -> float:
        """Seconds for cleaning up after what began when there had been so many answers."""
        return min(usual_s, SILENT_S) if self.answers == answers else usual_s

    @property
    def part_rules(self) -> PartRules:
        """Of the client's multipart uploads, as `choose` wants to know them."""
        traits = self.traits
        return PartRules(
            parallel=traits.multipart and traits.parallel_parts,
            min_nbytes=traits.part_min_nbytes,
            multiple_nbytes=traits.part_multiple_nbytes,
            max_nbytes=traits.part_max_nbytes,
            max_count=traits.part_max_count,
        )

    def location(self, key: str) -> str:
        """The URL of an object, for errors."""
        return f"{self.url}/{key}" if key else self.url

    def climb(self, direction: Direction) -> Climb:
        """How many transfers this way are worth while, as measured."""
        return self._sender.climb(direction)

    def traffic(self, direction: Direction, *, streams: int | None = None) -> Traffic:
        """What is known of the link this way; with `streams`, for so many and no others."""
        stream, climb = self.link.toward(direction), self.climb(direction)
        return Traffic(
            stream.latency_s,
            stream.nbytes_per_s,
            climb.full_nbytes_per_s,
            climb.room if streams is None else streams,
        )

    def fix_streams(self, direction: Direction, streams: int | None) -> None:
        """So many transfers this way may be in flight; None finds out again how many."""
        self._sender.fix_streams(direction, streams)

    async def put(self, name: Callable[[int], str], body: Body) -> Sent:
        """The body is stored in a data object.

        Args:
            name: the key for request 0, 1, …: never the same twice. A slow request is raced by a
                second one.
            body: what to send.
        """
        failed: Tried = []
        keys: Keys = []
        refused: Keys = []
        held, nbytes = [body], len(body)
        del body

        async def put(_: int) -> str:
            keys.append(key := name(len(keys)))
            try:
                await self.client.put(key, held[0])
            except RequestError as error:
                # A request that was refused for its rate was not carried out.
                if error.kind == "throttled":
                    refused.append(key)
                raise
            return key

        async def send(this: Try) -> str:
            if self.traits.put_copies:
                # The copies of a second request are in nobody's budget.
                return await self._sender.transfer(this, "put", nbytes, partial(put, 0))
            return await self._sender.raced(this, "put", nbytes, put)

        try:
            key = await self._sender.tried(send, nbytes=nbytes, failed=failed)
        finally:
            held.clear()  # an error keeps these functions, also when its frames were cleared
        landed = tuple(other for other in keys if other != key and other not in refused)
        raced = len(keys) > len(failed) + 1
        return Sent(key, not raced and not any(this.abandoned for this in failed), landed)

    async def create(self, key: str, body: Body) -> bool:
        """The object is there; whether it was created by this call's own answer.

        False: something was there already, which may be what an earlier try of this call has
        left: the caller reads it back.
        """
        put = partial(self.client.put, key, body, create=True)
        try:
            await self._sender.tried(
                lambda this: self._sender.transfer(this, "put", len(body), put),
                nbytes=len(body),
                retried=RETRYABLE,
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
        again: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """The object is exactly the body, whatever was there before.

        Args:
            key: of the object.
            body: what it will be.
            again: asked before every try but the first; where it says no, `exists` is raised.
        """
        put = partial(self.client.put, key, body)
        failed: Tried = []

        async def send(this: Try) -> None:
            if failed and again is not None and not await again():
                raise RequestError("exists", "something else stands there since the last try")
            await self._sender.transfer(this, "put", len(body), put)

        await self._sender.tried(send, nbytes=len(body), failed=failed)

    async def get(self, key: str, start: int, stop: int) -> Body:
        """Bytes `start` to `stop` of the object, fewer only where it ends before."""
        nbytes = stop - start

        async def read() -> Body:
            body = await self.client.get(key, start, stop)
            if len(body) > nbytes:
                raise RequestError("invalid", f"{nbytes} bytes were asked for and {len(body)} came")
            return body

        return await self._sender.tried(
            lambda this: self._sender.raced(this, "get", nbytes, lambda _: read()), nbytes=nbytes
        )

    async def read(self, key: str, *, max_nbytes: int) -> bytes | None:
        """The whole of a small object; None if it is longer than `max_nbytes`."""
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
        """Length of the object in bytes."""
        return await self._sender.asked(lambda: self.client.size(key))

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> Listing:
        """What stands below `prefix`, as `ObjectClient.list` says."""
        return await self._sender.asked(
            lambda: self.client.list(prefix, recursive=recursive, limit=limit),
            deadline_s=self.policy.list_timeout_s,
        )

    async def delete(self, keys: Sequence[str]) -> None:
        """None of the objects is there."""
        left = tuple(keys)

        async def delete() -> None:
            nonlocal left
            try:
                await self.client.delete(left)
            except RequestError as error:
                # What is gone is not deleted again: some stores count that as a change, too.
                left = left if error.left is None else tuple(error.left)
                raise

        if left:
            await self._sender.asked(
                delete, deadline_s=self.policy.timeout_s + len(left) * self.policy.per_key_s
            )

    async def begin_parts(self, key: str) -> str:
        """A multipart upload is open; returns its id.

        A try whose answer was lost may have opened another one, which `pending_parts` shows.
        """
        return await self._sender.asked(lambda: self.client.begin_parts(key))

    async def put_part(
        self, key: str, upload: str, number: int, offset: int, body: Body
    ) -> tuple[str, bool]:
        """Part `number` is stored; returns its tag, and whether nobody sends the body any more."""
        failed: Tried = []
        held, nbytes = [body], len(body)
        del body

        async def put() -> str:
            return await self.client.put_part(key, upload, number, offset, held[0])

        try:
            tag = await self._sender.tried(
                lambda this: self._sender.transfer(this, "put", nbytes, put),
                nbytes=nbytes,
                failed=failed,
            )
        finally:
            held.clear()  # as in `put`
        return tag, not any(this.abandoned for this in failed)

    async def complete_parts(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """The object consists of the parts with these tags, in order.

        Where a lost answer has made the upload unknown to the next try, the object tells.
        """

        async def complete(number: int) -> None:
            try:
                await self.client.complete_parts(key, upload, tags)
            except RequestError as error:
                if error.kind != "missing" or number == 0:
                    raise
                try:
                    await self.client.size(key)
                except RequestError as second:
                    raise (error if second.kind == "missing" else second) from None

        await self._sender.tried(
            lambda this: self._sender.bounded(this, lambda: complete(this.number))
        )

    async def abort_parts(self, key: str, upload: str) -> None:
        """The upload and its parts are gone."""
        await self._sender.asked(lambda: self.client.abort_parts(key, upload))

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        """Uploads below `prefix` that nobody ended."""
        return await self._sender.asked(
            lambda: self.client.pending_parts(prefix), deadline_s=self.policy.list_timeout_s
        )

    async def close(self) -> None:
        """The client is closed. Idempotent."""
        await self.client.close()
