"""What a location on the command line stands for: a checkpoint, or the root of a run."""

# Rule: paths and URLs are told apart here and nowhere else on the command line.

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import asyncckpt.blocking as blocking
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import AsyncCheckpointError, CheckpointNotFoundError, UsageError
from asyncckpt.flow.shield import leading_error
from asyncckpt.format.record import STEP_NAME
from asyncckpt.options import MIN_BUDGET_NBYTES
from asyncckpt.ports import Store
from asyncckpt.reports import CheckpointInfo, Progress, VerifyReport
from asyncckpt.stages.elsewhere import MAX_ENTRIES
from asyncckpt.stores.objects.urls import is_url, parse_url

RECORD = "checkpoint.json"

Options = Mapping[str, Any] | None
"""What `--storage-option` said; for URLs only."""

LOOKED_AT_ONCE = 16
"""Steps of a run that are inspected at the same time: each takes two round trips to a bucket."""

T = TypeVar("T")


@contextlib.contextmanager
def run_at(root: str, options: Options) -> Iterator[blocking.Checkpointer]:
    """The run at a root, looked at without sweeping it."""
    run = blocking.Checkpointer(root, storage_options=options)
    try:
        yield run
    finally:
        run.close()


def full_name(location: str) -> str:
    """The location as reports name it: an absolute path, or the URL in its normal form."""
    if not is_url(location):
        return os.path.abspath(location.removeprefix("file://"))
    return str(parse_url(location))


def child(root: str, step: int) -> str:
    """The location of a step."""
    return f"{root.rstrip('/')}/{step}"


def step_of(location: str) -> tuple[str, int] | None:
    """Root and step of a location that ends in a step's number; None for others."""
    root, separator, name = full_name(location).rpartition("/")
    # What follows `//` in a URL is a bucket or host.
    if not separator or root.endswith(":/") or not STEP_NAME.fullmatch(name):
        return None
    return root or "/", int(name)


def is_bucket(location: str) -> bool:
    """Whether a URL names a whole bucket, which may be a root and is no checkpoint."""
    if not is_url(location):
        return False
    return not parse_url(location).parts


def steps_of(run: blocking.Checkpointer, root: str, options: Options) -> list[int]:
    """The steps of a run, ascending.

    Raises:
        CheckpointNotFoundError: the directory does not exist, or is itself a checkpoint.
    """
    check_directory(root)
    steps = run.steps()
    if not steps and has_record(root, options):
        raise CheckpointNotFoundError(
            f"{root}: this is one checkpoint and not the root of a run; look at it with "
            f"`asyncckpt show {root}`",
            location=root,
        )
    return steps


def inspect_steps(root: str, options: Options) -> list[CheckpointInfo | AsyncCheckpointError]:
    """What every step of a run holds, or why that is not known, ascending.

    Raises:
        AsyncCheckpointError: as `steps_of`.
    """
    with run_at(root, options) as run:
        steps = steps_of(run, root, options)

        def look(step: int) -> CheckpointInfo | AsyncCheckpointError | None:
            try:
                return run.inspect(step)
            except CheckpointNotFoundError:
                return None  # deleted since it was listed
            except AsyncCheckpointError as error:
                return error

        with ThreadPoolExecutor(LOOKED_AT_ONCE) as threads:
            return [found for found in threads.map(look, steps) if found is not None]


def check_directory(root: str) -> None:
    """A local root is a directory; of URLs nothing tells but what is below them.

    Raises:
        CheckpointNotFoundError: it is not.
    """
    if not is_url(root) and not os.path.isdir(root.removeprefix("file://")):
        raise CheckpointNotFoundError(f"{root}: there is no such directory", location=root)


def inspect_step(root: str, step: int, options: Options) -> CheckpointInfo:
    """What a step of a run holds."""
    with run_at(root, options) as run:
        return run.inspect(step)


def inspect_location(location: str, options: Options) -> CheckpointInfo:
    """What a checkpoint holds; the newest step where the location is the root of a run.

    Raises:
        CheckpointNotFoundError: the location is neither.
    """
    try:
        place = step_of(location)
        if place is not None:
            return inspect_step(*place, options)
        if is_bucket(location):
            raise CheckpointNotFoundError(f"{location}: there is no checkpoint", location=location)
        return blocking.inspect(location, storage_options=options)
    except CheckpointNotFoundError:
        steps = candidates(location, options)
        if not steps:
            raise
        return inspect_step(location, steps[-1], options)


def candidates(root: str, options: Options) -> list[int]:
    """Steps below a root that have a record, valid or not, ascending.

    Where none has, the steps may be those of another library.
    """
    if is_url(root):
        return _at_store(root, options, _candidates)
    try:
        names = os.listdir(root.removeprefix("file://"))
    except OSError:
        return []
    steps = sorted(int(name) for name in names if STEP_NAME.fullmatch(name))
    ours = [step for step in steps if has_record(child(root, step), options)]
    return ours or steps


def verify_step(
    root: str, step: int, options: Options, progress: Callable[[Progress], None] | None
) -> VerifyReport:
    """Every byte of a step was read and checked."""
    with run_at(root, options) as run:
        return run.verify(step, progress=progress)


def delete_step(root: str, step: int, options: Options) -> None:
    """A step of a run is gone."""
    with run_at(root, options) as run:
        run.delete(step)


def removable(location: str, options: Options) -> tuple[str, int]:
    """Root and step of what is to be removed, which has a record.

    Raises:
        UsageError: the location does not end in the number of a step.
        CheckpointNotFoundError: there is no checkpoint.
    """
    place = step_of(location)
    if place is None:
        by_hand = "the tools of its store, checkpoint.json first" if is_url(location) else "`rm -r`"
        raise UsageError(
            f"{location}: rm removes steps of a run, and this path does not end in the number of "
            f"one; remove a checkpoint of another name with {by_hand}",
            location=location,
        )
    # Without a record it is no checkpoint, but a directory whose name happens to be a number.
    if not has_record(location, options):
        raise CheckpointNotFoundError(
            f"{location}: there is no checkpoint to remove", location=location
        )
    return place


def has_record(location: str, options: Options) -> bool:
    """Whether a directory or prefix has a commit record, valid or not."""
    if not is_url(location):
        return os.path.isfile(os.path.join(location.removeprefix("file://"), RECORD))
    root, separator, name = full_name(location).rpartition("/")
    if not separator or is_bucket(location):
        return False
    return _at_store(root, options, lambda store: _has_record(store, name))


# -- on an engine of its own


def _at_store(root: str, options: Options, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    runtime = Runtime("asyncckpt-cli", host_memory_nbytes=MIN_BUDGET_NBYTES)
    try:
        store = runtime.store(root, direct_io="auto", storage_options=options)
        return runtime.engine.submit(lambda: work(store)).result()
    finally:
        runtime.close()


async def _has_record(store: Store, name: str) -> bool:
    files = store.files(name)
    try:
        entries = await files.entries(max_entries=MAX_ENTRIES)
    except CheckpointNotFoundError:
        return False
    finally:
        await files.close()
    return any(entry.name == RECORD and not entry.is_directory for entry in entries)


async def _candidates(store: Store) -> list[int]:
    steps = sorted(int(name) for name in await store.names() if STEP_NAME.fullmatch(name))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_has_record(store, str(step))) for step in steps]
    except BaseExceptionGroup as errors:
        raise leading_error(errors) from None
    return [step for step, task in zip(steps, tasks, strict=True) if task.result()] or steps
