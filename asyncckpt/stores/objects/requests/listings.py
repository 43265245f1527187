"""Complete listings of a root: one that is cut off raises, since it might lack a claim."""

from __future__ import annotations

from asyncckpt.errors import StoreError
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.clients.client import Listed
from asyncckpt.stores.objects.layout import LISTED_MAX
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.paths import CONTROL


async def checkpoint_names(requests: Requests) -> list[str]:
    """Return the prefixes below the root, in no order, including those of open attempts.

    Includes `RECORD_NAME` if the root is itself a checkpoint. Raises `RequestError`, and
    `StoreError` if there are too many.
    """
    listed = await _complete(requests, "", recursive=False)
    return [
        entry.key
        for entry in listed
        if entry.key == RECORD_NAME or (entry.is_prefix and entry.key not in ("", CONTROL))
    ]


async def control_entries(requests: Requests) -> list[Listed]:
    """Return every object below the control prefix. Raises as `checkpoint_names`."""
    return await _complete(requests, CONTROL, recursive=True)


async def _complete(requests: Requests, prefix: str, *, recursive: bool) -> list[Listed]:
    listed = await requests.list(prefix, recursive=recursive, limit=LISTED_MAX)
    if len(listed) > LISTED_MAX:
        location = requests.location(prefix)
        raise StoreError(
            f"{location}: more than {LISTED_MAX} names; checkpoints need a prefix of their own: "
            "remove the objects of other programs, or choose another root",
            location=location,
            expected=LISTED_MAX,
        )
    return listed
