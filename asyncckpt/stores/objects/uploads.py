"""What an attempt has sent: objects under names of its own, and multipart uploads."""

# Rule 1: from the moment that an upload may have begun until it was completed or aborted, the
#   attempt knows of it, also when its id was lost with the answer.
# Rule 2: every key that a request was made for is noted before the request is made.

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Collection
from dataclasses import dataclass, field

from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.stores.objects.client import Body, RequestError
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.failures import store_error
from asyncckpt.stores.objects.layout import retried
from asyncckpt.stores.objects.requests import Requests


@dataclass(slots=True, eq=False)
class Sending:
    """What an attempt knows of everything that it has sent.

    Attributes:
        context: of the store.
        prefix: key of the checkpoint.
        keys: every object that may exist because of this attempt.
        orphans: those of them that no file of it refers to.
        uploads: multipart uploads that may be open.
        sent_in_parts: keys of all uploads, of those too that were completed.
        error: the first failure; the attempt cannot be continued.
        ended: nothing more is sent.
        exclusive: nobody else writes these names, so that what is there and long enough is ours.
    """

    context: Context
    prefix: str
    keys: set[str] = field(default_factory=set)
    orphans: set[str] = field(default_factory=set)
    uploads: list[Upload] = field(default_factory=list)
    sent_in_parts: set[str] = field(default_factory=set)
    error: AsyncCheckpointError | None = None
    ended: bool = False
    exclusive: bool = True

    @property
    def location(self) -> str:
        """URL of the checkpoint."""
        return self.context.requests.location(self.prefix)

    def check(self) -> None:
        """The attempt can be continued.

        Raises:
            AsyncCheckpointError: the first failure, or `UsageError` where it has ended.
        """
        if self.error is not None:
            raise self.error
        if self.ended:
            raise UsageError(f"{self.location}: this attempt has ended", location=self.location)

    def failed(self, action: str, key: str, error: RequestError) -> AsyncCheckpointError:
        """The error to raise; every further call raises one like the first."""
        location = self.context.requests.location(key)
        # Not the same one: with its traceback it would keep the body of the request alive.
        self.error = self.error or store_error(action, location, error, stage="upload")
        return store_error(action, location, error, stage="upload")

    def key(self, path: str) -> str:
        """The key of a path of the checkpoint."""
        return f"{self.prefix}/{path}"

    def relative(self, key: str) -> str:
        """The path of a key in the checkpoint."""
        return key.removeprefix(f"{self.prefix}/")

    async def send(self, key: str, body: Body) -> tuple[str, bool]:
        """The object is stored; returns the key that it got, and whether nobody reads `body`."""

        def name(attempt: int) -> str:
            this = retried(key, attempt)
            self.keys.add(this)
            return this

        try:
            sent = await self.context.requests.put(name, body)
        except RequestError as error:
            raise self.failed(f"writing {len(body)} bytes", key, error) from error
        self.orphans.update(sent.orphans)
        return sent.key, sent.reusable

    async def send_named(self, key: str, body: Body) -> None:
        """The object is stored under just this key. The body is not changed ever after.

        Whatever an earlier try still sends is then the same.
        """
        self.keys.add(key)
        try:
            await self.context.requests.replace(key, body)
        except RequestError as error:
            raise self.failed(f"writing {len(body)} bytes", key, error) from error


class Upload:
    """One multipart upload, begun when its first part is sent."""

    def __init__(self, sending: Sending, key: str) -> None:
        self.key = key
        self._sending = sending
        self._requests = sending.context.requests
        self._lock = asyncio.Lock()
        self._id: str | None = None
        self._tags: dict[int, str] = {}
        self._turn = asyncio.Condition()
        sending.uploads.append(self)

    def __repr__(self) -> str:
        return f"Upload({self._requests.location(self.key)!r}, {len(self._tags)} parts)"

    async def send(self, number: int, offset: int, body: Body) -> bool:
        """Part `number` is stored; whether nobody reads `body` any more.

        Raises:
            StoreError: names the object and the offset.
        """
        try:
            upload = await self._begun()
            if self._requests.traits.parallel_parts:
                tag, reusable = await self._requests.put_part(
                    self.key, upload, number, offset, body
                )
            else:
                async with self._turn:
                    # Windows are written in the order of the plan, so that the next part is
                    # always among those that are on their way.
                    await self._turn.wait_for(lambda: len(self._tags) == number)
                    tag, reusable = await self._requests.put_part(
                        self.key, upload, number, offset, body
                    )
                    self._tags[number] = tag
                    self._turn.notify_all()
        except RequestError as error:
            raise self._sending.failed(
                f"writing {len(body)} bytes at offset {offset}", self.key, error
            ) from error
        self._tags[number] = tag
        return reusable

    async def _begun(self) -> str:
        async with self._lock:
            if self._id is None:
                self._sending.check()
                self._sending.sent_in_parts.add(self.key)
                self._id = await self._requests.begin_parts(self.key)
        return self._id

    @property
    def parts(self) -> int:
        """How many parts are stored."""
        return len(self._tags)

    async def complete(self, nbytes: int) -> None:
        """The object consists of the parts in order and is `nbytes` long, durably.

        Raises:
            StoreError: names the object.
        """
        assert self._id is not None
        self._sending.keys.add(self.key)
        tags = [self._tags[number] for number in sorted(self._tags)]
        try:
            await self._requests.complete_parts(self.key, self._id, tags)
        except RequestError as error:
            # Nobody else writes this name: what is there and long enough is what was completed.
            if not (self._sending.exclusive and await self._is_there(nbytes)):
                raise self._sending.failed("completing the upload", self.key, error) from error
        self._sending.uploads.remove(self)

    async def _is_there(self, nbytes: int) -> bool:
        try:
            return await self._requests.size(self.key) == nbytes
        except RequestError:
            return False

    async def abort(self) -> None:
        """The upload is gone, if its id is known; `RequestError` where that failed."""
        if self._id is not None:
            await self._requests.abort_parts(self.key, self._id)


async def abort_uploads(sending: Sending) -> None:
    """No upload of the attempt is open; one whose abort is refused keeps no other one open.

    Raises:
        RequestError: the first that could not be aborted, though it may be gone by now.
    """
    failed: list[RequestError] = []
    try:
        for upload in sending.uploads:
            try:
                await upload.abort()
            except RequestError as error:
                failed.append(error)
        await abort_pending(sending.context.requests, sending.sent_in_parts)
        if failed:
            raise failed[0]
    finally:
        failed.clear()  # a cycle of error and frame would stay until it is collected


async def abort_pending(requests: Requests, keys: Collection[str]) -> None:
    """No upload to one of these keys is open, also none whose id was lost with its answer.

    Raises:
        RequestError: they could not be listed or aborted.
    """
    for prefix in sorted({posixpath.dirname(key) for key in keys}):
        for pending in await requests.pending_parts(prefix):
            if pending.key in keys:
                await requests.abort_parts(pending.key, pending.upload)
