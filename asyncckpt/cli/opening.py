"""What a path on the command line stands for: a checkpoint, or the root of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import asyncckpt.blocking as blocking
from asyncckpt.errors import CheckpointNotFoundError, UsageError
from asyncckpt.reports import CheckpointInfo, Progress, VerifyReport

RECORD = "checkpoint.json"

_STEP = re.compile(r"0|[1-9][0-9]{0,18}")


def step_of(path: str) -> tuple[str, int] | None:
    """Root and step of a path that ends in a step's number; None for other paths."""
    if "://" in path.removeprefix("file://"):
        return None
    root, name = os.path.split(os.path.abspath(path.removeprefix("file://")))
    return (root, int(name)) if _STEP.fullmatch(name) else None


def steps_of(root: str) -> list[int]:
    """The steps of a run, ascending.

    Raises:
        CheckpointNotFoundError: the directory does not exist, or is itself a checkpoint.
    """
    if is_directory(root) is False:
        raise CheckpointNotFoundError(f"{root}: there is no such directory", location=root)
    run = blocking.Checkpointer(root)
    try:
        steps = run.steps()
    finally:
        run.close()
    if not steps and has_record(root):
        raise CheckpointNotFoundError(
            f"{root}: this is one checkpoint and not the root of a run; look at it with "
            f"`asyncckpt show {root}`",
            location=root,
        )
    return steps


def inspect_step(root: str, step: int) -> CheckpointInfo:
    """What a step of a run holds."""
    run = blocking.Checkpointer(root)
    try:
        return run.inspect(step)
    finally:
        run.close()


def inspect_path(path: str) -> CheckpointInfo:
    """What a checkpoint holds; the newest step where the path is the root of a run.

    Raises:
        CheckpointNotFoundError: the path is neither.
    """
    try:
        place = step_of(path)
        return blocking.inspect(path) if place is None else inspect_step(*place)
    except CheckpointNotFoundError:
        steps = candidates(path)
        if not steps:
            raise
        return inspect_step(path, steps[-1])


def candidates(root: str) -> list[int]:
    """Steps below a directory that have a record, valid or not, ascending.

    Where none has, the steps may be those of another library.
    """
    try:
        names = os.listdir(root.removeprefix("file://"))
    except OSError:
        return []
    steps = sorted(int(name) for name in names if _STEP.fullmatch(name))
    ours = [step for step in steps if has_record(os.path.join(root, str(step)))]
    return ours or steps


def verify_step(root: str, step: int, progress: Callable[[Progress], None] | None) -> VerifyReport:
    """Every byte of a step was read and checked."""
    run = blocking.Checkpointer(root)
    try:
        return run.verify(step, progress=progress)
    finally:
        run.close()


def delete_step(root: str, step: int) -> None:
    """A step of a run is gone."""
    run = blocking.Checkpointer(root)
    try:
        run.delete(step)
    finally:
        run.close()


def removable(path: str) -> tuple[str, int]:
    """Root and step of what is to be removed, which has a record.

    Raises:
        UsageError: the path does not end in the number of a step.
        CheckpointNotFoundError: there is no checkpoint.
    """
    place = step_of(path)
    if place is None:
        raise UsageError(
            f"{path}: rm removes steps of a run, and this path does not end in the number of one; "
            "remove a checkpoint of another name with `rm -r`",
            location=path,
        )
    # Without a record it is no checkpoint, but a directory whose name happens to be a number.
    if not has_record(path):
        raise CheckpointNotFoundError(f"{path}: there is no checkpoint to remove", location=path)
    return place


def has_record(path: str) -> bool:
    """Whether a directory has a commit record, valid or not."""
    return os.path.isfile(os.path.join(path.removeprefix("file://"), RECORD))


def is_directory(path: str) -> bool | None:
    """Whether a local path is a directory; None for URLs, about which the library decides."""
    local = path.removeprefix("file://")
    return None if "://" in local else os.path.isdir(local)
