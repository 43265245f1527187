"""Garbage collection: removal of leftovers of saves that will never finish.

The following are removed if they are older, by the store's own clock, than the caller's limit (at
least a week):

- objects below a checkpoint that carry the save id of an attempt that no valid record commits;
- objects that processes of an attempt exchanged, even if its record is valid;
- data objects with the save id of a valid record that does not list them: the loser of a race, or
  an earlier try;
- probes (`.asyncckpt/probe-…`), and the last error of a process (`.asyncckpt/error-…`);
- records that do not count because their writer was fenced, with their objects, if the store has
  conditional deletion;
- the lists of all claims but the highest one.

Multipart uploads stay: only exports begin them, to names that may be foreign.
"""

# Rule 1: everything else is foreign. A prefix whose record is damaged or of a newer release is left
#   untouched.
# Rule 2: no attempt publishes once it is half as old, so no live one needs these objects. Ages
#   count from when an object was written, which is after its attempt began.
# Rule 3: ages are differences of the store's own times; "now" is the time of an object just
#   written.
# Rule 4: the record is read after the listing and before the deletion.
# Rule 5: claims stay: stores/objects/counting.py, rule 7.

from __future__ import annotations

from collections.abc import Sequence

from asyncckpt.format.record_values import Outline
from asyncckpt.log import logger
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.claims import inherited_name
from asyncckpt.stores.objects.clients.client import Listed, RequestError
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.layout import (
    LISTED_MAX,
    is_exchange,
    is_fixed,
    is_note,
    is_probe,
    join,
    owner,
    probe_key,
)
from asyncckpt.stores.objects.remove import delete_record, read_version
from asyncckpt.stores.paths import CONTROL

KEYS_PER_DELETION = 1000
"""Keys per deletion request of S3; the record is read again before each."""


async def remove_garbage(context: Context, older_than_s: float, *, dry_run: bool) -> list[str]:
    """Remove leftovers older than `older_than_s`, unless `dry_run`; return their keys, sorted.

    Raises:
        RequestError, StoreError: a request failed, or listings have no times or are too long;
            earlier removals are not undone.
    """
    requests = context.requests
    lists = (await context.claims.seen()).lists
    deletes = bool(lists) and (await context.probes.conditions(create=False, versions=True)).delete
    listed, now_s = await _list_control(context)
    before_s = now_s - older_than_s
    # Only the highest list decides.
    unused = {join(CONTROL, inherited_name(epoch)) for epoch in lists[:-1]}
    removed = [
        entry.key
        for entry in listed
        if (is_probe(entry.key) or is_note(entry.key) or entry.key in unused)
        and _is_older(entry, before_s)
    ]
    if not dry_run:
        await requests.delete(removed)
    for name in await context.checkpoint_names():
        removed += await _checkpoint(context, name, before_s, deletes=deletes, dry_run=dry_run)
    return sorted(removed)


async def _checkpoint(
    context: Context, name: str, before_s: float, *, deletes: bool, dry_run: bool
) -> list[str]:
    """Remove a record that does not count, and objects to which no record refers."""
    requests, location = context.requests, context.requests.location(name)
    # The version is read before the listing, so a later record stays.
    record, version = await read_version(context, name, wanted=True) if deletes else (None, None)
    listed = await requests.list(name, recursive=True, limit=LISTED_MAX)
    if len(listed) > LISTED_MAX:
        logger.warning(
            "%s: skipped: more than %d objects, so not a checkpoint", location, LISTED_MAX
        )
        return []
    removed: list[str] = []
    old = [entry.key.removeprefix(f"{name}/") for entry in listed if _is_older(entry, before_s)]
    fenced = record is not None and RECORD_NAME in old and not await context.counts(record)
    if fenced and (dry_run or await delete_record(context, name, version)):
        removed.append(RECORD_NAME)
    ours = [path for path in old if owner(path) is not None]
    for first in range(0, len(ours), KEYS_PER_DELETION):
        record = await context.read_record(name)
        if record is not None and record.save_id is None:
            logger.warning(
                "%s: its commit record is damaged or of a newer release; nothing was removed",
                location,
            )
            break
        if record is not None and fenced and not await context.counts(record):
            record = None
        outline = await context.outline(record)
        some = ours[first : first + KEYS_PER_DELETION]
        dead = [path for path in some if _is_dead(path, outline)]
        if not dry_run:
            await context.delete_paths(name, dead)
        removed += dead
    return [join(name, path) for path in removed]


def _is_dead(path: str, outline: Outline) -> bool:
    """Return whether this object of an attempt is garbage, given the outline of the record."""
    if owner(path) != outline.save_id or is_exchange(path):
        return True
    # The outline of a newer release's record has no paths.
    return bool(outline.paths) and path not in outline.paths and not is_fixed(path)


async def _list_control(context: Context) -> tuple[Sequence[Listed], float]:
    """List the control prefix; also return seconds since 1970 by the store's clock."""
    requests, key = context.requests, probe_key()
    await requests.replace(key, b"")
    try:
        listed = await requests.list_all(CONTROL, recursive=True)
    finally:
        await requests.delete([key])
    now_s = next((entry.modified_s for entry in listed if entry.key == key), 0.0)
    if now_s <= 0:
        raise RequestError("invalid", "the listing lacks the time at which objects were written")
    return listed, now_s


def _is_older(entry: Listed, before_s: float) -> bool:
    return not entry.is_prefix and 0 < entry.modified_s < before_s
