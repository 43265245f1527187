"""One attempt to save one checkpoint on an object store."""

# Rule 1: before the record, an attempt writes only names that carry its save id. What is put
#   under other names is kept until it has won, and its contents in objects that carry the id.
# Rule 2: it ends with exactly one of `publish` and `abort`; both run to their end, however often
#   whoever waits for them is cancelled.
# Rule 3: after a failure every further call raises it.

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from asyncckpt.errors import AsyncCheckpointError, SaveError, StoreError, UsageError
from asyncckpt.flow.shield import to_completion, uninterrupted
from asyncckpt.stores.layout import path_parts
from asyncckpt.stores.objects.client import RequestError
from asyncckpt.stores.objects.context import Context, owned
from asyncckpt.stores.objects.datafile import ObjectDataFile, open_file
from asyncckpt.stores.objects.failures import store_error
from asyncckpt.stores.objects.fixed import FixedContents
from asyncckpt.stores.objects.layout import RECORD, join
from asyncckpt.stores.objects.publish import Publication
from asyncckpt.stores.objects.uploads import Sending, abort_uploads

log = logging.getLogger("asyncckpt.stores")

ABORT_S = 120.0
"""How long an abort may take: what a dead store holds is removed by `collect`."""


class ObjectAttempt:
    """An attempt, made by `ObjectStore.begin`.

    Args:
        context: of the store.
        name: the checkpoint.
        save_id: 32 hex digits.
        overwrite: replace what stands there.
        max_age_s: older than this it does not publish.
        conditional: awaited before the record; whether the store creates conditionally.
        begin_settling: takes what is to be done once the checkpoint stands, and returns at once.
        unfinished: called when fixed names could not be written.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        save_id: str,
        *,
        overwrite: bool,
        max_age_s: float,
        conditional: Callable[[], Awaitable[bool]],
        begin_settling: Callable[[Coroutine[Any, Any, None]], None],
        unfinished: Callable[[str], None],
    ) -> None:
        self.location = context.requests.location(name)
        self._context = context
        self._name = name
        self._save_id = save_id
        self._overwrite = overwrite
        self._max_age_s = max_age_s
        self._conditional = conditional
        self._begin_settling = begin_settling
        self._unfinished = unfinished
        self._begun = time.monotonic(), time.time()
        self._answers = context.requests.answers
        self._sending = Sending(context, name)
        self._fixed = FixedContents(context, name, save_id)
        self._files: list[ObjectDataFile] = []
        self._publication: Publication | None = None

    def __repr__(self) -> str:
        return f"ObjectAttempt({self.location!r}, {self._save_id})"

    # ------------------------------------------------------------------------------------- files

    async def create(
        self, path: str, *, nbytes: int, window_nbytes: int | None = None
    ) -> ObjectDataFile:
        """A new data file is open for writing; no request is made before the first write.

        Args:
            path: relative path, which carries the save id.
            nbytes: expected size, which is exact with `window_nbytes`.
            window_nbytes: as `ports.Attempt.create`; see `datafile` for what is sent.

        Raises:
            UsageError: the path leaves the checkpoint, is the record's, or another attempt could
                write it too; or no such file can be sent.
        """
        self._sending.check()
        self._check_path(path)
        if self._save_id not in path:
            raise UsageError(
                f"{path!r}: another attempt could write this name too; put the save id "
                f"{self._save_id} into it",
                location=self.location,
                found=path,
            )
        file = open_file(self._sending, path, nbytes, window_nbytes)
        self._files.append(file)
        return file

    async def put(self, path: str, data: bytes | memoryview) -> None:
        """The content of a small file is durable.

        Without the save id in its path, it gets its name when the attempt has won.

        Raises:
            UsageError: the path leaves the checkpoint or is the record's.
            StoreError: it could not be written; the attempt cannot be continued.
        """
        self._sending.check()
        self._check_path(path)
        content = await owned(self._context, data)
        key = join(self._name, path)
        try:
            if self._save_id in path:
                self._sending.keys.add(key)
                await self._context.requests.replace(key, content)
            else:
                await self._fixed.put(path, content)
        except RequestError as error:
            raise self._sending.failed(f"writing {len(content)} bytes", key, error) from error

    def _check_path(self, path: str) -> None:
        if path_parts(path) is None or path == RECORD:
            raise UsageError(
                f"{path!r} cannot be a file of a checkpoint: pass a relative path without '..' "
                f"that is not {RECORD!r}",
                location=self.location,
                found=path,
            )

    # ----------------------------------------------------------------------------------- publish

    async def publish(self, record: bytes) -> None:
        """The checkpoint is visible and durable, with `record` written after everything else.

        If another's checkpoint stands there, nothing of the attempt is left.

        Cancellation: shielded; the outcome is awaited, and returned or raised instead.

        Raises:
            CheckpointExistsError: the name is taken; nothing of the other checkpoint was touched.
            SaveError: the attempt is too old; or whether the record arrived is unknown.
            StoreError: an earlier step failed; nothing is visible.
        """
        await to_completion(self._conclude(record))

    async def _conclude(self, record: bytes) -> None:
        try:
            await self._publish(record)
        except BaseException as error:
            if self._publication is not None and self._publication.keep:
                self._sending.ended = True  # and everything stays where it is
                raise
            try:
                await self.abort()
            except AsyncCheckpointError as failure:
                error.add_note(f"cleaning up failed too: {failure}")
            raise

    async def _publish(self, record: bytes) -> None:
        self._sending.check()
        for file in self._files:
            if not file.sealed:
                raise UsageError(
                    f"{file.path}: the data file is not sealed", location=self.location
                )
        conditional = await self._conditional()
        self._check_age()
        publication = self._publication = Publication(
            self._context, self._name, self._save_id, record, self._fixed.files
        )
        replaced = None
        if self._overwrite:
            replaced = await publication.replace(conditional=conditional)
        elif conditional:
            await publication.create()
        else:
            await publication.create_unprotected()
        self._sending.ended = True
        complete = await publication.finish(self._sending.orphans)
        if not complete:
            self._unfinished(self._name)
        uploads = self._sending.sent_in_parts
        if replaced is not None:
            await publication.settle(replaced, uploads)
        elif complete or uploads:
            self._begin_settling(publication.settle(None, uploads))

    def _check_age(self) -> None:
        monotonic, wall = self._begun
        # A suspended machine stops the one clock, a person sets the other.
        age_s = max(time.monotonic() - monotonic, time.time() - wall)
        if age_s > self._max_age_s:
            raise SaveError(
                f"{self.location}: this save began {age_s / 3600:.1f} hours ago, and one that is "
                f"older than {self._max_age_s / 3600:.1f} hours is not committed, because "
                "'asyncckpt gc' may have taken its data for leftovers; nothing of it is visible. "
                "Save again",
                stage="commit",
                location=self.location,
                expected=self._max_age_s,
                found=age_s,
            )

    # ------------------------------------------------------------------------------------- abort

    async def abort(self) -> None:
        """Nothing of the attempt is left; nothing happens if it has ended.

        Cancellation: finishes, then raises.

        Raises:
            StoreError: something could not be removed; `ObjectStore.collect` does so later.
        """
        if self._sending.ended:
            return
        self._sending.ended = True
        await uninterrupted(self._remove())

    async def _remove(self) -> None:
        bound_s = self._context.requests.clean_up_s(ABORT_S, answers=self._answers)
        try:
            async with asyncio.timeout(bound_s):
                # In this order: a completion that is still on its way then finds no upload. An
                # upload whose abort was refused is looked for once more, and keeps no object here.
                try:
                    await self._abort_uploads()
                finally:
                    keys = self._sending.keys | self._fixed.keys
                    if keys:
                        await self._context.requests.delete(sorted(keys))
        except TimeoutError:
            raise StoreError(
                f"{self.location}: removing what an aborted save has written did not end within "
                f"{bound_s:g} s; 'asyncckpt gc' removes it later",
                location=self.location,
                retryable=True,
            ) from None
        except RequestError as error:
            raise store_error(
                "removing what an aborted save has written", self.location, error
            ) from error

    async def _abort_uploads(self) -> None:
        await abort_uploads(self._sending)
