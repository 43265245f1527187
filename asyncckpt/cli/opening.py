"""Locations and storage options on the command line.

A location is a checkpoint or the root of a run, as a path or URL.
"""

# Rule 1: no other module of the command line distinguishes paths from URLs.
# Rule 2: a value of `--storage-option`, which may be a secret, is never printed, nor is text that
#   may contain one.

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Self, TypeVar

import typer

import asyncckpt.blocking as blocking
from asyncckpt.arguments import absolute, check_path
from asyncckpt.cli.terminal import complain
from asyncckpt.convert.source import is_bucket
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.shield import together
from asyncckpt.format.record import RECORD_NAME, STEP_NAME
from asyncckpt.options import MAX_ENTRIES
from asyncckpt.ports import Claim, Store
from asyncckpt.reports import CheckpointInfo
from asyncckpt.runtime import place_of
from asyncckpt.session.session import Session
from asyncckpt.session.steps import foreign_steps
from asyncckpt.stores.local.failures import reported
from asyncckpt.stores.objects.clients.urls import is_url, parse_url, without_scheme

StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Option of a URL's client, such as endpoint_url=…; JSON or text; repeatable.",
    ),
]

Options = Mapping[str, Any] | None
"""The values of `--storage-option`, for URLs only."""

LOOKED_AT_ONCE = 16
"""Steps of a run inspected concurrently: each takes two round trips to a bucket."""

_CREDENTIAL = re.compile("key|secret|token|user|pass|account|project|profile")
"""Part of the names of options that are text even if they look like numbers."""

T = TypeVar("T")


def storage_options(words: Sequence[str] | None) -> Options:
    """Return the options by key, None without words; a value that is not JSON is text.

    So is a number of a credential: keys and passwords may consist of digits.

    Raises:
        UsageError: a word is not KEY=VALUE, a key is given twice, or a value is a constant of
            Python, which as text would count as true.
    """
    options: dict[str, Any] = {}
    for word in words or ():
        key, separator, text = word.partition("=")
        if not separator or not key.isidentifier():
            raise UsageError("--storage-option: pass KEY=VALUE, for example profile=training")
        if key in options:
            raise UsageError(f"--storage-option: {key} is given twice", found=key)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if _CREDENTIAL.search(key):
            value = text if type(value) in (int, float) else value
        elif text in ("True", "False", "None"):
            raise UsageError(f"--storage-option: {key}: write true, false or null, as in JSON")
        options[key] = value
    return options or None


