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
from typing import Annotated, Any, TypeVar

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
from asyncckpt.flow.driver import run_blocking
from asyncckpt.flow.shield import together
from asyncckpt.format.record import RECORD_NAME, STEP_NAME
from asyncckpt.options import MAX_ENTRIES, MIN_BUDGET_NBYTES
from asyncckpt.ports import Claim, Store
from asyncckpt.reports import CheckpointInfo
from asyncckpt.runtime import Runtime
from asyncckpt.session.steps import foreign_steps
from asyncckpt.stores.local.failures import reported
from asyncckpt.stores.objects.clients.urls import is_url, parse_url, split_url, without_scheme

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


def run_at(root: str, options: Options) -> contextlib.closing[blocking.Checkpointer]:
    """Open a run for a `with` block, alone: variables of a launcher in this shell mean nothing."""
    return contextlib.closing(
        blocking.Checkpointer(root, storage_options=options, coordinator="single")
    )


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
    root, separator, name = full_name(location).rpartition("/")
    # The part after `//` in a URL is a bucket or host.
    if not separator or root.endswith(":/") or not STEP_NAME.fullmatch(name):
        return None
    return root or "/", int(name)


def inspect_steps(root: str, options: Options) -> list[CheckpointInfo | AsyncCheckpointError]:
    """Describe every step of a run, ascending, with an error for each unreadable step.

    Raises:
        CheckpointNotFoundError: the directory does not exist, or is itself a checkpoint.
    """
    with run_at(root, options) as run:
        check_directory(root)
        steps = candidates(root, options)
        if not steps and has_record(root, options):
            raise CheckpointNotFoundError(
                f"{root}: this is one checkpoint, not the root of a run; look at it with "
                f"`asyncckpt show {root}`",
                location=root,
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


def inspect_step(
    root: str, step: int, options: Options, *, timeline: bool = False
) -> CheckpointInfo:
    """Describe a step of a run."""
    with run_at(root, options) as run:
        return run.inspect(step, timeline=timeline)


def inspect_location(location: str, options: Options, *, timeline: bool = False) -> CheckpointInfo:
    """Describe a checkpoint, or the newest step if the location is the root of a run.

    Raises:
        CheckpointNotFoundError: the location is neither.
    """
    try:
        place = step_of(location)
        if place is not None:
            return inspect_step(*place, options, timeline=timeline)
        if is_bucket(location):
            raise CheckpointNotFoundError(f"{location}: there is no checkpoint", location=location)
        return blocking.inspect(location, timeline=timeline, storage_options=options)
    except CheckpointNotFoundError:
        steps = candidates(location, options)
        if not steps:
            raise
    for step in reversed(steps[1:]):
        try:
            return inspect_step(location, step, options, timeline=timeline)
        except CorruptCheckpointError as damage:
            # A step without a valid record does not count; other damage is reported.
            if damage.file != RECORD_NAME:
                raise
            complain(damage)
    return inspect_step(location, steps[0], options, timeline=timeline)


def candidates(root: str, options: Options) -> list[int]:
    """Return the steps below a root that have a record, valid or not, or are unreadable; ascending.

    If none has a record, return all steps: they may belong to another library.
    """
    if not is_url(root) and not stat.S_ISDIR(_mode(root)):
        return []
    return _at_store(root, options, _candidates)


def removable(location: str, options: Options) -> tuple[str, int]:
    """Return the root and step of a location to remove.

    Raises:
        UsageError: the location does not end in a step number.
        CheckpointNotFoundError: there is no checkpoint.
    """
    place = step_of(location)
    if place is None:
        by_hand = "the tools of its store, checkpoint.json first" if is_url(location) else "`rm -r`"
        raise UsageError(
            f"{location}: not a step of a run (ROOT/STEP); rm removes only steps; "
            f"remove any other checkpoint with {by_hand}",
            location=location,
        )
    # Without a record, it is just a directory with a number as its name.
    if not has_record(location, options):
        root, step = place
        text = f"{location}: there is no checkpoint to remove"
        if foreign := _at_store(root, options, lambda store: foreign_steps(store, [step])):
            text = f"{text}: {foreign}"
        raise CheckpointNotFoundError(text, location=location)
    return place


def has_record(location: str, options: Options) -> bool:
    """Return whether a directory or prefix has a commit record, valid or not."""
    if not is_url(location):
        return stat.S_ISREG(_mode(os.path.join(location, RECORD_NAME)))
    if is_bucket(location):
        return False
    root, name = split_url(location)
    return _at_store(root, options, lambda store: _has_record(store, name))


def last_claim(root: str, options: Options) -> Claim | None:
    """Return the last readable claim of a run; None if it was never claimed."""

    async def last(store: Store) -> Claim | None:
        return next(reversed(await store.claims()), None)

    return _at_store(root, options, last)


# -- on a separate engine


def _at_store(root: str, options: Options, work: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    runtime = Runtime("asyncckpt-cli", host_memory_nbytes=MIN_BUDGET_NBYTES)
    try:
        store = runtime.store(root, direct_io="auto", storage_options=options)
        return runtime.engine.submit(lambda: work(store)).result()
    finally:
        run_blocking(runtime.aclose())


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
