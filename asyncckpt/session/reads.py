"""Reading the checkpoints of one root: which one is meant, and what it means if it goes away."""

# Rule 1: a name that is being read is counted, so that retention leaves it alone.
# Rule 2: deleted or replaced under our hands is not damage.

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Literal, TypeVar

from asyncckpt.checkpointer.arguments import guarded
from asyncckpt.checkpointer.reading import info_of, verify_checkpoint
from asyncckpt.checkpointer.restores import RestoreOutcome, RestoreRequest, run_restore
from asyncckpt.checkpointer.root import Root
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.checkpointer.steps import Steps
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineExceededError,
)
from asyncckpt.ports import CheckpointFiles
from asyncckpt.reports import CheckpointInfo, Progress, VerifyReport
from asyncckpt.stages.elsewhere import open_any

T = TypeVar("T")

Verb = Literal["restore", "inspect", "verify"]

Read = Callable[[CheckpointFiles, int | None], Awaitable[T]]
"""Files of a checkpoint, and its step -> what was made of them."""

PARTICIPLES: Mapping[Verb, str] = {
    "restore": "restored",
    "inspect": "inspected",
    "verify": "verified",
}


class ReadAccess:
    """What restores, inspects and verifies for one core. Used on its engine only.

    Each reads the checkpoint of a step, that of the newest one with None, or the one-shot
    checkpoint. One that was deleted or replaced meanwhile is a `CheckpointNotFoundError`; with
    None the next newest is read instead.
    """

    def __init__(self, runtime: Runtime, root: Root, steps: Steps) -> None:
        self._runtime = runtime
        self._root = root
        self._steps = steps
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each checkpoint is being read now, by name; no entry for those that are not."""
        return self._counts

    async def restore(self, step: int | None, request: RestoreRequest) -> RestoreOutcome:
        """What was asked for is restored.

        Raises:
            DeadlineExceededError: it took longer than the options allow.
        """
        deadline_s = request.options.deadline_s

        async def restore(files: CheckpointFiles, number: int | None) -> RestoreOutcome:
            try:
                async with asyncio.timeout(deadline_s):
                    return await run_restore(self._runtime, files, number, request)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{files.location}: the restore did not finish within {deadline_s} s and was "
                    "aborted; raise RestoreOptions.deadline_s",
                    location=files.location,
                ) from None

        return await self._read("restore", step, restore)

    async def inspect(self, step: int | None) -> CheckpointInfo:
        """What the checkpoint holds, from its metadata."""

        async def inspect(files: CheckpointFiles, number: int | None) -> CheckpointInfo:
            return await info_of(await open_any(files), number)

        return await self._read("inspect", step, inspect)

    async def verify(
        self, step: int | None, progress: Callable[[Progress], None] | None
    ) -> VerifyReport:
        """Every byte of the checkpoint was read and checked."""
        progress = guarded(progress)

        async def verify(files: CheckpointFiles, number: int | None) -> VerifyReport:
            report = await verify_checkpoint(self._runtime, files, number, progress)
            if not report.ok:
                await _check_unchanged(files, "verify")
            return report

        return await self._read("verify", step, verify)

    async def _read(self, verb: Verb, step: int | None, read: Read[T]) -> T:
        if self._root.name:
            name = self._root.name
            return await self._read_one(verb, name, None, self._root.store.files(name), read)
        if step is not None:
            files = self._root.store.files(str(step))
            return await self._read_one(verb, str(step), step, files, read)
        newest = await self._steps.newest()
        again = True
        while newest is not None:
            tried, files = newest
            try:
                return await self._read_one(verb, str(tried), tried, files, read)
            except CheckpointNotFoundError:
                # Deleted while it was being read: the next one is as good as newest. Or replaced:
                # then it is there, and is tried once more.
                newest = await self._steps.newest(below=tried + again)
                again = newest is not None and newest[0] != tried
        raise CheckpointNotFoundError(
            f"{self._root.url}: there is no checkpoint to {verb}; latest_step() tells beforehand",
            location=self._root.url,
        )

    async def _read_one(
        self, verb: Verb, name: str, step: int | None, files: CheckpointFiles, read: Read[T]
    ) -> T:
        with self._counted(name):
            try:
                return await read(files, step)
            except CorruptCheckpointError as error:
                await _check_unchanged(files, verb, error)
                raise
            finally:
                await files.close()

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        self._counts[name] += 1
        try:
            yield
        finally:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]


async def _check_unchanged(
    files: CheckpointFiles, verb: Verb, damage: CorruptCheckpointError | None = None
) -> None:
    """The checkpoint is still the one that was read, or nobody can tell.

    Raises:
        CheckpointNotFoundError: it was deleted or replaced, which is why it looks damaged.
    """
    try:
        changed = await files.changed()
    except AsyncCheckpointError:
        return
    if changed is None:
        return
    next_step = f"{verb} another step" if changed == "deleted" else f"{verb} it again"
    raise CheckpointNotFoundError(
        f"{files.location}: the checkpoint was {changed} while being {PARTICIPLES[verb]}; "
        f"{next_step}",
        location=files.location,
    ) from damage
