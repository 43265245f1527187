"""Deletion of one checkpoint, in the reverse order of its publication.

First what other programs look for (Orbax's marks, then the other fixed names), then the record,
then the bytes. A deletion that ends early leaves a checkpoint that is whole for us, and that the
next `Checkpointer` repairs for others; or bytes that all carry a save id, which gc removes.
"""

# Rule 1: the deletion of the record was acknowledged before any byte that it refers to is removed.
# Rule 2: bytes are removed by the save id that the record carried, and fixed names if it lists
#   them: neither another attempt at the name nor a person who put files there loses anything.
# Rule 3: with conditional deletion, only the version that was read is deleted: a checkpoint that
#   has replaced it meanwhile stays, and its fixed names are written again.
# Rule 4: the last request before the deletion of the record looks for a higher claim: a process
#   that was stopped and taken over deletes nothing when it wakes up. No store has a condition for
#   that: one that is stopped between these two requests deletes what it had decided to delete.
# Rule 5: after the bytes the record is looked for once more: a save whose response was lost may
#   have tried it again (see `publish`). A record of the same save is then removed again.

from __future__ import annotations

from functools import partial

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.log import logger
from asyncckpt.ports import Removal
from asyncckpt.stores.objects.clients.client import RequestError, unless_missing
from asyncckpt.stores.objects.context import Context, Record, shared_paths
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import RECORD, join, marks
from asyncckpt.stores.objects.repair import follow_record

ROUNDS_MAX = 3
"""Removals of a record that comes back."""


async def read_version(
    context: Context, name: str, *, wanted: bool
) -> tuple[Record | None, str | None]:
    """Return the record, and its version where one is `wanted` for a condition.

    The version is read first: if the record changes in between, the condition fails.

    Raises:
        RequestError: it could not be read.
    """
    version = None
    if wanted:
        with unless_missing():
            version = await context.requests.version(join(name, RECORD))
        if version is None:
            return None, None
    record = await context.read_record(name)
    return record, None if record is None else version


async def delete_record(context: Context, name: str, version: str | None) -> bool:
    """Delete the record; return False if it has another version than this one (None: any).

    Raises:
        RequestError: it could not be deleted.
    """
    key = join(name, RECORD)
    if version is None:
        await context.requests.delete([key])
        return True
    try:
        await context.requests.delete_version(key, version)
    except RequestError as error:
        if error.kind not in ("exists", "missing"):
            raise
        return False
    return True


async def unlist(context: Context, name: str, epoch: int, seal: bytes = b"") -> Removal:
    """Delete the record, after what other programs look for; the result removes the bytes.

    What belonged to a damaged record is unknown: gc removes that by its age.

    Raises:
        CheckpointNotFoundError: there was none, or one whose record does not end with `seal`.
        FencedError: the claim of this process was taken over; the checkpoint is still there.
        StoreError: the error says whether the checkpoint is still there.
    """
    location = context.requests.location(name)
    await context.background.named(name)
    conditions = await context.probes.conditions(create=False, versions=True)
    with reported("deleting", location):
        record, version = await read_version(context, name, wanted=conditions.delete)
        if record is None or not (record.data or b"").endswith(seal):
            raise CheckpointNotFoundError(
                f"{location}: there is no checkpoint to delete", location=location
            )
        names = shared_paths(await context.outline(record))
        await context.claims.check(epoch, location)
        if context.google:
            await context.delete_paths(name, marks(names))
        await context.delete_paths(name, sorted(names))
        await context.claims.check(epoch, location)
        # If another version is there now, ours was replaced, and its bytes are of no use either.
        await delete_record(context, name, version)
    return partial(_remove_bytes, context, name, record.save_id, names)


async def _remove_bytes(
    context: Context, name: str, save_id: str | None, names: frozenset[str]
) -> None:
    if save_id is None:
        return
    location = context.requests.location(name)
    with reported("removing the bytes of a deleted checkpoint", location):
        await context.delete_paths(name, await context.paths_of(name, save_id))
        for _ in range(ROUNDS_MAX):
            record = await context.read_record(name)
            if record is None or record.save_id != save_id:
                break
            logger.warning("%s: the record came back; removed again", location)
            await context.delete_paths(name, [RECORD])
        try:
            # Another save may have been committed here meanwhile.
            await follow_record(context, name, None, names)
        except CorruptCheckpointError as error:
            logger.warning("%s", error)
