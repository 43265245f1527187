"""What a test may not do: block an event loop, or leave something behind."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import blockbuster.blockbuster
import pytest
from blockbuster import BlockBuster, BlockBusterFunction, BlockingError

from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import SlotPool

# A copy above this takes long enough (about 5 µs) to belong into a thread.
LOOP_COPY_NBYTES = 64 * 1024

# Calls that reach the disk and that blockbuster does not know.
BLOCKING_CALLS = (
    "builtins.open",
    "io.open",
    "os.fallocate",
    "os.fdatasync",
    "os.fsync",
    "os.ftruncate",
    "os.makedirs",
    "os.open",
    "os.posix_fallocate",
    "os.pread",
    "os.preadv",
    "os.pwrite",
    "os.pwritev",
    "os.scandir",
    "os.writev",
    "shutil.rmtree",
)
# Calls that cost as much as their first argument is long.
COPYING_CALLS = ("numpy.copyto", "numpy.ascontiguousarray", "numpy.array", "crc32c.crc32c")
# Calls that blockbuster knows, and that read no disk.
HARMLESS_CALLS = ("os.getcwd", "os.path.abspath")
IMPORTING = ("<frozen importlib._bootstrap>", ("_find_and_load",))
# Files of the kernel's memory, not of a disk.
READING_LIMITS = ("asyncckpt/options.py", ("memory_limit_nbytes",))
# A loop in a worker thread that serves nobody else.
CONNECTING = ("asyncckpt/stores/objects/clients/fsspec_apis.py", ("connect",))
# What handlers do with a record is a matter of the application that installed them.
LOGGING = ("logging/__init__.py", ("callHandlers",))


def _is_short(buffer: Any, *_: Any, **__: Any) -> bool:
    nbytes = getattr(buffer, "nbytes", None)
    if nbytes is None:
        nbytes = len(buffer) if isinstance(buffer, (bytes, bytearray)) else 0
    return int(nbytes) <= LOOP_COPY_NBYTES


def _detector() -> BlockBuster:
    detector = BlockBuster("asyncckpt")
    for name in HARMLESS_CALLS:
        del detector.functions[name]
    for name in BLOCKING_CALLS:
        detector.functions[name] = BlockBusterFunction(None, name, scanned_modules="asyncckpt")
    for name in COPYING_CALLS:
        detector.functions[name] = BlockBusterFunction(
            None, name, scanned_modules="asyncckpt", can_block_predicate=_is_short
        )
    for function in detector.functions.values():
        function.can_block_in(*IMPORTING)
        function.can_block_in(*READING_LIMITS)
        function.can_block_in(*CONNECTING)
        function.can_block_in(*LOGGING)
    return detector


@contextmanager
def no_blocking_calls() -> Iterator[list[str]]:
    """Code of asyncckpt on a thread with a running loop makes no blocking call inside the block.

    The call raises BlockingError where it is made, and the block fails at its end with the stack,
    also when the error was handled. The list holds what was seen so far.
    """
    seen: list[str] = []

    class SeenBlockingError(BlockingError):
        def __init__(self, func: str) -> None:
            super().__init__(func)
            stack = "".join(traceback.format_stack(limit=12)[:-2])
            seen.append(f"{func} on thread {threading.current_thread().name}\n{stack}")

    detector = _detector()
    with mock.patch.object(blockbuster.blockbuster, "BlockingError", SeenBlockingError):
        detector.activate()
        try:
            yield seen
        finally:
            detector.deactivate()
    if seen:
        pytest.fail("blocking calls on an event loop:\n" + "\n".join(seen), pytrace=False)


def _engine_threads() -> set[str]:
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.name.startswith("asyncckpt")
    }


def open_files() -> set[str]:
    """The descriptors of this process with what they refer to."""
    directory = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
    found = set()
    for name in os.listdir(directory):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # the descriptor of this listing
        try:
            found.add(f"{name} -> {os.readlink(f'{directory}/{name}')}")
        except OSError:
            found.add(name)
    return found


def slot_pools(budget: ByteBudget) -> list[SlotPool]:
    """The pools of staging memory that share a budget."""
    return [account for account in budget.accounts if isinstance(account, SlotPool)]


def pending_tasks() -> dict[int, str]:
    return {
        id(task): repr(task)
        for task in gc.get_objects()
        if issubclass(type(task), asyncio.Task) and not task.done()
    }


CLOSING_S = 10.0
"""How long connections may take to close, which clients in Rust do in threads of their own."""


def _closing(left: str) -> bool:
    """Whether something is one end of a connection, or the simulator's task that serves it."""
    return "-> socket:" in left or "<Server._serve()" in left


def collect_others() -> None:
    """Collect what earlier tests left, so that their `ResourceWarning`s do not come in this one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """The block leaves no engine thread, file descriptor or unfinished asyncio task behind.

    What is initialised once per process (a framework's backend, say) has to be so before it.
    Connections may still be closing at its end.
    """
    gc.collect()
    threads, files, tasks = _engine_threads(), open_files(), pending_tasks()

    def found() -> list[str]:
        left = [f"thread {name}" for name in sorted(_engine_threads() - threads)]
        left += [f"descriptor {name}" for name in sorted(open_files() - files)]
        return left + [f"task {text}" for key, text in pending_tasks().items() if key not in tasks]

    yield
    gc.collect()
    end = time.monotonic() + CLOSING_S
    while (left := found()) and all(map(_closing, left)) and time.monotonic() < end:
        time.sleep(0.01)
    if left:
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)
