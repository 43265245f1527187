"""The last step of a save on an object store: one conditional PUT of the record.

======================================  ========================================================
answer to the record's PUT              what it means
======================================  ========================================================
created                                 committed
exists, and it is our record            committed: an earlier try had landed, its answer was lost
exists, and it is another valid one     somebody else has won: `CheckpointExistsError`
exists, and it is no record             `CheckpointExistsError` that says so; it is not touched,
                                        because a valid one could take its place in between
an error, and our record stands         committed
an error, and another's stands          `CheckpointExistsError`
an error, and nothing stands, or it     unknown, because the request may still arrive: the error
cannot be read back                     says so, and everything written is kept, so that the
                                        checkpoint is whole if it does
======================================  ========================================================

Then, as the second round trip, the fixed names. Nothing that goes wrong there fails the save: the
record stands, our own restore needs none of them, and a later `Checkpointer` mends them.
"""

# Rule 1: the record's PUT is issued when everything that it refers to was acknowledged, and
#   nothing that it refers to has a name that anybody else writes.
# Rule 2: from the moment that it is issued, what the attempt has written is removed only if the
#   PUT was conditional and another's object was seen at the record's key, which a PUT that is still
#   on its way then finds. Everything else is left to `collect`, long after the last request died.
# Rule 3: whoever has replaced a checkpoint removes its bytes, by its own save id, after the fixed
#   names stand and another record than its was seen in its place; of saves that replace one
#   another, none can therefore hit the bytes of the one that stays.
# Rule 4: an attempt that is older than half of what `collect` waits for does not publish.
#
# What remains: stores offer no way to withdraw a request. A PUT of a record that a network holds
# back until after the checkpoint was deleted, or replaced with `overwrite`, brings back a record
# whose data are gone; reading it is a `CorruptCheckpointError`, never wrong values.

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from functools import partial

from asyncckpt.errors import CheckpointExistsError, CorruptCheckpointError, SaveError
from asyncckpt.flow.shield import leading_error
from asyncckpt.stores.objects.client import RETRYABLE, RequestError
from asyncckpt.stores.objects.context import Context, Record, read_record
from asyncckpt.stores.objects.failures import store_error
from asyncckpt.stores.objects.fixed import load_fixed, write_fixed
from asyncckpt.stores.objects.layout import RECORD, join, owner
from asyncckpt.stores.objects.mend import follow_record, still_stands, write_success
from asyncckpt.stores.objects.uploads import abort_pending

log = logging.getLogger("asyncckpt.stores")

TURNS_MAX = 10
"""So often a save with `overwrite` meets another one that was faster, before it gives up."""

AFTER_S = 120.0
"""How long each of the two may take that follow the record: nobody waits for hours for what is
durable, and what is left is mended or collected."""

OBJECTS_MAX = 1 << 20
"""Objects of one checkpoint that are listed to be removed."""


