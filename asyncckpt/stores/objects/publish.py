"""Publication, the last step of a save on an object store: one conditional PUT of the record.

Creation (`If-None-Match: *`, `ifGenerationMatch=0`):

===================================  ===========================================================
response to the record's PUT         meaning
===================================  ===========================================================
200                                  committed
412, our record is there             committed: an earlier try landed, its response was lost
412, another valid record            another save won: `CheckpointExistsError`; with `overwrite`,
                                     replaced if this was the first try, else failed as below
412, another object                  `CheckpointExistsError` that says so; left untouched, because
                                     a valid record could take its place in between
409                                  another conditional write is in progress: retried
lost, timeout, 5xx, 429              retried behind a guard, see below; after the last try the
                                     record is read back: ours, committed; another's,
                                     `CheckpointExistsError`; none, unknown
===================================  ===========================================================

Conditional replacement (`If-Match`, generation), where the probe found that it works:

===================================  ===========================================================
200                                  committed
412 or 404 to the first try          another save or a deletion was faster: read again; as for a
                                     retry if the client library may have repeated the request
412 or 404 to a retry                read back: ours, committed. Otherwise an earlier try may have
                                     landed and been replaced, and its data deleted: failed. No
                                     try can land later, since the version is gone for good
other, after the last try            read back: ours, committed; still the old one, unknown;
                                     another, failed as above
===================================  ===========================================================

Unknown means that the request may still land. The error says so, and all objects are kept, so that
the checkpoint is then complete.

The guard of a retried creation: the first try may have landed, its response may have been lost, and
another process may have deleted the step; a second try would restore a record without data. So each
retry first checks for the record and for one of our objects (the witness), and after the PUT the
witness is checked again. A deletion removes the record, then the data, then checks for the record
again. In every order, one of the two sees the other:

    PUT  <  deletion's last check     the deletion finds the record and removes it again
    deletion's last check  <  PUT     the data are gone: we find no witness and remove the record

When a save is cancelled or its deadline passes, the request in flight is the last try: the record
is read back after it. If that takes too long, the outcome is unknown.

The fixed names follow in the background. A failure there does not fail the save: the record exists,
our own restore needs none of them, and the next save, `Checkpointer` or gc writes them.
"""

# Rule 1: the record is PUT only after all objects that it refers to were acknowledged, and no other
#   attempt writes their names.
# Rule 2: from then on, the attempt's objects are removed only if no try can still land: another
#   object was seen at the record's key after a conditional PUT. Otherwise gc removes them, long
#   after the last request died.
# Rule 3: the save that replaced a checkpoint removes its bytes, by save id, and only once the new
#   fixed names are written: until then other programs read the old ones. Without conditional
#   replacement, only after a record other than the old one was seen in its place.
# Rule 4: an attempt older than half of the age that gc requires does not publish.
#
# Known limit: a request cannot be withdrawn. If the network delays a creation, or an unconditional
# replacement, until its process has died and its checkpoint was deleted, it restores a record
# without data; reading that raises `CorruptCheckpointError` and never returns wrong values.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial

from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    SaveError,
    SaveOutcomeUnknownError,
    StoreError,
)
from asyncckpt.log import logger
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.context import HEAD_NBYTES, Context, Record, shared_paths
from asyncckpt.stores.objects.failures import reported, store_error
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.objects.probe import Conditions
from asyncckpt.stores.objects.remove import delete_record, read_version
from asyncckpt.stores.objects.repair import follow_record, write_fixed

TURNS_MAX = 10
"""How often a save with `overwrite` may lose to other saves before it gives up."""

AFTER_S = 120.0
"""Time limit of each step after the commit; repair or gc finishes the rest."""


