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
    try:
        # "exists" to the first one is an answer too: an earlier try of it was refused nothing.
        refused = not await requests.create(key, b"1")
        if not refused:
            await asyncio.sleep(spacing_s)
            refused = not await requests.create(key, b"2")
    except RequestError as error:
        if error.kind != "invalid":
            raise
        refused = False
    finally:
        try:
            await requests.delete([key])
        except RequestError as error:
            log.debug("%s stays behind: %s", requests.location(key), error)
    if not refused:
        log.warning(
            "%s: %s says that it creates objects conditionally, and this server does not: if two "
            "processes save one step at the same time, both will believe to have committed it, "
            "and the later one has. Let only one process save a step",
            requests.url,
            requests.traits.name,
        )
    return refused
