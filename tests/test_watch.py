"""The fixtures that watch the other tests see what they are there to see."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blockbuster import BlockingError

import asyncckpt
from tests.watch import LOOP_COPY_NBYTES, no_blocking_calls, nothing_left_behind

Failure = pytest.fail.Exception


def of_asyncckpt(expression: str) -> Callable[..., Any]:
    """A function of the argument x that counts as code of the package."""
    module = os.path.join(asyncckpt.__path__[0], "sample.py")
    namespace: dict[str, Any] = {"os": os, "np": np}
    exec(compile(f"def sample(x): return {expression}", module, "exec"), namespace)
    sample: Callable[..., Any] = namespace["sample"]
    return sample


CALLS = [
    "os.pwrite(x, b'a', 0)",
    "os.pwritev(x, [b'a'], 0)",
    "os.preadv(x, [bytearray(1)], 0)",
    "os.fsync(x)",
    "os.fdatasync(x)",
    "os.open('.', os.O_RDONLY)",
    "open('.')",
    f"np.copyto(np.empty({LOOP_COPY_NBYTES + 1}, 'u1'), 1)",
]


@pytest.mark.parametrize("call", CALLS)
async def test_a_blocking_call_on_a_loop_fails_the_test_even_if_handled(call: str) -> None:
    with pytest.raises(Failure, match="sample"), no_blocking_calls():
        with pytest.raises(BlockingError):
            of_asyncckpt(call)(0)


async def test_a_blocking_call_in_a_thread_is_allowed(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_CREAT | os.O_WRONLY)
    with no_blocking_calls():
        await asyncio.to_thread(of_asyncckpt("os.pwrite(x, b'a', 0)"), fd)
    os.close(fd)


async def test_a_short_copy_on_a_loop_is_allowed() -> None:
    with no_blocking_calls():
        of_asyncckpt("np.copyto(x, 1)")(np.empty(LOOP_COPY_NBYTES, "u1"))


async def test_blocking_calls_of_the_test_itself_are_allowed(tmp_path: Path) -> None:
    with no_blocking_calls():
        (tmp_path / "x").write_text("x")


def test_a_descriptor_left_open_is_a_leak() -> None:
    duplicates = []
    with pytest.raises(Failure, match="descriptor"), nothing_left_behind():
        duplicates.append(os.dup(0))
    os.close(duplicates[0])


def test_an_engine_thread_left_running_is_a_leak() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="asyncckpt-sample")
    with pytest.raises(Failure, match="thread asyncckpt-sample"), nothing_left_behind():
        thread.start()
    end.set()
    thread.join()


async def test_an_unfinished_task_is_a_leak() -> None:
    tasks = []
    with pytest.raises(Failure, match=r"task .*sample"), nothing_left_behind():
        tasks.append(asyncio.create_task(asyncio.Event().wait(), name="sample"))
    tasks[0].cancel()


def test_a_finished_loop_is_no_leak() -> None:
    with nothing_left_behind():
        asyncio.run(asyncio.sleep(0))