@contextlib.asynccontextmanager
async def bounded(location: str, trouble: str) -> AsyncIterator[None]:
    """Limit the time of a block on which no save depends; log a failure as `trouble`."""
    try:
        async with asyncio.timeout(AFTER_S):
            yield
    except (RequestError, AsyncCheckpointError, TimeoutError) as error:
        late = isinstance(error, TimeoutError)
        logger.warning(
            "%s: %s", location, trouble % (f"not within {AFTER_S:g} s" if late else error)
        )


@dataclass(eq=False, repr=False)
class Publication:
    """The publication of one attempt, run once, on behalf of the task that creates it.

    Attributes:
        fixed: contents of the fixed names.
        witness: key of an object of the attempt, which a deletion of the checkpoint removes.
        epoch: claim under which it writes, 0 for none.
        keep: the record may still land, so the objects that it refers to must stay.
    """

    context: Context
    name: str
    save_id: str
    record: bytes
    fixed: Mapping[str, bytes]
    conditions: Conditions
    witness: str | None
    epoch: int

    def __post_init__(self) -> None:
        self._requests = self.context.requests
        self._key = join(self.name, RECORD_NAME)
        self._location = self.context.requests.location(self.name)
        self._retried = False
        self.keep = False
        self._caller = asyncio.current_task()

    # ------------------------------------------------------------------------------------ commit

    async def commit(self, *, overwrite: bool) -> Record | None:
        """Write the record; return the one that it replaced, if any.

        Without `overwrite`, it replaces only a record that does not count.

        Raises:
            CheckpointExistsError: a checkpoint, or another object, is at the record's key; it was
                left untouched.
            FencedError: the claim of this process was taken over.
            StoreError: the existing record could not be read; nothing was replaced.
            SaveOutcomeUnknownError: the record may still arrive; `keep` is set.
            SaveError: another process was faster, or the record was refused.
        """
        try:
            if not overwrite:
                found = await self.create()
                if found is None:
                    return None
                await self._refuse_if_counts(found)
                self.conditions = await self.context.probes.conditions(versions=True)
            return await self._replace(overwrite)
        except asyncio.CancelledError:
            if not self.keep:
                raise
            error = RequestError("timeout", "the save ended before an answer came")
            raise self._unresolved(error, "the record was not read back") from None

    async def create(self) -> Record | None:
        """Create the record; return the object that was there already, or None.

        Without conditional creation, two attempts that check at the same time may both report
        success; the later one has won.
        """
        if self.conditions.create:
            return await self._create()
        found, _ = await self._read_before()
        if found is None:
            await self._replace_guarded(None)
            found = await self._read_back(None)
            if found is None:
                raise self._unresolved(None, "read back, there is none so far")
            if found.data == self.record:
                return None
        return found

    async def _replace(self, overwrite: bool) -> Record | None:
        """Replace what is at the record's key; return what was replaced."""
        for _ in range(TURNS_MAX):
            old, version = await self._read_before()
            if old is not None and old.data == self.record:
                return None  # an earlier try landed, whose response was lost
            if old is not None and not overwrite:
                await self._refuse_if_counts(old)
            if old is not None and old.save_id is not None:
                claims, location = self.context.claims, self._location
                await claims.begin_replacing(old.save_id, self.save_id, self.epoch, location)
            if old is None and self.conditions.create:
                if await self._create() is None:
                    return None
                if self._retried or self._requests.traits.repeats:
                    raise self._overtaken()
            elif version is None or not self.conditions.replace:
                await self._replace_guarded(old)
                return old
            elif await self._replace_version(version, old):
                return old
        raise self._failed(
            f"other saves with overwrite=True were faster {TURNS_MAX} times; nothing of this save "
            "is visible. Let one process save a step"
        )

    async def _refuse_if_counts(self, found: Record) -> None:
        """Raise if the existing record counts, or is another object."""
        if not await self.context.counts(found):
            return
        # A fenced process must get the `FencedError` instead.
        await self.context.claims.check(self.epoch, self._location)
        if found.save_id is not None:
            raise CheckpointExistsError(
                f"{self._location}: a checkpoint already exists here; pass overwrite=True to "
                "replace it",
                location=self._location,
                found=found.save_id,
            )
        url = self._requests.location(self._key)
        data = found.data or b""
        size = f"{len(data)} bytes" if data else "an object"
        raise CheckpointExistsError(
            f"{url}: holds {size}, not a valid commit record; left untouched. It may be damaged or "
            "belong to another program: remove it or pass overwrite=True",
            location=self._location,
            expected="nothing, or a commit record",
            found=data[:64],
        )

    async def _create(self) -> Record | None:
        """Create the record conditionally; return the object that was there already, or None."""
        self.keep = True  # it may have landed, unless a response says otherwise
        self._retried = False
        error: RequestError | None = None
        try:
            created = await self._requests.create(
                self._key,
                self.record,
                again=partial(self._is_unchanged, None),
                wanted=self._is_wanted,
            )
        except RequestError as caught:
            created, error = False, caught
        if not created:
            found = await self._read_back(error)
            if found is None:
                raise self._unresolved(error, "read back, there is none so far") from error
            if found.data != self.record:
                self.keep = False  # tries still in flight find it, too
                return found
        if self._retried:
            await self._check_witness()
        return None

    async def _replace_version(self, version: str, old: Record | None) -> bool:
        """Replace `old`, which has this version; return False if another save was faster."""
        self.keep = True
        self._retried = self._requests.traits.repeats

        async def again() -> bool:
            self._retried = True
            return True

        try:
            await self._requests.replace(
                self._key, self.record, version=version, again=again, wanted=self._is_wanted
            )
            return True
        except RequestError as caught:
            error = caught
        if error.kind in ("exists", "missing", "conflict") and not self._retried:
            self.keep = False
            return False
        found = await self._read_back(error)
        if found is not None and found.data == self.record:
            return True
        if found is not None and old is not None and found.data == old.data:
            raise self._unresolved(error, "read back, the old one is there so far") from error
        self.keep = False
        raise self._overtaken() from error

    async def _replace_guarded(self, old: Record | None) -> None:
        """Replace `old` without a condition."""
        self.keep = True
        self._retried = False
        again = partial(self._is_unchanged, old)
        try:
            await self._requests.replace(
                self._key, self.record, again=again, wanted=self._is_wanted
            )
        except RequestError as error:
            found = await self._read_back(error)
            if found is None:
                raise self._unresolved(error, "read back, there is none so far") from error
            if found.data != self.record:
                raise self._unresolved(error, "read back, another one is there so far") from error
        if old is None and self._retried:
            await self._check_witness()

    # ------------------------------------------------------------------------------------ guards

    async def _is_unchanged(self, old: Record | None) -> bool:
        """Return whether the old record is still there, so that another try may begin.

        If not, an earlier try landed. It may have been replaced or deleted since, and our data
        removed: another try would restore a record without data.

        Raises:
            SaveError: there is no record, and our data were removed.
        """
        self._retried = True
        found = await self.context.read_record(self.name)
        if found is None and old is None:
            await self._check_witness()
        return found == old

    def _is_wanted(self) -> bool:
        """Return whether another try may begin: the caller was not cancelled, nor is late.

        Tries in flight are awaited, since their outcome must be known.
        """
        return self._caller is None or not self._caller.cancelling()

    async def _check_witness(self) -> None:
        """Check that no deletion has removed our data; else remove a record that landed after it.

        Raises:
            SaveError: our data were removed.
        """
        try:
            if self.witness is None or await self._requests.exists(self.witness):
                return
        except RequestError:
            return
        try:
            conditions = await self.context.probes.conditions(create=False, versions=True)
            found, version = await read_version(self.context, self.name, wanted=conditions.delete)
            if found is not None and found.data == self.record:
                await delete_record(self.context, self.name, version)
            self.keep = False
        except (RequestError, StoreError) as error:  # readers report the record as corrupt
            logger.warning(
                "%s: a record without data could not be removed: %s", self._location, error
            )
        raise self._failed(
            "the checkpoint was committed, but another process deleted it before this one knew; "
            "nothing of it is visible"
        )

    # ------------------------------------------------------------------------------------- reads

    async def _read_before(self) -> tuple[Record | None, str | None]:
        with reported("reading the record", self._requests.location(self._key), stage="commit"):
            return await read_version(self.context, self.name, wanted=self.conditions.replace)

    async def _read_back(self, error: RequestError | None) -> Record | None:
        try:
            return await self.context.read_record(self.name)
        except RequestError as second:
            raise self._unresolved(error, f"reading it back failed too ({second})") from second

    def _failed(self, why: str) -> SaveError:
        text = f"{self._location}: {why}"
        return SaveError(text, location=self._location, stage="commit")

    def _overtaken(self) -> SaveError:
        """Return the error if an earlier try may have landed and been replaced.

        The data have then been deleted, or soon will be: another try would replace a complete
        checkpoint by a record without data.
        """
        return self._failed(
            "another process has replaced or deleted the checkpoint while this save was being "
            "committed; nothing of this save is visible. Let one process save a step"
        )

    def _unresolved(self, error: RequestError | None, why: str) -> SaveError:
        self.keep = True
        url = self._requests.location(self._key)
        action = "writing the commit record"
        if error is None:
            what = f"{url}: {action} failed: something else was there"
        else:
            what = str(store_error(action, url, error))
        # Other processes keep their data only if the outcome is unknown.
        invisible = error is not None and not error.retryable and not self._retried
        state = (
            "the checkpoint is not visible"
            if invisible
            else "whether the checkpoint is or will be visible and durable is unknown"
        )
        return (SaveError if invisible else SaveOutcomeUnknownError)(
            f"{what}; {why}. So {state}; its data are kept, so that the checkpoint is "
            "complete if its record still arrives, and 'asyncckpt gc' removes them otherwise. "
            "Check whether the step is listed before you save it again",
            visible=False,
            durable=False,
            stage="commit",
            location=self._location,
            found=None if error is None else error.kind,
        )

    # ------------------------------------------------------------------------------ second round

    async def finish(self) -> bool:
        """Write the fixed names, then Orbax's marks; return whether all were written.

        Logs failures of the store: the checkpoint is committed.
        """
        async with bounded(
            self._location,
            "the checkpoint is committed, but files for other programs could not be written: %s; "
            "the next save, or Checkpointer on this root, will try again",
        ):
            await write_fixed(self.context, self.name, self.fixed, self.fixed)
            return True
        return False

    async def settle(self, replaced: Record | None) -> None:
        """Remove the replaced checkpoint, and let the fixed names follow the record.

        Logs failures of the store: repair or gc finishes the rest.
        """
        trouble = "the checkpoint is committed, but cleaning up after it failed: %s"
        async with bounded(self._location, trouble):
            written = set(self.fixed)
            if replaced is not None and replaced.save_id not in (None, self.save_id):
                written |= await self._remove(replaced)
                await self.context.claims.end_replacing(replaced.save_id, self.save_id, self.epoch)
            head = await self.context.read_head(self.name)
            if head != self.record[:HEAD_NBYTES]:
                await follow_record(self.context, self.name, self.save_id, written)

    async def _remove(self, replaced: Record) -> set[str]:
        """Remove the objects of a replaced save; return its fixed names that this one lacks."""
        context, name = self.context, self.name
        stale = shared_paths(await context.outline(replaced)) - self.fixed.keys()
        dead = await context.paths_of(name, replaced.save_id)
        if not self.conditions.replace:
            present = await context.read_record(name)
            if present is None or present.save_id in (None, replaced.save_id):
                return set()
        await context.delete_paths(name, [*sorted(stale), *dead])
        return set(stale)
