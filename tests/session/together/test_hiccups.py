"""One call to the coordinator's service fails: no process is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncckpt import Checkpointer
from asyncckpt.errors import StoreError
from tests.session.together.job import Job, state


def let_fail(coordinator: Any, method: str, key: str) -> None:
    """Let the first call of a method whose key contains this text fail."""
    original, failed = getattr(coordinator, method), []

    async def once(name: str, *args: Any, **options: Any) -> Any:
        if key in name and not failed:
            failed.append(name)
            raise StoreError("the service has the hiccups", retryable=True)
        return await original(name, *args, **options)

    setattr(coordinator, method, once)


def let_fail_once_it_is_there(coordinator: Any, key: str) -> list[str]:
    """Let the first wait that finds a key with this text fail; return the keys that failed."""
    wait, failed = coordinator.wait, list[str]()

    async def once(name: str, **options: Any) -> Any:
        found = await wait(name, **options)
        if found is not None and key in name and not failed:
            failed.append(name)
            raise StoreError("the service has the hiccups", retryable=True)
        return found

    coordinator.wait = once
    return failed


def test_a_wait_that_fails_once_a_save_is_decided_does_not_fail_it(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)

    async def main(index: int) -> Any:
        coordinator, failed = job.coordinator(index), []
        if index == 1:
            failed = let_fail_once_it_is_there(coordinator, "/save/0/outcome")
        async with Checkpointer(job.root, coordinator=coordinator) as ckpt:
            await ckpt.save(1, state())
            return await ckpt.steps(), len(failed)

    assert job.run(main) == [([1], 0), ([1], 1)]
    assert job.left() == []


@pytest.mark.parametrize(("process", "method"), [(0, "list"), (1, "wait")])
def test_a_call_that_fails_while_a_process_watches_ends_the_save_on_all(
    tmp_path: Path, process: int, method: str
) -> None:
    job = Job(tmp_path, 2)

    async def main(index: int) -> Any:
        coordinator = job.coordinator(index)
        if index == process:
            let_fail(coordinator, method, "/save/0")
        async with Checkpointer(job.root, coordinator=coordinator) as ckpt:
            with pytest.raises(StoreError, match="hiccups"):
                await ckpt.save(1, state())
            await ckpt.save(2, state())
            return await ckpt.steps()

    # The next save begins at once: nobody waits until another process is late or silent.
    assert job.run(main) == [[2], [2]]
    assert job.left() == []
