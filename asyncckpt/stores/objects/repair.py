"""Repair of fixed names: the next process completes what a committed save left unfinished.

A fixed name has no owner: a writer that was stopped for an hour may overwrite the fixed names of
the checkpoint that replaced its own. So every writer of fixed names reads the record again after
its last write. If the record is of another save now, it writes (or removes) the names once more,
until the record is the same before and after. The last writer has then seen the final record and
written its names. The next `Checkpointer` finds what a crash left unfinished by comparing listings
with the record.
"""

# Rule 1: nothing here writes or deletes a record, or a name with a save id.
# Rule 2: nothing is written without a record that counts; an unreadable record stops the repair.
# Rule 3: the check reads only listings and a few KiB of the record, no contents.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.flow.shield import together
from asyncckpt.format.record_values import FixedName, Outline
from asyncckpt.log import logger
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.clients.client import Listed, RequestError
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.layout import SUCCESS, join, marks

ROUNDS_MAX = 5
"""Changes of the record after which a writer leaves the rest to the process that changes it."""

ENTRIES_MAX = 1000
"""Maximum entries listed per directory of a checkpoint, which has only a few."""

SUCCESS_TEXT = b"Checkpoint commit was successful to %s"


async def write_fixed(
    context: Context, name: str, files: Mapping[str, bytes], paths: Iterable[str]
) -> None:
    """Write fixed names of a checkpoint concurrently; then, on Google's store, Orbax's marks.

    `paths` are all of its fixed names. Raises `RequestError`.
    """
    replace = context.requests.replace
    await together(replace(join(name, path), data) for path, data in files.items())
    if context.google:
        text = SUCCESS_TEXT % context.requests.location(name).encode()
        await together(replace(join(name, mark), text) for mark in marks(paths))


async def follow_record(
    context: Context, name: str, save_id: str | None, paths: Collection[str]
) -> None:
    """Write the fixed names of the current record, or remove them if no record counts.

    The caller has just written `paths` with the contents of the save `save_id`, or removed them if
    that is None.

    Raises:
        CorruptCheckpointError: the contents are damaged.
        RequestError, StoreError: a request failed.
    """
    for _ in range(ROUNDS_MAX):
        record = await context.read_record(name)
        if record is not None and record.save_id is None:
            return  # its fixed names are unknown
        if record is not None and record.save_id != save_id and not await context.counts(record):
            record = None
        present = None if record is None else record.save_id
        if present == save_id:
            return
        outline = await context.outline(record)
        files = await context.load_fixed(name, outline, outline.fixed)
        stale = [path for path in paths if path not in outline.paths]
        if present is None and context.google:
            stale += marks(paths)
        await context.delete_paths(name, stale)
        if present is not None:
            await write_fixed(context, name, files, files)
        save_id, paths = present, files.keys()


async def repair(context: Context, name: str) -> bool:
    """Write the fixed names that are missing or outdated; return whether there were any.

    Costs two listings and one small read if there is nothing to do. Ignores checkpoints of
    version 1.

    Raises:
        CorruptCheckpointError: the contents are damaged.
        RequestError, StoreError: a request failed.
    """
    here = await _listed(context, name, "")
    if RECORD_NAME not in here:
        return False
    head = await context.read_head(name)
    if head is None:
        return False
    outline = context.outline_of(head, head=True)
    if outline is None:  # not a record, or one with a long list
        outline = await context.outline(await context.read_record(name))
    if not outline.fixed:
        return False
    for directory in {fixed.path.rpartition("/")[0] for fixed in outline.fixed} - {""}:
        here |= await _listed(context, name, directory)
    wrong = {fixed.path for fixed in _wrong(outline, here)}
    if not wrong and not (context.google and SUCCESS not in here):
        return False
    # The head of the record is unchecked, so the contents come from the whole record.
    record = await context.read_record(name)
    if record is None or record.save_id != outline.save_id or not await context.counts(record):
        return False
    outline = await context.outline(record)
    bad = [fixed for fixed in outline.fixed if fixed.path in wrong]
    paths = [fixed.path for fixed in outline.fixed]
    await write_fixed(context, name, await context.load_fixed(name, outline, bad), paths)
    await follow_record(context, name, record.save_id, paths)
    return True


async def _listed(context: Context, name: str, directory: str) -> dict[str, Listed]:
    prefix = join(name, directory)
    listed = await context.requests.list(prefix, recursive=False, limit=ENTRIES_MAX)
    return {e.key.removeprefix(f"{name}/"): e for e in listed if not e.is_prefix}


def _wrong(outline: Outline, here: Mapping[str, Listed]) -> Iterable[FixedName]:
    """Yield the fixed names that are missing, or whose contents are not the record's.

    Most stores list the MD5 of an object, but not all, and not always (S3 with KMS keys): there a
    different checksum proves nothing. That is the case if the attempt's copy of the content (for
    the manifest: every copy) has another checksum too. Then a fixed name counts as correct if it
    has the right size and was written after the record.
    """

    def is_md5(path: str | None, fixed: FixedName) -> bool:
        return path is not None and path in here and here[path].checksum == fixed.md5

    lists_md5 = any(is_md5(fixed.object, fixed) for fixed in outline.fixed)
    for fixed in outline.fixed:
        entry = here.get(fixed.path)
        if entry is None or entry.nbytes != fixed.nbytes:
            yield fixed
        elif entry.checksum != fixed.md5:
            differs = lists_md5 if fixed.object is None else is_md5(fixed.object, fixed)
            if differs or entry.modified_s < here[RECORD_NAME].modified_s:
                yield fixed


async def repair_quietly(context: Context, name: str) -> None:
    """Repair as `repair` does, and log failures; missing write permission only at debug level."""
    location = context.requests.location(name)
    try:
        if await repair(context, name):
            logger.info("%s: repaired missing or outdated files for other programs", location)
    except (RequestError, AsyncCheckpointError) as error:
        denied = isinstance(error, RequestError) and error.kind in ("forbidden", "credentials")
        log = logger.debug if denied else logger.warning
        log("%s: files for other programs could not be completed: %s", location, error)
