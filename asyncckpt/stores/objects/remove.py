"""Deleting one checkpoint: Orbax's mark, then the record, then everything that the save wrote."""

# Rule 1: the record is acknowledged as gone before any byte that it refers to is touched.
# Rule 2: bytes go by the save id that the record carried, and fixed names by what that save kept of
#   them: another attempt at the name loses nothing, and neither does a person who put files there.
# Rule 3: the contents of fixed names go last, because they tell which names these are.

from __future__ import annotations

import logging

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.stores.objects.context import Context, read_record
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.fixed import load_fixed
from asyncckpt.stores.objects.layout import RECORD, fixed_owner, join, owner
from asyncckpt.stores.objects.mend import follow_record, marks
from asyncckpt.stores.objects.publish import OBJECTS_MAX

log = logging.getLogger("asyncckpt.stores")


async def remove(context: Context, name: str) -> None:
    """The checkpoint is gone, and the bytes of its save are.

    Of a damaged record nobody knows what belonged to it: that is collected by its age.

    Raises:
        CheckpointNotFoundError: there was none.
        StoreError: the error says whether the checkpoint is still there.
    """
    requests = context.requests
    location = requests.location(name)
    with reported("deleting", location):
        record = await read_record(context, name)
        if record is None:
            raise CheckpointNotFoundError(
                f"{location}: there is no checkpoint to delete", location=location
            )
        fixed = await _contents(context, name, record.save_id)
        if context.google:
            await requests.delete([join(name, mark) for mark in marks(fixed)])
        await requests.delete([join(name, RECORD)])
    if record.save_id is None:
        return
    with reported("removing the bytes of a checkpoint that is deleted", location):
        listed = await requests.list(name, recursive=True, limit=OBJECTS_MAX)
        paths = [entry.key.removeprefix(f"{name}/") for entry in listed]
        own = [path for path in paths if owner(path) == record.save_id]
        first = [*fixed, *(path for path in own if not fixed_owner(path))]
        await requests.delete([join(name, path) for path in first])
        await requests.delete([join(name, path) for path in own if fixed_owner(path)])
        try:
            # Somebody may have committed another save here meanwhile.
            await follow_record(context, name, None, fixed)
        except CorruptCheckpointError as error:
            log.warning("%s", error)


async def _contents(context: Context, name: str, save_id: str | None) -> dict[str, bytes]:
    if save_id is None:
        return {}
    try:
        return await load_fixed(context, name, save_id)
    except CorruptCheckpointError as error:
        log.warning("%s; files of these names stay behind", error)
        return {}
