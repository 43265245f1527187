"""One attempt to save one checkpoint on an object store."""

# Rule 1: before the record, an attempt writes only names that carry its save id. The content of
#   every other file is in such an object, or in the record, until the attempt has won.
# Rule 2: an attempt ends with exactly one of `publish` and `abort`; both finish, however often the
#   caller is cancelled.
# Rule 3: after a failure every further call raises it.
# Rule 4: `publish` returns when the record is written. The fixed names follow in the background.
#   The store's next record waits for them, so that at most one checkpoint lacks them.
# Rule 5: with a claim, the attempt looks for a higher claim after writing the record. If there is
#   one, the save is not acknowledged, and none of its objects is removed (counting.py, rule 1).
# Rule 6: `publish` and `abort` end `_refusal`, the check that a one-shot save is not at a run's
#   root.

from __future__ import annotations

import asyncio
import socket
import time

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.errors import (
    CheckpointExistsError,
    SaveError,
    SaveOutcomeUnknownError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.background import BackgroundTask
from asyncckpt.flow.shield import cleaned_up, to_completion, together
from asyncckpt.format.record import STEP_NAME
from asyncckpt.log import logger
from asyncckpt.options import MIB
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.exchange import MARK, mark_of
from asyncckpt.stores.objects.clients.client import PUT_MAX_NBYTES, Body, RequestError
from asyncckpt.stores.objects.context import Context, Record
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import LISTED_MAX, fixed_path, join
from asyncckpt.stores.objects.publish import Publication
from asyncckpt.stores.objects.repair import repair_quietly
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.objects.share import ObjectShare
from asyncckpt.stores.paths import check_file

MAX_AGE_S = COLLECT_MIN_S / 2
"""Age after which an attempt does not publish: gc, rule 2."""

STEPS_MAX = 16
"""Newest step names that are checked for a record; failed saves leave a few without one."""

NAMED_STEPS = 3
"""Steps that the error for the root of a run names."""


class ObjectAttempt(ObjectShare):
    """An attempt, made by `ObjectStore.begin`.

    Args:
        epoch: claim under which it writes, 0 for none.
        shared: other processes may join it once `mark` has returned.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        save_id: str,
        *,
        epoch: int,
        overwrite: bool,
        shared: bool,
    ) -> None:
        super().__init__(context, name, save_id, shared=shared)
        self._epoch = epoch
        self._overwrite = overwrite
        self._begun = time.monotonic(), time.time()
        self._sources: dict[str, str] = {}
        self._fixed: dict[str, bytes] = {}
        self._refusal: BackgroundTask[None] | None = None
        if not overwrite and not STEP_NAME.fullmatch(name):
            self._refusal = BackgroundTask(refuse_run(context.requests, name))

    async def mark(self) -> None:
        """Let other processes join the attempt."""
        await self._exchange(MARK, mark_of(self._save_id, socket.gethostname()))

    # ------------------------------------------------------------------------------------- files

    def source(self, path: str) -> str | None:
        """Return the object in which `put` stores the content of a fixed name."""
        if self._save_id in path:
            return None
        return self._sources.setdefault(path, fixed_path(self._save_id, len(self._sources)))

    async def put(self, path: str, *blocks: Body, in_record: bool = False) -> None:
        """Make the content of a file durable.

        A file without the save id in its path gets its name when the attempt has won. Until then
        its content is in the object `source(path)`, or with `in_record` only in the record.

        Raises:
            UsageError: the content is too long for one request.
        """
        self._sending.check()
        check_file(path, self.location)
        if sum(map(len, blocks)) > PUT_MAX_NBYTES:
            location = f"{self.location}/{path}"
            raise UsageError(
                f"{location}: the index would have more than the {PUT_MAX_NBYTES / MIB:.0f} MiB "
                "that one request may send; save fewer or larger chunks (chunk_nbytes)",
                location=location,
            )
        content = await self._context.owned(*blocks)
        source = self.source(path)
        if source is None or not in_record:
            await self._sending.send_named(join(self._name, source or path), content)
        if source is not None:
            self._fixed[path] = content

    # ----------------------------------------------------------------------------------- publish

    async def publish(self, record: bytes) -> None:
        """Write the record, after everything else. As `Attempt.publish`.

        Raises:
            CheckpointExistsError: a checkpoint, another object at the record's key, or the root
                of a run is here; it was left untouched.
            FencedError: another process took over the claim; the record may or may not count.
            SaveOutcomeUnknownError: it is unknown whether the claim was taken over.
            SaveError: the attempt is too old, or it is unknown whether the record arrived.
            StoreError: an earlier step failed; nothing is visible.
        """
        try:
            await self._context.background.named()
            self._sending.check_sealed(self._files)
            conditions = await self._context.probes.conditions(versions=self._overwrite)
            if self._refusal is not None:
                await self._refusal.result()
            self._check_age()
        except BaseException as error:
            await to_completion(cleaned_up(self.abort(), error))
            raise
        publication = Publication(
            self._context,
            self._name,
            self._save_id,
            record,
            self._fixed,
            conditions,
            self._sending.stored,
            self._epoch,
        )
        await to_completion(self._conclude(publication))

    async def _conclude(self, publication: Publication) -> None:
        """Write the record, and begin the background tasks that follow it."""
        try:
            replaced = await publication.commit(overwrite=self._overwrite)
            await self._check_claim()
        except BaseException as error:
            if publication.keep:
                self._sending.ended = True  # without removing anything
            else:
                await cleaned_up(self.abort(), error)
            raise
        self._sending.ended = True
        self._context.background.begin(self._finish(publication, replaced), naming=self._name)
        self._remove_later(
            self._exchanged | self._sending.orphans,
            "the checkpoint is committed; orphaned data objects and files exchanged by its "
            "processes",
        )

    async def _finish(self, publication: Publication, replaced: Record | None) -> None:
        """Write the fixed names, then those that earlier saves could not write."""
        background = self._context.background
        background.unnamed.add(self._name)
        try:
            if not await publication.finish():
                return
            background.unnamed.discard(self._name)
            if replaced is None:
                background.begin(publication.settle(None))
            else:
                await publication.settle(replaced)
            while background.unnamed:
                await repair_quietly(self._context, background.unnamed.pop())
        except Exception:  # no caller would see it
            logger.exception("%s: completing a committed checkpoint failed", self.location)

    async def _check_claim(self) -> None:
        """Check that the claim was not taken over before the record was written."""
        try:
            await self._context.claims.check(self._epoch, self.location, visible=None)
        except (StoreError, asyncio.CancelledError) as error:
            raise SaveOutcomeUnknownError(
                f"{self.location}: the record is written, but whether another process took over "
                f"the run before that is unknown: {str(error) or 'the save was cancelled'}. Look "
                "at latest_step(): if it is this step, it is saved",
                stage="commit",
                location=self.location,
            ) from error

    def _check_age(self) -> None:
        monotonic, wall = self._begun
        # A suspended machine stops the first clock; a person may set the second.
        age_s = max(time.monotonic() - monotonic, time.time() - wall)
        if age_s > MAX_AGE_S:
            raise SaveError(
                f"{self.location}: this save began {age_s / 3600:.1f} hours ago; saves older than "
                f"{MAX_AGE_S / 3600:.1f} hours are not committed, because 'asyncckpt gc' may have "
                "removed their data as leftovers. Nothing of it is visible; save again",
                stage="commit",
                location=self.location,
                expected=MAX_AGE_S,
                found=age_s,
            )

    async def _remove(self) -> None:
        if self._refusal is not None:
            await self._refusal.stop()
        await super()._remove()

    async def _removable(self) -> set[str]:
        return self._sending.keys | self._exchanged


async def refuse_run(requests: Requests, name: str) -> None:
    """Check that there are no steps below this name, by one request if there are none.

    With a record of its own, the root of a run would be read as that checkpoint, and its steps
    ignored. Passes if the credentials may not list.

    Raises:
        CheckpointExistsError: there are steps.
        StoreError: a request failed.
    """
    location = requests.location(name)
    with reported("looking for steps", location, stage="commit"):
        try:
            listed = await requests.list(name, recursive=False, limit=LISTED_MAX)
        except RequestError as error:
            if error.kind == "forbidden":
                return
            raise
        below = {entry.key.removeprefix(f"{name}/"): entry.is_prefix for entry in listed}
        if RECORD_NAME in below:
            return  # a checkpoint: the creation of the record reports it
        found = (path for path, is_prefix in below.items() if is_prefix)
        newest = sorted(filter(STEP_NAME.fullmatch, found), key=int)[-STEPS_MAX:]
        keys = [join(join(name, step), RECORD_NAME) for step in newest]
        committed = await together(map(requests.exists, keys))
    steps = [step for step, there in zip(newest, committed, strict=True) if there]
    if steps:
        shown = steps[-NAMED_STEPS:]
        raise CheckpointExistsError(
            f"{location}: the root of a run (it has step {', '.join(shown)}) exists here and was "
            f"left untouched; save a step of it with Checkpointer({location!r}), or choose "
            "another location",
            location=location,
            expected="nothing, or a checkpoint",
            found=tuple(shown),
        )
