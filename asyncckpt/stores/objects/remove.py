"""Deletion of one checkpoint, in the reverse order of its publication.

First the files for other programs (Orbax's marks, then the other fixed names), then the record,
then the bytes. A deletion that ends early leaves a checkpoint that is complete for us, and that the
next `Checkpointer` repairs for other programs; or bytes that carry a save id, which gc removes.
"""

# Rule 1: the deletion of the record is acknowledged before any byte that it refers to is removed.
# Rule 2: bytes are removed if they carry the record's save id, and fixed names if it lists them:
#   other attempts at the name, and people who put files there, lose nothing.
# Rule 3: with conditional deletion, only the version that was read is deleted: a checkpoint that
#   has replaced it meanwhile stays, and its fixed names are written again.
# Rule 4: the last request before the deletion of the record checks for a higher claim: a process
#   that was stopped and fenced deletes nothing when it wakes up. No store has a condition for
#   that, so a process that is stopped between these two requests still deletes the record.
# Rule 5: after the bytes, the record is read once more: a save whose response was lost may have
#   written it again (see `publish`). A record of the same save is then removed again.

from __future__ import annotations

from functools import partial

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.log import logger
from asyncckpt.ports import RECORD_NAME, Removal
from asyncckpt.stores.objects.clients.client import RequestError, unless_missing
from asyncckpt.stores.objects.context import Context, Record, shared_paths
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import join, marks
from asyncckpt.stores.objects.repair import follow_record

ROUNDS_MAX = 3
"""Maximum removals of a record that comes back."""


async def read_version(
    context: Context, name: str, *, wanted: bool
) -> tuple[Record | None, str | None]:
    """Return the record, and its version if one is `wanted` for a condition.

    Reads the version first: if the record changes in between, the condition fails. Raises
    `RequestError`.
    """
    version = None
    if wanted:
        with unless_missing():
            version = await context.requests.version(join(name, RECORD_NAME))
        if version is None:
            return None, None
    record = await context.read_record(name)
    return record, None if record is None else version


async def delete_record(context: Context, name: str, version: str | None) -> bool:
    """Delete the record if it has this version (None: any); return whether it did.

    Raises `RequestError`.
    """
    key = join(name, RECORD_NAME)
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


async def unlist(context: Context, name: str, epoch: int, seal: bytes) -> Removal:
    """Delete the files for other programs, then the record; the result removes the bytes.

    The bytes of a damaged record are unknown: gc removes them by age.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or its record does not end with `seal`.
        FencedError: the claim of this process was taken over; the checkpoint still exists.
        StoreError: the error says whether the checkpoint still exists.
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
        # If the version has changed, this record was replaced, and its bytes are garbage, too.
        await delete_record(context, name, version)
    return partial(_remove_bytes, context, name, record.save_id, names, deletes=conditions.delete)


async def _remove_bytes(
    context: Context, name: str, save_id: str | None, names: frozenset[str], *, deletes: bool
) -> None:
    if save_id is None:
        return
    location = context.requests.location(name)
    with reported("removing the bytes of a deleted checkpoint", location):
        await context.delete_paths(name, await context.paths_of(name, save_id))
        for _ in range(ROUNDS_MAX):
            record, version = await context.read_record(name), None
            if record is not None and deletes:  # of a missing object, s3fs lists for the version
                record, version = await read_version(context, name, wanted=True)
            if record is None or record.save_id != save_id:
                break
            logger.warning("%s: the record came back; removed again", location)
            await delete_record(context, name, version)
        try:
            # Another save may have been committed here meanwhile.
            await follow_record(context, name, None, names)
        except CorruptCheckpointError as error:
            logger.warning("%s", error)
