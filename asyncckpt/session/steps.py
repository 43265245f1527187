"""The steps below one root: how to find them by their records, and how to delete them."""

# Rule 1: a step is an entry with a valid commit record; a name or directory alone is not a step.
# Rule 2: if a listed step was deleted before its record was read, another process may have saved a
#   newer step before that. The steps are listed again until no further step lacks its record.

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from functools import partial

from asyncckpt.checkpoint.open import library_of
from asyncckpt.errors import AsyncCheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.flow.shield import mapped, together, uninterrupted
from asyncckpt.format.foreign.orbax_read import step_number
from asyncckpt.format.record import RECORD_NAME, STEP_NAME
from asyncckpt.log import logger
from asyncckpt.options import MAX_RECORD_NBYTES
from asyncckpt.ports import CheckpointFiles, Removal, Store
from asyncckpt.save.save import record_of, stored_record
from asyncckpt.session.claiming import Claiming
from asyncckpt.session.root import Root
from asyncckpt.stores.paths import below

LISTED_STEPS = 10
"""Newest steps that an error lists."""


class PeekedFiles:
    """Files of a checkpoint whose record has already been read, to find whether it is valid.

    The first read of the record returns it, which saves a round trip to an object store.
    """

    def __init__(self, files: CheckpointFiles, record: bytes) -> None:
        self.location = files.location
        self.capabilities = files.capabilities
        self.read_into = files.read_into
        self.entries = files.entries
        self.reads = files.reads
        self.changed = files.changed
        self.close = files.close
        self._files = files
        self._record: bytes | None = record

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """Read a small file, the record at first from memory."""
        record = self._record
        if path != RECORD_NAME or record is None:
            return await self._files.read(path, max_nbytes=max_nbytes)
        self._record = None
        return record


async def foreign_steps(store: Store, names: Iterable[str] | None = None) -> str:
    """Describe steps of other libraries, among all or these names: ": …", or "" if none."""
    names = await store.names() if names is None else names

    async def library(name: str) -> str | None:
        files = store.files(name)
        try:
            return await library_of(files)
        except AsyncCheckpointError:
            return None  # the caller reports an error of its own
        finally:
            await files.close()

    looked = sorted((n for n in names if step_number(n) >= 0), key=step_number)[-LISTED_STEPS:]
    libraries = await mapped(library, looked, store.capabilities.reads)
    found = {name: wrote for name, wrote in zip(looked, libraries, strict=True) if wrote}
    if not found:
        return ""
    last = list(found)[-1]
    last = last if STEP_NAME.fullmatch(last) else repr(below(store.url, last))
    are = "is a step" if len(found) == 1 else "are steps"
    return (
        f": {', '.join(found)} {are} of {' and '.join(sorted(set(found.values())))}, which "
        f"asyncckpt reads, as by restore({last}), but does not list, count or delete"
    )