class Publication:
    """One publication of one attempt, run once.

    Args:
        context: of the store.
        name: the checkpoint.
        save_id: of the attempt.
        record: its record.
        fixed: contents of its fixed names, durable in objects of the attempt.

    Attributes:
        keep: the record may arrive yet: nothing that it refers to may be removed.
    """

    def __init__(
        self, context: Context, name: str, save_id: str, record: bytes, fixed: Mapping[str, bytes]
    ) -> None:
        self._context = context
        self._requests = context.requests
        self._name = name
        self._save_id = save_id
        self._record = record
        self._fixed = fixed
        self._key = join(name, RECORD)
        self._location = context.requests.location(name)
        self.keep = False

    # ------------------------------------------------------------------------------------ commit

    async def create(self) -> None:
        """The record is ours, and the only one.

        Raises:
            CheckpointExistsError: another's object stands there; it was not touched.
            SaveError: the outcome is unknown.
        """
        # Until the answer says otherwise: whatever ends this, the request may have landed.
        self.keep = True
        try:
            try:
                created = await self._requests.create(self._key, self._record)
            except RequestError as error:
                return await self._resolve(error)
            if not created:
                await self._resolve(None)
        except CheckpointExistsError:
            self.keep = False  # what stands there is found by a PUT that is still on its way, too
            raise

    async def create_unprotected(self) -> None:
        """As `create`, as well as a store can that creates nothing conditionally.

        Two attempts that look at the same time may both believe to have won; the last one has.
        """
        found = await self._read_before()
        if found is not None:
            raise self._exists(found)
        self.keep = True
        try:
            await self._requests.replace(self._key, self._record)
        except RequestError as error:
            return await self._resolve(error, replacing=True)
        await self._resolve(None)

    async def replace(self, *, conditional: bool) -> Record | None:
        """The record is ours; returns what it has replaced.

        Raises:
            StoreError: what stands there could not be read; nothing was replaced.
            SaveError: the outcome is unknown.
        """
        for _ in range(TURNS_MAX):
            old = await self._read_before()
            if old is not None and old.data == self._record:
                return None  # a try of ours whose answer was lost
            if old is not None or not conditional:
                self.keep = True
                try:
                    await self._requests.replace(
                        self._key, self._record, again=partial(self._unchanged, old)
                    )
                except RequestError as error:
                    if error.kind == "conflict":
                        continue
                    await self._resolve(error, replacing=True)
                return old
            self.keep = True
            try:
                if await self._requests.create(self._key, self._record):
                    return None
            except RequestError as error:
                try:
                    await self._resolve(error)
                except CheckpointExistsError:
                    self.keep = False
                    continue
                return None
        raise SaveError(
            f"{self._location}: other saves with overwrite=True were faster {TURNS_MAX} times; "
            "nothing of this save is visible. Let one process save a step",
            location=self._location,
            stage="commit",
        )

    async def _unchanged(self, old: Record | None) -> bool:
        """Whether what stood there before stands there still.

        If not, an earlier try has landed. It may have been replaced since, by somebody who then
        has removed what our record refers to: another try would bring back a record without data.
        """
        found = await read_record(self._context, self._name)
        return (found and found.data) == (old and old.data)

    async def _read_before(self) -> Record | None:
        try:
            return await read_record(self._context, self._name)
        except RequestError as error:
            raise store_error(
                "reading the record", self._requests.location(self._key), error, stage="commit"
            ) from error

    async def _resolve(self, error: RequestError | None, *, replacing: bool = False) -> None:
        """Our record stands, whatever the answer to its PUT was."""
        try:
            found = await read_record(self._context, self._name)
        except RequestError as second:
            raise self._unresolved(error, f"that failed too ({second})") from second
        if found is not None and found.data == self._record:
            return
        if found is None:
            raise self._unresolved(error, "there is none so far") from error
        if replacing:
            raise self._unresolved(error, "another one stands there so far") from error
        raise self._exists(found) from error

    def _exists(self, found: Record) -> CheckpointExistsError:
        if found.save_id is not None:
            return CheckpointExistsError(
                f"{self._location}: a checkpoint stands here already; pass overwrite=True to "
                "replace it",
                location=self._location,
                found=found.save_id,
            )
        url = self._requests.location(self._key)
        size = f"{len(found.data)} bytes" if found.data else "an object"
        return CheckpointExistsError(
            f"{url}: {size} that are no commit record stand here, which are damaged or not ours; "
            "they were not touched. Look at them, then remove them or pass overwrite=True",
            location=self._location,
            expected="nothing, or a commit record",
            found=found.data[:64],
        )

    def _unresolved(self, error: RequestError | None, why: str) -> SaveError:
        self.keep = True
        url = self._requests.location(self._key)
        action = "writing the commit record"
        if error is None:
            what = f"{url}: {action} failed: something else stood there"
        else:
            what = str(store_error(action, url, error))
        state = (
            "the checkpoint is not visible"
            if error is not None and error.kind not in RETRYABLE
            else "whether the checkpoint is or will be visible and durable is unknown"
        )
        return SaveError(
            f"{what}; read back, {why}. So {state}; what was written is kept, so that the "
            "checkpoint is whole if its record still arrives, and 'asyncckpt gc' removes it "
            "otherwise. Look whether the step is listed before you save it again",
            visible=False,
            durable=False,
            stage="commit",
            location=self._location,
            found=None if error is None else error.kind,
        )

    # ------------------------------------------------------------------------------ second round

    async def finish(self, orphans: set[str]) -> bool:
        """The fixed names stand, and `orphans` are gone; whether all of that is so.

        Raises nothing of the store's: the checkpoint is committed.
        """
        try:
            async with asyncio.timeout(AFTER_S):
                try:
                    await self._second_round(orphans)
                except BaseExceptionGroup as errors:
                    raise leading_error(errors) from None
                if self._context.google:
                    await write_success(self._context, self._name, self._fixed)
        except (RequestError, TimeoutError) as error:
            log.warning(
                "%s: the checkpoint is committed, but files for other programs could not be "
                "written: %s; the next Checkpointer on this root will try again",
                self._location,
                error if isinstance(error, RequestError) else f"not within {AFTER_S:g} s",
            )
            return False
        return True

    async def _second_round(self, orphans: set[str]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(write_fixed(self._context, self._name, self._fixed))
            if orphans:
                group.create_task(self._requests.delete(sorted(orphans)))

    async def settle(self, replaced: Record | None, uploads: Collection[str]) -> None:
        """What the checkpoint has replaced is gone, and the fixed names are those of the record.

        Raises nothing of the store's: whatever is left is mended or collected later.

        Args:
            replaced: the record that stood there before.
            uploads: keys that were sent in parts: a request that was repeated may have begun
                another upload, of which nobody knows the id.
        """
        try:
            async with asyncio.timeout(AFTER_S):
                await self._settle(replaced, uploads)
        except TimeoutError:
            log.warning(
                "%s: the checkpoint is committed; tidying up after it did not end within %g s",
                self._location,
                AFTER_S,
            )

    async def _settle(self, replaced: Record | None, uploads: Collection[str]) -> None:
        context, name = self._context, self._name
        try:
            await abort_pending(self._requests, uploads)
        except RequestError as error:
            log.debug("%s: uploads could not be listed: %s", self._location, error)
        try:
            written = set(self._fixed)
            if replaced is not None and replaced.save_id not in (None, self._save_id):
                written |= await self._remove(replaced.save_id or "")
            if not await still_stands(context, name, self._record):
                await follow_record(context, name, self._save_id, written)
        except (RequestError, CorruptCheckpointError) as error:
            log.warning(
                "%s: the checkpoint is committed; tidying up after it failed: %s",
                self._location,
                error,
            )

    async def _remove(self, save_id: str) -> set[str]:
        """What this save has written is gone; returns its fixed names that ours does not have.

        Nothing is touched unless the record of another save is seen to stand.
        """
        context, name = self._context, self._name
        try:
            stale = set(await load_fixed(context, name, save_id)) - set(self._fixed)
        except CorruptCheckpointError as error:
            log.warning("%s", error)
            stale = set()
        listed = await self._requests.list(name, recursive=True, limit=OBJECTS_MAX)
        paths = [entry.key.removeprefix(f"{name}/") for entry in listed]
        dead = [path for path in paths if owner(path) == save_id]
        standing = await read_record(context, name)
        if standing is None or standing.save_id in (None, save_id):
            return set()
        await self._requests.delete([join(name, path) for path in (*sorted(stale), *dead)])
        return stale
