"""A background task ends when its owner says so, and is never lost."""

from __future__ import annotations

import asyncio

import pytest

from asyncckpt.flow.background import BackgroundTask


async def test_the_result_outlives_a_cancelled_waiter() -> None:
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    task = BackgroundTask(work())
    waiter = asyncio.create_task(task.result())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not task.done
    gate.set()
    assert await task.result() == 7
    await task.settled()


async def test_stopping_waits_for_the_end_through_cancellations() -> None:
    cleaned = asyncio.Event()
    allowed = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await allowed.wait()
            cleaned.set()

    task = BackgroundTask(work())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(task.stop())
    for _ in range(3):
        await asyncio.sleep(0)
        stopping.cancel()
    allowed.set()
    await asyncio.wait((stopping,))
    assert cleaned.is_set() and task.done


async def test_an_error_nobody_asked_for_is_no_noise() -> None:
    async def work() -> None:
        raise ValueError

    task = BackgroundTask(work())
    await task.settled()
    with pytest.raises(ValueError):
        await task.result()