class Steps:
    """The steps below one root at the time of each call: other processes add and delete steps."""

    def __init__(self, root: Root, claims: Claiming) -> None:
        self._root = root
        self._claims = claims
        self._newest: int | None = None
        self._names: list[str] = []  # of the last listing
        self._damaged: set[int] = set()
        self._warned = False

    def saved(self, step: int | None) -> None:
        """Note a saved step, which may be the newest."""
        if step is not None and (self._newest is None or step > self._newest):
            self._newest = step

    async def found(self, above: int = -1) -> list[int]:
        """Return the steps above a number that have a valid commit record, ascending."""
        store, valid, missing = self._root.store, set[int](), set[int]()
        while True:
            steps = [step for step in await self.candidates() if step > above]
            unknown = [step for step in steps if step not in valid]
            records = await mapped(partial(stored_record, store), unknown, store.capabilities.reads)
            valid.update(itertools.compress(unknown, records))
            before, missing = missing, set(steps) - valid
            if missing <= before:
                return [step for step in steps if step in valid]

    async def latest(self) -> int | None:
        """Return the highest step with a valid commit record."""
        newest = await self.newest()
        if newest is None:
            # The training loop would begin again at step 0.
            if not self._warned and (text := await self.foreign()):
                self._warned = True
                logger.warning("%s: there is no step to continue from%s", self._root.url, text)
            return None
        step, files = newest
        await files.close()
        return step

    async def newest(self, below: int | None = None) -> tuple[int, CheckpointFiles] | None:
        """Return the highest step with a valid commit record, below `below`, and its files.

        Reads the record of the last newest step while listing. The caller closes the files.

        Raises:
            UsageError: the root is itself a checkpoint.
        """
        likely = self._newest if below is None else None
        missing: set[int] = set()
        while True:
            before, (missing, newest) = missing, await self._highest(below, likely)
            if missing <= before:
                break
            if newest is not None:
                await newest[1].close()
        if newest is not None and below is None:
            self._newest = newest[0]
        return newest

    async def foreign(self) -> str:
        """Describe those of other libraries in the last listing, as `foreign_steps`."""
        return await foreign_steps(self._root.store, self._names)

    async def _highest(
        self, below: int | None, likely: int | None
    ) -> tuple[set[int], tuple[int, CheckpointFiles] | None]:
        """Return the highest step of one listing, after the steps above it without a record.

        Reads the record of the `likely` step while listing.
        """
        peeked: dict[int | None, CheckpointFiles | None] = {}
        missing: set[int] = set()

        async def peek(step: int | None) -> None:
            peeked[step] = None if step is None else await self._peeked(step)

        try:
            steps, _ = await together((self.candidates(), peek(likely)))
            for step in reversed(steps or ()):
                if below is None or step < below:
                    if step not in peeked:
                        await peek(step)
                    if (files := peeked.pop(step)) is not None:
                        return missing, (step, files)
                    missing.add(step)
            return missing, None
        finally:
            for other in peeked.values():
                if other is not None:
                    await other.close()

    async def _peeked(self, step: int) -> CheckpointFiles | None:
        """Return the files of a step, None without a valid commit record."""
        files, record = self._root.store.files(str(step)), None
        try:
            record = await record_of(files, partial(self._warn_of_damage, step))
        finally:
            if record is None:
                await files.close()
        return None if record is None else PeekedFiles(files, record)

    def _warn_of_damage(self, step: int) -> None:
        if step not in self._damaged:
            self._damaged.add(step)
            logger.warning(
                "%s: the commit record is damaged, so this step is skipped as if it did not exist",
                self._root.location(step),
            )

    async def candidates(self) -> list[int]:
        """Return the numbers of the entries that may be steps, ascending.

        Raises:
            UsageError: there is none, and the root is itself a checkpoint.
        """
        names = self._names = await self._root.store.names()
        steps = sorted([int(name) for name in names if STEP_NAME.fullmatch(name)])
        if not steps and RECORD_NAME in names:
            raise self._root.checkpoint_error()
        return steps

    async def delete(self, step: int) -> None:
        """Delete a step.

        Raises:
            CheckpointNotFoundError: the step has no record; nothing was deleted.
            FencedError: another process has taken over the run.
        """
        store, location = self._root.store, self._root.location(step)
        files = store.files(str(step))
        try:
            await files.read(RECORD_NAME, max_nbytes=MAX_RECORD_NBYTES)
        except CorruptCheckpointError:
            pass  # a damaged checkpoint can be deleted
        except CheckpointNotFoundError:
            text = f"{location}: there is no checkpoint to delete"
            text += await foreign_steps(store, [str(step)])
            raise CheckpointNotFoundError(text, location=location) from None
        finally:
            await files.close()
        async with self._claims.held() as epoch:
            await self._delete(step, epoch)

    async def unlist(self, step: int, seal: bytes) -> Removal:
        """Make a step invisible, as `Store.unlist`."""
        async with self._claims.held() as epoch:
            return await self._root.store.unlist(str(step), epoch=epoch, seal=seal)

    async def delete_after(self, step: int) -> list[int]:
        """Delete all steps above `step`, the highest first; return them, ascending."""
        deleted: list[int] = []
        async with self._claims.held() as epoch:
            for number in reversed(await self.found(above=step)):
                with contextlib.suppress(CheckpointNotFoundError):  # another process was faster
                    await self._delete(number, epoch)
                    deleted.append(number)
        return deleted[::-1]

    async def _delete(self, step: int, epoch: int) -> None:
        """Unlist a step, then remove its bytes.

        Cancellation: finishes, then raises.
        """

        async def delete() -> None:
            await (await self._root.store.unlist(str(step), epoch=epoch))()

        await uninterrupted(delete())
        logger.info("deleted %s", self._root.location(step))