class Opened(blocking.Checkpointer):
    """A run, or a single checkpoint (`one_shot`), opened for one command.

    Alone: variables of a launcher in this shell mean nothing. Entering does not repair the run.
    """

    def __init__(self, location: str, options: Options, *, one_shot: bool = False) -> None:
        self.location = location
        self._session = Session(
            location, one_shot=one_shot, storage_options=options, coordinator="single"
        )

    def __enter__(self) -> Self:
        return self

    def at_store(self, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work` on the store."""
        return self._session.call(lambda: work(self._session.root.store)).result()


def open_checkpoint(location: str, options: Options) -> tuple[Opened, int | None]:
    """Open a step of a run, or else a single checkpoint, whose step is None.

    Raises:
        CheckpointNotFoundError: the location is a whole bucket.
    """
    place = step_of(location)
    if place is not None:
        root, step = place
        return Opened(root, options), step
    if is_bucket(location):
        raise CheckpointNotFoundError(f"{location}: there is no checkpoint", location=location)
    return Opened(location, options, one_shot=True), None


def full_name(location: str) -> str:
    """Return the location as reports show it: an absolute path or a normalized URL.

    Raises:
        UsageError: it is neither, as an unset variable of a shell.
    """
    check_path(location)
    if not is_url(location):
        return absolute(without_scheme(location))
    return str(parse_url(location))


def step_of(location: str) -> tuple[str, int] | None:
    """Return the root and step of a location that ends in a step number, else None."""
    if is_bucket(location):
        return None
    root, name = place_of(location, None)
    return (root, int(name)) if STEP_NAME.fullmatch(name) else None


def inspect_steps(run: Opened) -> list[CheckpointInfo | AsyncCheckpointError]:
    """Describe every step of a run, ascending, with an error for each unreadable step.

    Raises:
        CheckpointNotFoundError: the directory does not exist, or is itself a checkpoint.
    """
    check_directory(run.location)
    steps = candidates(run)
    if not steps and RECORD_NAME in run.at_store(lambda store: store.names()):
        raise CheckpointNotFoundError(
            f"{run.location}: this is one checkpoint, not the root of a run; look at it with "
            f"`asyncckpt show {run.location}`",
            location=run.location,
        )

    def look(step: int) -> CheckpointInfo | AsyncCheckpointError | None:
        try:
            return run.inspect(step)
        except CheckpointNotFoundError:
            return None  # deleted since the listing
        except AsyncCheckpointError as error:
            return error

    with ThreadPoolExecutor(LOOKED_AT_ONCE) as threads:
        return [found for found in threads.map(look, steps) if found is not None]


def check_directory(root: str) -> None:
    """Raise `CheckpointNotFoundError` if a root is a local path that is not a directory."""
    if is_url(root) or stat.S_ISDIR(mode := _mode(root)):
        return
    found = "there is no such directory"
    if mode:
        found = f"this is a file, not the root of a run; try `asyncckpt show {root}`"
    raise CheckpointNotFoundError(f"{root}: {found}", location=root)


def _mode(location: str) -> int:
    """Return the mode of a local file or directory, 0 if it does not exist.

    Raises:
        StoreError: this cannot be found out, because of permissions for example.
    """
    path = without_scheme(location)
    with reported("opening", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.stat(path).st_mode
    return 0


def inspect_location(location: str, options: Options, *, timeline: bool) -> CheckpointInfo:
    """Describe a checkpoint, or the newest step if the location is the root of a run.

    Raises:
        CheckpointNotFoundError: the location is neither.
    """
    try:
        opened, step = open_checkpoint(location, options)
        with opened:
            return opened.inspect(step, timeline=timeline)
    except CheckpointNotFoundError:
        with Opened(location, options) as run:
            steps = candidates(run)
            if not steps:
                raise
            for step in reversed(steps[1:]):
                try:
                    return run.inspect(step, timeline=timeline)
                except CorruptCheckpointError as damage:
                    # A step without a valid record does not count; other damage is reported.
                    if damage.file != RECORD_NAME:
                        raise
                    complain(damage)
            return run.inspect(steps[0], timeline=timeline)


def candidates(run: Opened) -> list[int]:
    """Return the steps of a run that have a record, valid or not, or are unreadable; ascending.

    If none has a record, return all steps: they may belong to another library.
    """
    if not is_url(run.location) and not stat.S_ISDIR(_mode(run.location)):
        return []
    return run.at_store(_candidates)


def removable(location: str) -> tuple[str, int]:
    """Return the root and step of a location to remove.

    Raises:
        UsageError: the location does not end in a step number.
    """
    place = step_of(location)
    if place is None:
        by_hand = "the tools of its store, checkpoint.json first" if is_url(location) else "`rm -r`"
        raise UsageError(
            f"{location}: not a step of a run (ROOT/STEP); rm removes only steps; "
            f"remove any other checkpoint with {by_hand}",
            location=location,
        )
    return place


def check_removable(run: Opened, step: int, location: str) -> None:
    """Raise `CheckpointNotFoundError` if a step has no record, valid or not.

    Without one, it is just a directory with a number as its name.
    """
    if not run.at_store(lambda store: _has_record(store, str(step))):
        text = f"{location}: there is no checkpoint to remove"
        text += run.at_store(lambda store: foreign_steps(store, [str(step)]))
        raise CheckpointNotFoundError(text, location=location)


def last_claim(run: Opened) -> Claim | None:
    """Return the last readable claim of a run; None if it was never claimed."""
    return next(reversed(run.at_store(lambda store: store.claims())), None)


# -- on the engine


async def _has_record(store: Store, name: str) -> bool:
    files = store.files(name)
    try:
        entries = await files.entries(max_entries=MAX_ENTRIES)
    except CheckpointNotFoundError:
        return False
    finally:
        await files.close()
    return any(entry.name == RECORD_NAME and not entry.is_directory for entry in entries)


async def _candidates(store: Store) -> list[int]:
    async def is_candidate(step: int) -> bool | None:
        try:
            return await _has_record(store, str(step))
        except StoreError:
            return None  # inspecting the step reports the error

    steps = sorted(int(name) for name in await store.names() if STEP_NAME.fullmatch(name))
    found = await together(map(is_candidate, steps))
    if True not in found:
        return steps
    return [step for step, candidate in zip(steps, found, strict=True) if candidate is not False]
