"""Takeover of a root on an object store: the claim, then its list of inherited checkpoints."""

# Rule 1: the listing begins once the claim exists, and nothing is committed under the claim before
#   its list exists: stores/objects/claims/counting.py, rule 1.

from __future__ import annotations

from asyncckpt.flow.shield import mapped
from asyncckpt.format.claim import CLAIM_NBYTES, Claim, decode_claim, encode_claim, encode_inherited
from asyncckpt.format.record import STEP_NAME
from asyncckpt.stores.claims import claim_name, inherited_name, lost_error, new_claim
from asyncckpt.stores.objects.context import Context, Record
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.objects.requests.listings import checkpoint_names
from asyncckpt.stores.paths import CONTROL

READS = 16
"""Records read concurrently; `Requests` adapts the actual number."""


async def take_over(context: Context) -> Claim:
    """Make the next claim, on a store that creates objects conditionally.

    Raises:
        FencedError: another process made it first.
        StoreError: the claim or its list could not be written.
    """
    requests = context.requests
    seen = await context.claims.seen()
    made = new_claim(1 + max((0, *seen.claims, *seen.lists)))
    key, data = join(CONTROL, claim_name(made.epoch)), encode_claim(made)
    with reported("making a claim", requests.location(key)):
        if not await requests.create(key, data):
            found = await requests.read(key, max_nbytes=CLAIM_NBYTES)
            if found != data:  # else an earlier try made it, and its response was lost
                raise lost_error(requests.url, made.epoch, decode_claim(found or b""))
    with reported("listing what the claim inherits", requests.url):
        inherited = encode_inherited(made.epoch, await _committed(context))
    key = join(CONTROL, inherited_name(made.epoch))
    with reported("writing what the claim inherits", requests.location(key)):
        # An existing one is from an earlier try: no other process has this claim.
        await requests.create(key, inherited)
    await context.claims.check(made.epoch)
    return made


async def _committed(context: Context) -> list[str]:
    """Return the save ids of the records of claimed epochs that count now."""

    async def look(name: str) -> str | None:
        record = await _record(context, name)
        if record is None or not record.epoch or not await context.counts(record):
            return None
        return record.save_id

    steps = list(filter(STEP_NAME.fullmatch, await checkpoint_names(context.requests)))
    return [save_id for save_id in await mapped(look, steps, READS) if save_id is not None]


async def _record(context: Context, name: str) -> Record | None:
    """Return the record, from its unchecked head if possible."""
    head = await context.read_head(name)
    if head is None:
        return None
    # A list may name too many records: readers check whether a record is valid.
    outline, epoch = context.outline_of(head, head=True), context.epoch_of(head)
    if outline is None or epoch is None:
        return await context.read_record(name)
    return Record(head, outline.save_id, epoch)
