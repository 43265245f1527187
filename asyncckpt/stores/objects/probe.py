"""Whether a store really creates objects conditionally: tried once, on an object of our own.

Some servers take the header of a conditional PUT and overwrite all the same. Two writers of one
step would then both be told that they have won.
"""

from __future__ import annotations

import asyncio
import logging

from asyncckpt.stores.objects.client import RequestError
from asyncckpt.stores.objects.layout import probe_key
from asyncckpt.stores.objects.requests import Requests

log = logging.getLogger("asyncckpt.stores")


REMOVE_S = 120.0
"""How long the removal of a probe may take: one that stays behind harms nobody."""

WRITE_SPACING_S = 1.1
"""Google's store takes one write of an object per second."""


async def creates_conditionally(requests: Requests, *, spacing_s: float = 0.0) -> bool:
    """Whether the second of two conditional creations was refused; leaves nothing.

    Args:
        requests: of the store.
        spacing_s: seconds between two writes of one object, where a store wants them.

    Raises:
        RequestError: the store does not answer, or allows no writing; nothing is known.
    """
    key = probe_key()
    answers = requests.answers
    try:
        # "exists" to the first one is an answer too: an earlier try of it was refused nothing.
        refused = not await requests.create(key, b"1") or await _is_refused(
            requests, key, spacing_s
        )
    except RequestError as error:
        if error.kind != "invalid":
            raise
        refused = False
    finally:
        try:
            async with asyncio.timeout(requests.clean_up_s(REMOVE_S, answers=answers)):
                await _remove(requests, key, spacing_s)
        except (TimeoutError, RequestError) as error:
            log.debug("%s stays behind: %r", requests.location(key), error)
    if not refused:
        log.warning(
            "%s: %s says that it creates objects conditionally, and this server does not: if two "
            "processes save one step at the same time, both will believe to have committed it, "
            "and the later one has. Let only one process save a step",
            requests.url,
            requests.traits.name,
        )
    return refused


# Straight through the client at first: that a store takes one write of an object per second says
# nothing about how many requests it takes.


async def _is_refused(requests: Requests, key: str, spacing_s: float) -> bool:
    try:
        async with asyncio.timeout(requests.policy.timeout_s):
            await requests.client.put(key, b"2", create=True)
    except (TimeoutError, RequestError) as error:
        if isinstance(error, RequestError) and error.kind in ("exists", "invalid"):
            return error.kind == "exists"
        await asyncio.sleep(spacing_s)
        return not await requests.create(key, b"2")
    return False


async def _remove(requests: Requests, key: str, spacing_s: float) -> None:
    try:
        async with asyncio.timeout(requests.policy.timeout_s):
            await requests.client.delete([key])
    except (TimeoutError, RequestError):
        await asyncio.sleep(spacing_s)
        await requests.delete([key])
