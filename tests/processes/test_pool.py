"""The pool of processes itself: results, exceptions, time limits, kills and stops."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.messages import RemoteError
from tests.processes.pool import Pool, ProcessDiedError
from tests.processes.worker import Worker


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool("numpy", 2, tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


def place(worker: Worker, factor: int = 1) -> tuple[int, int, str, bool]:
    main = threading.current_thread() is threading.main_thread()
    return worker.index * factor, worker.count, os.environ["PYTHONHASHSEED"], main


def test_each_process_has_its_place_and_hash_seed(pool: Pool) -> None:
    assert pool.all(place) == [(0, 2, "1000", True), (1, 2, "1001", True)]
    assert pool.run(1, place, factor=5)[0] == 5
    assert pool.run(1, "tests.processes.test_pool:place")[0] == 1


def remember(worker: Worker, value: int | None = None) -> int:
    if value is not None:
        worker.state["value"] = value
    number: int = worker.state["value"]
    return number


def test_processes_keep_what_functions_leave(pool: Pool) -> None:
    pool.run(0, remember, 5)
    pool.run(1, remember, 7)
    assert pool.all(remember) == [5, 7]


class OddError(Exception):
    def __init__(self) -> None:
        super().__init__("odd")
        self.thread = threading.Lock()


def fail(worker: Worker, kind: str) -> None:
    raise {"plain": KeyError("x"), "odd": OddError()}[kind]


def test_exceptions_arrive_with_their_traceback(pool: Pool) -> None:
    with pytest.raises(KeyError) as info:
        pool.run(1, fail, "plain")
    assert "in process 1 of 2" in info.value.__notes__[0]
    assert "in fail" in info.value.__notes__[0]
    with pytest.raises(RemoteError, match="OddError: odd"):
        pool.run(1, fail, "odd")
    with pytest.raises(ModuleNotFoundError):
        pool.run(0, "tests.none:x")
    first, second = pool.outcomes(fail, "plain")
    assert isinstance(first, KeyError)
    assert isinstance(second, KeyError)


async def wait_for_file(worker: Worker, name: str) -> str:
    while not (worker.directory / name).exists():
        await asyncio.sleep(0.01)
    return name


async def touch(worker: Worker, name: str) -> None:
    (worker.directory / name).write_bytes(b"")


def test_coroutines_run_concurrently_and_beside_functions(pool: Pool) -> None:
    waiting = pool.start(0, wait_for_file, "go")
    assert pool.run(0, place)[0] == 0
    pool.run(0, touch, "go")
    assert waiting.result(10) == "go"


def test_a_coroutine_can_be_cancelled(pool: Pool) -> None:
    waiting = pool.start(0, wait_for_file, "never")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        waiting.result(10)


def hang(worker: Worker) -> None:
    (worker.directory / "hangs").touch()
    while not (worker.directory / "goes on").exists():
        time.sleep(0.01)


def test_a_call_that_hangs_fails_with_the_stacks(pool: Pool) -> None:
    hanging = pool.start(1, hang)
    while not (pool.directory / "hangs").exists():
        assert not hanging.future.done()
        time.sleep(0.01)
    with pytest.raises(
        AssertionError, match=r"hang in process 1: no answer for 0.2 s(.|\n)*in hang"
    ):
        hanging.result(0.2)
    (pool.directory / "goes on").touch()
    assert pool.run(1, place)[0] == 1


def test_a_stopped_process_answers_when_it_is_resumed(pool: Pool) -> None:
    pool.stop(1)
    call = pool.start(1, place)
    time.sleep(0.2)
    assert not call.future.done()
    assert pool.run(0, place)[0] == 0
    pool.resume(1)
    assert call.result(10)[0] == 1


def test_a_killed_process_fails_its_calls(tmp_path: Path) -> None:
    pool = Pool("numpy", 2, tmp_path)
    try:
        waiting = pool.start(1, wait_for_file, "never")
        pool.kill(1)
        with pytest.raises(ProcessDiedError, match="process 1 of 2 ended with status -9"):
            waiting.result(10)
        with pytest.raises(ProcessDiedError):
            pool.run(1, place)
        assert pool.alive() == [0]
        assert pool.run(0, place)[0] == 0
        pool.stop(0)
    finally:
        pool.close()
    assert pool.alive() == []
