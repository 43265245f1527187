"""Leftovers of saves that nobody will finish: found by their names, age and owner, and removed.

What is removed is older than the caller says (a week at least) by the store's own clock, and is

- an object of a checkpoint's prefix whose name carries the save id of an attempt, where a valid
  record of another save stands, or none;
- the fixed names that such an attempt kept the contents of, where no record stands and they are
  exactly these: what is left of a deletion that did not end;
- an experiment (`.asyncckpt/probe-…`);
- a multipart upload to a name that carries a save id.
"""

# Rule 1: everything else is foreign, whatever it looks like. A prefix whose record cannot be read
#   as one (damaged, or of a newer release) is left alone as a whole.
# Rule 2: no attempt publishes once it is half as old, so what is removed is waited for by nobody;
#   its objects are judged by when they were written, which is after it began.
# Rule 3: ages are differences of times that the store itself tells: its "now" is when it says that
#   an object that was just written was.
# Rule 4: the record is read after the listing and before the deletion.

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from asyncckpt.errors import CorruptCheckpointError, UsageError
from asyncckpt.stores.objects.client import Listed, RequestError
from asyncckpt.stores.objects.context import Context, read_record
from asyncckpt.stores.objects.fixed import load_objects
from asyncckpt.stores.objects.layout import CONTROL, fixed_owner, is_probe, join, owner, probe_key
from asyncckpt.stores.objects.mend import equals

log = logging.getLogger("asyncckpt.stores")

NAMES_MAX = 1 << 20
OBJECTS_MAX = 1 << 20
"""Entries that one listing may have; a prefix with more is none of ours."""

KEYS_PER_DELETION = 1000
"""What one request of S3 takes; the record is read again before each."""


async def collect(context: Context, older_than_s: float, *, dry_run: bool) -> list[str]:
    """The keys of what was (with `dry_run`: would be) removed, sorted; uploads as ``key?upload``.

    Raises:
        UsageError: the client does not tell when objects were written.
        RequestError: a request failed; what was removed until then stays removed.
    """
    requests = context.requests
    if not requests.traits.modified:
        raise UsageError(
            f"{requests.url}: {requests.traits.name} does not tell when objects were written, so "
            "that leftovers cannot be told from saves that are on their way; use another client",
            location=requests.url,
        )
    before_s = await _store_now_s(context) - older_than_s
    removed = await _uploads(context, before_s, dry_run=dry_run)
    probes = [
        entry.key
        for entry in await requests.list(CONTROL, recursive=True, limit=OBJECTS_MAX)
        if is_probe(entry.key) and _is_older(entry, before_s)
    ]
    if not dry_run:
        await requests.delete(probes)
    removed += probes
    for entry in await requests.list("", recursive=False, limit=NAMES_MAX):
        if entry.is_prefix and entry.key != CONTROL:
            removed += await _checkpoint(context, entry.key, before_s, dry_run=dry_run)
    return sorted(removed)


async def _checkpoint(
    context: Context, name: str, before_s: float, *, dry_run: bool
) -> Sequence[str]:
    listed = await context.requests.list(name, recursive=True, limit=OBJECTS_MAX)
    if len(listed) > OBJECTS_MAX:
        log.warning(
            "%s: more than %d objects, which no checkpoint has; not looked at",
            context.requests.location(name),
            OBJECTS_MAX,
        )
        return []
    old = [entry.key for entry in listed if _is_older(entry, before_s)]
    owners = {key: owner(key.removeprefix(f"{name}/")) for key in old}
    ours = [key for key in old if owners[key] is not None]
    removed: list[str] = []
    for first in range(0, len(ours), KEYS_PER_DELETION):
        record = await read_record(context, name)
        if record is not None and record.save_id is None:
            log.warning(
                "%s: its commit record is damaged or of a newer release; nothing was collected",
                context.requests.location(name),
            )
            return removed
        living = None if record is None else record.save_id
        some = ours[first : first + KEYS_PER_DELETION]
        dead = [key for key in some if owners[key] != living]
        if record is None:
            # Before what tells that they are ours.
            here = {entry.key for entry in listed}
            names = sorted((await _fixed_names(context, name, dead, here)).intersection(old))
            if not dry_run:
                await context.requests.delete(names)
            removed += names
        if not dry_run:
            await context.requests.delete(dead)
        removed += dead
    return removed


async def _fixed_names(
    context: Context, name: str, keys: Sequence[str], here: Collection[str]
) -> set[str]:
    """Keys of the fixed names, of those that stand, whose contents some of these objects keep."""
    saves: dict[str, list[str]] = {}
    for key in keys:
        path = key.removeprefix(f"{name}/")
        if (save_id := fixed_owner(path)) is not None:
            saves.setdefault(save_id, []).append(path)
    names: set[str] = set()
    for paths in saves.values():
        try:
            files = await load_objects(context, name, paths)
        except CorruptCheckpointError as error:
            log.warning("%s; files of the names that it kept stay behind", error)
            continue
        kept = {key: data for path, data in files.items() if (key := join(name, path)) in here}
        # An attempt that never won kept them, too: where one of them is another's, all may be.
        if all([await equals(context, key, data) for key, data in kept.items()]):
            names.update(kept)
    return names


async def _uploads(context: Context, before_s: float, *, dry_run: bool) -> list[str]:
    requests = context.requests
    removed: list[str] = []
    if not requests.traits.multipart:
        return removed
    for pending in await requests.pending_parts(""):
        path = pending.key.partition("/")[2]
        if owner(path) is None or not 0 < pending.begun_s < before_s:
            continue
        if not dry_run:
            await requests.abort_parts(pending.key, pending.upload)
        removed.append(f"{pending.key}?{pending.upload}")
    return removed


async def _store_now_s(context: Context) -> float:
    """Seconds since 1970 by the store's clock."""
    requests = context.requests
    key = probe_key()
    await requests.replace(key, b"")
    try:
        listed = await requests.list(CONTROL, recursive=True, limit=OBJECTS_MAX)
        now_s = next((entry.modified_s for entry in listed if entry.key == key), 0.0)
    finally:
        await requests.delete([key])
    if now_s <= 0:
        raise RequestError("invalid", "the listing does not tell when an object was written")
    return now_s


def _is_older(entry: Listed, before_s: float) -> bool:
    return not entry.is_prefix and 0 < entry.modified_s < before_s
