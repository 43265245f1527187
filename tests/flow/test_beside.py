"""Work beside its owner ends when the owner says so, and is never lost."""

from __future__ import annotations

import asyncio

import pytest

from asyncckpt.flow.beside import Beside


async def test_the_result_outlives_a_cancelled_waiter() -> None:
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    beside = Beside(work())
    waiter = asyncio.create_task(beside.result())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not beside.done
    gate.set()
    assert await beside.result() == 7
    await beside.settled()


async def test_stopping_waits_for_the_end_through_cancellations() -> None:
    cleaned = asyncio.Event()
    allowed = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await allowed.wait()
            cleaned.set()

    beside = Beside(work())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(beside.stop())
    for _ in range(3):
        await asyncio.sleep(0)
        stopping.cancel()
    allowed.set()
    await asyncio.wait((stopping,))
    assert cleaned.is_set() and beside.done


async def test_an_error_nobody_asked_for_is_no_noise() -> None:
    async def work() -> None:
        raise ValueError

    beside = Beside(work())
    await beside.settled()
    with pytest.raises(ValueError):
        await beside.result()
