"""Refusal to save a single checkpoint onto the root of a run.

With a record of its own, the root would be read as that checkpoint, and its steps ignored.
"""

from __future__ import annotations

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.flow.shield import together
from asyncckpt.format.record import STEP_NAME
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.clients.client import RequestError, unless_missing
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import LISTED_MAX, join
from asyncckpt.stores.objects.requests.requests import Requests

STEPS_MAX = 16
"""Newest step names that are checked for a record; failed saves leave a few without one."""

NAMED_STEPS = 3
"""Steps that the error names."""


async def refuse_run(requests: Requests, name: str) -> None:
    """Check that there are no steps below this name, by one request if there are none.

    Passes if the credentials may not list.

    Raises:
        CheckpointExistsError: there are steps.
        StoreError: a request failed.
    """
    location = requests.location(name)
    with reported("looking for steps", location, stage="commit"):
        try:
            listed = await requests.list(name, recursive=False, limit=LISTED_MAX)
        except RequestError as error:
            if error.kind == "forbidden":
                return
            raise
        below = {entry.key.removeprefix(f"{name}/"): entry.is_prefix for entry in listed}
        if RECORD_NAME in below:
            return  # a checkpoint: the creation of the record reports it
        found = (path for path, is_prefix in below.items() if is_prefix)
        newest = sorted(filter(STEP_NAME.fullmatch, found), key=int)[-STEPS_MAX:]
        committed = await together(_is_committed(requests, join(name, step)) for step in newest)
    steps = [step for step, there in zip(newest, committed, strict=True) if there]
    if steps:
        shown = steps[-NAMED_STEPS:]
        raise CheckpointExistsError(
            f"{location}: the root of a run (it has step {', '.join(shown)}) exists here and was "
            f"left untouched; save a step of it with Checkpointer({location!r}), or choose "
            "another location",
            location=location,
            expected="nothing, or a checkpoint",
            found=tuple(shown),
        )


async def _is_committed(requests: Requests, name: str) -> bool:
    with unless_missing():
        await requests.size(join(name, RECORD_NAME))
        return True
    return False
