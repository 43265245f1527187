"""Takeover of a root on an object store: the claim, then the list of what it inherits."""

# Rule 1: the listing begins when the claim is there, and nothing is committed under the claim
#   before its list is: stores/objects/claims/counting.py, rule 1.

from __future__ import annotations

from asyncckpt.flow.shield import together
from asyncckpt.format.claim import (
    CLAIM_NBYTES,
    Claim,
    decode_claim,
    encode_claim,
    encode_inherited,
)
from asyncckpt.format.record import STEP_NAME
from asyncckpt.stores.claims import claim_name, inherited_name, lost_error, new_claim
from asyncckpt.stores.objects.context import Context, read_head, read_record
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.gc import NAMES_MAX
from asyncckpt.stores.objects.layout import CONTROL, join

READS = 16
"""Records read at the same time; `Requests` adapts the true number."""


async def take_over(context: Context) -> Claim:
    """Make the next claim, on a store that creates objects conditionally.

    Raises:
        FencedError: another process makes one at the same time, and is faster.
        StoreError: the claim or its list cannot be made.
    """
    requests = context.requests
    seen = await context.claims.seen()
    made = new_claim(1 + max((0, *seen.claims, *seen.lists)))
    key, data = join(CONTROL, claim_name(made.epoch)), encode_claim(made)
    with reported("making a claim", requests.location(key)):
        if not await requests.create(key, data):
            found = await requests.read(key, max_nbytes=CLAIM_NBYTES)
            # Else an earlier try has made it, whose response was lost.
            if found != data:
                raise lost_error(requests.url, made.epoch, decode_claim(found or b""))
    with reported("listing what the claim inherits", requests.url):
        inherited = encode_inherited(made.epoch, await _committed(context))
    key = join(CONTROL, inherited_name(made.epoch))
    with reported("writing what the claim inherits", requests.location(key)):
        # If there is one, an earlier try has made it: no other process has this claim.
        await requests.create(key, inherited)
    await context.claims.check(made.epoch)
    return made


async def _committed(context: Context) -> list[str]:
    """Return the save ids of the records of claimed epochs that count now."""
    listed = await context.requests.list("", recursive=False, limit=NAMES_MAX)
    names = iter([e.key for e in listed if e.is_prefix and STEP_NAME.fullmatch(e.key)])
    found: list[str] = []

    async def look() -> None:
        for name in names:
            identity = await _identity(context, name)
            if identity is not None and identity[1] and await context.claims.counts(*identity):
                found.append(identity[0])

    await together(look() for _ in range(READS))
    return found


async def _identity(context: Context, name: str) -> tuple[str, int] | None:
    """Return save id and epoch of the record; None if there is none."""
    head = await read_head(context, name)
    if head is None:
        return None
    # A list that names too much hides nothing: whether the record is valid, its readers check.
    outline, epoch = context.outline_of(head, head=True), context.epoch_of(head)
    if outline is None or epoch is None:
        record = await read_record(context, name)
        if record is None or record.save_id is None:
            return None
        return record.save_id, record.epoch
    return outline.save_id, epoch
