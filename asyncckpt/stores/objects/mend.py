"""Fixed names that fit the record: what a winner left unfinished is done, by whoever comes next.

A fixed name has no owner: a winner that was stopped for an hour may write its own over those of
the checkpoint that has replaced it. Every writer of fixed names therefore looks at the record
again after its last write, and if that is of another save now, writes (or removes) those names
once more, until the record was the same before and after. Whoever writes last has then seen the
record that stays, so that in the end the names are those of that record; a crash in between is
seen by the next `Checkpointer` as names that are missing, or as leftovers of two saves.
"""

# Rule 1: nothing here writes or deletes a record, nor anything that has a save id in its name.
# Rule 2: without a record nothing is written; a record that cannot be read stops everything.

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.flow.shield import leading_error
from asyncckpt.options import KIB
from asyncckpt.stores.objects.client import Listed, RequestError
from asyncckpt.stores.objects.context import Context, Record, read_record
from asyncckpt.stores.objects.fixed import (
    ENTRIES_MAX,
    load_fixed,
    load_objects,
    write_fixed,
)
from asyncckpt.stores.objects.layout import RECORD, SUCCESS, fixed_owner, join

log = logging.getLogger("asyncckpt.stores")

ROUNDS_MAX = 5
"""So often the record may change under the hands of one writer before it leaves the rest to the
one that changed it."""

HEAD_NBYTES = 4 * KIB
"""Records of different saves differ within this: they begin with format, version and save id."""

SUCCESS_TEXT = b"Checkpoint commit was successful to %s"


async def still_stands(context: Context, name: str, record: bytes) -> bool:
    """Whether this record is what stands at its key; one small read.

    Raises:
        RequestError: it could not be read.
    """
    try:
        head = await context.requests.get(join(name, RECORD), 0, HEAD_NBYTES)
    except RequestError as error:
        if error.kind == "missing":
            return False
        raise
    return bytes(head) == record[:HEAD_NBYTES]


def marks(paths: Iterable[str]) -> list[str]:
    """Orbax's marks of a checkpoint with these fixed names: one of each item, one of the step."""
    items = sorted({path.partition("/")[0] for path in paths if "/" in path})
    return [*(join(item, SUCCESS) for item in items), SUCCESS]


async def write_success(context: Context, name: str, paths: Iterable[str]) -> None:
    """Orbax's marks stand. Written after everything else, at the same time."""
    text = SUCCESS_TEXT % context.requests.location(name).encode()
    try:
        async with asyncio.TaskGroup() as group:
            for mark in marks(paths):
                group.create_task(context.requests.replace(join(name, mark), text))
    except BaseExceptionGroup as errors:
        raise leading_error(errors) from None


async def follow_record(
    context: Context, name: str, save_id: str | None, paths: Collection[str]
) -> None:
    """The fixed names are those of the record that stands, or gone as it is.

    Args:
        context: of the store.
        name: the checkpoint.
        save_id: whose contents were last written there by the caller; None: they were removed.
        paths: which names these are.

    Raises:
        CorruptCheckpointError: the contents of the record's save are damaged.
        RequestError: a request failed.
    """
    for _ in range(ROUNDS_MAX):
        record = await read_record(context, name)
        if record is not None and record.save_id is None:
            return  # nobody knows what belongs to it
        standing = None if record is None else record.save_id
        if standing == save_id:
            return
        files = {} if standing is None else await load_fixed(context, name, standing)
        stale = [path for path in paths if path not in files]
        if standing is None:
            stale += marks(paths)
        await context.requests.delete([join(name, path) for path in stale])
        await write_fixed(context, name, files)
        if context.google and standing is not None:
            await write_success(context, name, files)
        save_id, paths = standing, files.keys()


async def mend(context: Context, name: str) -> bool:
    """The fixed names of a checkpoint that stands are there; whether any were missing.

    Two listings where nothing is to be done. Where objects of one save only are there, names and
    sizes tell; after a replacement that was interrupted, contents are compared.

    Raises:
        CorruptCheckpointError: the contents are damaged.
        RequestError: a request failed.
    """
    requests = context.requests
    listed = await requests.list(name, recursive=False, limit=ENTRIES_MAX)
    here = {e.key.removeprefix(f"{name}/"): e for e in listed if not e.is_prefix}
    holders = [path for path in here if fixed_owner(path) is not None]
    owners = {fixed_owner(path) for path in holders}
    if RECORD not in here and len(listed) <= ENTRIES_MAX:
        return False
    unmarked = context.google and SUCCESS not in here
    if not owners and not unmarked:
        return False
    record: Record | None = None
    if len(owners) > 1 or unmarked:
        record = await read_record(context, name)
        if record is None or record.save_id is None:
            return False
        holders = [path for path in holders if fixed_owner(path) == record.save_id]
    files = await load_objects(context, name, holders)
    wrong = await _wrong(context, name, here, files, compare=len(owners) > 1)
    if not wrong and not unmarked:
        return False
    if record is None:
        record = await read_record(context, name)
        if record is None or record.save_id not in owners:
            return False
    assert record.save_id is not None
    await write_fixed(context, name, wrong)
    if context.google:
        await write_success(context, name, files)
    await follow_record(context, name, record.save_id, files.keys())
    return True


async def _wrong(
    context: Context,
    name: str,
    here: Mapping[str, Listed],
    files: Mapping[str, bytes],
    *,
    compare: bool,
) -> dict[str, bytes]:
    """Those of the files that are not there as they should be."""
    nbytes = {path: entry.nbytes for path, entry in here.items()}
    for directory in _directories(files):
        prefix = join(name, directory)
        for entry in await context.requests.list(prefix, recursive=False, limit=ENTRIES_MAX):
            nbytes[entry.key.removeprefix(f"{name}/")] = entry.nbytes
    wrong = {path: data for path, data in files.items() if nbytes.get(path) != len(data)}
    if compare:
        for path, data in files.items():
            if path not in wrong and not await equals(context, join(name, path), data):
                wrong[path] = data
    return wrong


async def equals(context: Context, key: str, data: bytes) -> bool:
    """Whether the object is exactly these bytes; `RequestError` where it could not be read."""
    try:
        return await context.requests.read(key, max_nbytes=len(data)) == data
    except RequestError as error:
        if error.kind == "missing":
            return False
        raise


def _directories(paths: Iterable[str]) -> set[str]:
    return {path.rpartition("/")[0] for path in paths} - {""}


async def mend_quietly(context: Context, name: str) -> None:
    """As `mend`; what cannot be mended is logged, except where this process may not write."""
    try:
        if await mend(context, name):
            log.info(
                "%s: files for other programs were missing since a save was interrupted; they "
                "were written",
                context.requests.location(name),
            )
    except (RequestError, CorruptCheckpointError) as error:
        level = logging.WARNING
        if isinstance(error, RequestError) and error.kind in ("forbidden", "credentials"):
            level = logging.DEBUG
        log.log(
            level,
            "%s: files for other programs could not be completed: %s",
            context.requests.location(name),
            error,
        )
