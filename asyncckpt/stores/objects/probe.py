"""Probes of conditional requests, made once per process on an object of our own.

Some servers ignore the condition of a request and execute it. Two writers of one step would then
both be told that they have won.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asyncckpt.flow.background import BackgroundTask
from asyncckpt.log import logger
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import probe_key
from asyncckpt.stores.objects.requests.requests import Requests

REMOVE_S = 120.0
"""Time limit for the removal of a probe's object, which is harmless if it stays."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditional requests that a store and its client honour.

    Attributes:
        create: exactly one of several creations of an object succeeds.
        replace: an object is replaced only if it has the expected version.
        delete: an object is deleted only if it has the expected version.
    """

    create: bool
    replace: bool = False
    delete: bool = False


class Probes:
    """The probes of one store, each made once, when it is first needed.

    Google's store accepts one write of an object per second: `Requests` tries again, and lowers no
    limit because of that.

    Attributes:
        may_delete: the store has not refused to delete an object of a probe.
    """

    def __init__(self, requests: Requests) -> None:
        self.may_delete = True
        self._requests = requests
        self._creates: BackgroundTask[bool] | None = None
        self._versions: tuple[bool, bool] | None = None
        self._lock = asyncio.Lock()

    def begin(self) -> BackgroundTask[bool]:
        """Return the probe of conditional creation, which runs in the background from now on."""
        if self._creates is None:
            self._creates = BackgroundTask(self._probe_create())
        return self._creates

    async def conditions(self, *, create: bool = True, versions: bool) -> Conditions:
        """Return which of the requested kinds of conditions work.

        Raises:
            StoreError: a probe failed.
        """
        creates, url = False, self._requests.url
        async with self._lock:
            with reported("finding out which conditions it obeys", url, stage="commit"):
                if create:
                    try:
                        creates = await self.begin().result()
                    except RequestError:  # try again; a second error is raised
                        self._creates = None
                        creates = await self.begin().result()
                if versions and self._versions is None:
                    self._versions = await self._probe_versions()
        return Conditions(creates, *(self._versions or (False, False)))

    async def close(self) -> None:
        """End the background probe."""
        creates, self._creates = self._creates, None
        if creates is not None:
            await creates.stop()

    async def _probe_create(self) -> bool:
        """Return whether the second of two conditional creations is refused. Leaves nothing.

        Warns if not, or if the client makes none.

        Raises:
            RequestError: the store does not answer or does not allow writing; nothing is known.
        """
        requests, name = self._requests, self._requests.traits.name
        if not requests.traits.conditional_create:
            self._warn(f"{name} cannot create objects conditionally")
            return False
        async with self._object() as key:
            # The first creation may be refused, too, because of what an earlier try created.
            try:
                refused = not (
                    await requests.create(key, b"1") and await requests.create(key, b"2")
                )
            except RequestError as error:
                if error.kind != "invalid":
                    raise
                await requests.replace(key, b"1")  # its error, if the condition is not the reason
                refused = False
        if not refused:
            self._warn(f"{name} supports conditional creation, but this server does not")
        return refused

    def _warn(self, why: str) -> None:
        logger.warning(
            "%s: %s: if two processes save one step at the same time, both report success, and the "
            "later one replaces the earlier. Let only one process save a step",
            self._requests.url,
            why,
        )

    async def _probe_versions(self) -> tuple[bool, bool]:
        """Return whether replacement and deletion refuse stale versions.

        Leaves nothing. Raises as `_probe_create`.
        """
        requests, traits = self._requests, self._requests.traits
        if not (traits.conditional_replace or traits.conditional_delete):
            return False, False
        replaces, deletes = traits.conditional_replace, False
        async with self._object() as key:
            await requests.replace(key, b"1")
            stale = await requests.version(key)
            if replaces:
                try:
                    await requests.replace(key, b"2", version=stale)
                except RequestError as error:
                    # "exists": an earlier try may have replaced it, which the version tells.
                    replaces = error.kind == "exists" and await requests.version(key) != stale
                replaces = replaces and await _is_stale(requests.replace(key, b"3", version=stale))
            else:
                await requests.replace(key, b"2")
            if traits.conditional_delete:  # if it is forbidden, it may be allowed later
                deletes = await _is_stale(requests.delete_version(key, stale))
        return replaces, deletes

    @asynccontextmanager
    async def _object(self) -> AsyncIterator[str]:
        """Yield the key of a probe, and remove its object at the end."""
        key = probe_key()
        try:
            yield key
        finally:
            try:
                async with self._requests.cleaning_up(REMOVE_S):
                    await self._requests.delete([key])
            except (TimeoutError, RequestError) as error:
                self.may_delete &= getattr(error, "kind", None) != "forbidden"
                logger.debug("%s is left behind: %r", self._requests.location(key), error)


async def _is_stale(request: Awaitable[None]) -> bool:
    """Return whether a request with a stale version was refused, because of it or as forbidden."""
    try:
        await request
    except RequestError as error:
        if error.kind in ("exists", "forbidden", "invalid"):
            return error.kind != "invalid"
        raise
    return False
