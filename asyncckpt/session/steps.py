"""The steps below one root: found by their records, deleted by hand or by a retention policy."""

# Rule 1: a step is what has a valid commit record; names and directories alone are none.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Mapping

from asyncckpt.checkpointer.retain import History
from asyncckpt.checkpointer.root import Root
from asyncckpt.checkpointer.saves import exists, record_of
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from asyncckpt.flow.shield import leading_error
from asyncckpt.format.record import STEP_NAME
from asyncckpt.options import MAX_RECORD_NBYTES
from asyncckpt.ports import CheckpointFiles
from asyncckpt.reports import SaveReport
from asyncckpt.stages.opened import RECORD

logger = logging.getLogger("asyncckpt")


class PeekedFiles:
    """Files of a checkpoint whose record was read, to see whether it is one.

    Attributes:
        location: as of the files.
        capabilities: likewise.
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._files!r})"

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """As `CheckpointFiles.read`; the record as it was found, when first asked for."""
        record = self._record
        if path != RECORD or record is None:
            return await self._files.read(path, max_nbytes=max_nbytes)
        self._record = None
        return record


class Steps:
    """The steps below one root, as they are at each call: other processes add and delete some.

    Args:
        root: where they are.
        history: decides which of them stay after each save; None: all.
    """

    def __init__(self, root: Root, history: History | None) -> None:
        self._root = root
        self._history = history

    async def found(self) -> list[int]:
        """Steps with a valid commit record, ascending."""
        store = self._root.store
        waiting = iter(await self._candidates())
        found: list[int] = []

        async def look() -> None:
            found.extend([step for step in waiting if await exists(store, str(step))])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(store.capabilities.reads):
                    group.create_task(look())
        except BaseExceptionGroup as errors:
            raise leading_error(errors) from None
        return sorted(found)

    async def latest(self) -> int | None:
        """The highest step with a valid commit record."""
        newest = await self.newest()
        if newest is None:
            return None
        step, files = newest
        await files.close()
        return step

    async def newest(self, below: int | None = None) -> tuple[int, CheckpointFiles] | None:
        """The highest step with a valid commit record, below `below` if given, and its files.

        The record is not read a second time by who asks these files for it; who has got them
        closes them.
        """
        for step in reversed(await self._candidates()):
            if below is None or step < below:
                files = self._root.store.files(str(step))
                try:
                    record = await record_of(files)
                    if record is not None:
                        return step, PeekedFiles(files, record)
                except BaseException:
                    await files.close()
                    raise
                await files.close()
        return None

    async def _candidates(self) -> list[int]:
        return sorted(
            int(name) for name in await self._root.store.names() if STEP_NAME.fullmatch(name)
        )

    async def delete(self, name: str) -> None:
        """The checkpoint is gone; what has no record is none, and is left alone.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of this name.
        """
        store, location = self._root.store, f"{self._root.url}/{name}"
        files = store.files(name)
        try:
            await files.read(RECORD, max_nbytes=MAX_RECORD_NBYTES)
        except CorruptCheckpointError:
            pass  # a damaged checkpoint is one that can be deleted
        except CheckpointNotFoundError:
            raise CheckpointNotFoundError(
                f"{location}: there is no checkpoint to delete", location=location
            ) from None
        finally:
            await files.close()
        await store.delete(name)

    async def delete_after(self, step: int) -> list[int]:
        """All steps above `step` are gone, the highest first; returns them, ascending."""
        deleted: list[int] = []
        for number in reversed(await self.found()):
            if number <= step:
                break
            with contextlib.suppress(CheckpointNotFoundError):  # somebody else was faster
                await self._root.store.delete(str(number))
                deleted.append(number)
        return deleted[::-1]

    async def retain(self, report: SaveReport, reading: Mapping[str, int]) -> SaveReport:
        """The steps that the policy lets go after a save are gone; the report tells which.

        Args:
            report: of the save, which is durable whatever happens here.
            reading: names that are being read, which stay, with their counts.
        """
        if self._history is None or report.step is None:
            return report
        deleted: list[int] = []
        try:
            deleted, notes = await self._history.retain(
                self._root.store, await self._candidates(), report.step, reading
            )
        except AsyncCheckpointError as error:
            # The save itself is durable.
            logger.warning("no step was deleted: %s", error)
            notes = [f"no step was deleted: {error}"]
        return dataclasses.replace(
            report, deleted_steps=tuple(deleted), notes=(*report.notes, *notes)
        )
