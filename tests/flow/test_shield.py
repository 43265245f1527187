"""Awaits that end when the work has ended."""

from __future__ import annotations

import asyncio

import pytest

from asyncckpt.errors import StoreError
from asyncckpt.flow.shield import add_note, leading_error, to_completion, together, uninterrupted


async def test_to_completion_ends_with_the_work_through_repeated_cancellations() -> None:
    go = asyncio.Event()
    log: list[str] = []

    async def work() -> str:
        await go.wait()
        log.append("work")
        return "done"

    async def caller() -> str:
        result = await to_completion(work())
        log.append("caller")
        await asyncio.sleep(0)  # the cancellations were dropped and do not come back here
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        return result

    task = asyncio.create_task(caller())
    for _ in range(4):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert log == []
    go.set()
    assert await task == "done"
    assert log == ["work", "caller"]


async def test_to_completion_raises_what_the_work_raises() -> None:
    async def work() -> None:
        raise StoreError("full")

    with pytest.raises(StoreError, match="full"):
        await to_completion(work())


async def test_to_completion_keeps_an_earlier_cancellation_in_mind() -> None:
    async def caller() -> int:
        task = asyncio.current_task()
        assert task is not None
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await to_completion(asyncio.sleep(0))
            assert task.cancelling() == 1
            raise
        return 0

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("fails", [False, True])
async def test_uninterrupted_ends_with_the_work_and_raises_the_cancellation(fails: bool) -> None:
    go = asyncio.Event()
    log: list[str] = []

    async def work() -> None:
        await go.wait()
        log.append("work")
        if fails:
            raise StoreError("full")

    task = asyncio.create_task(uninterrupted(work()))
    for number in range(3):
        await asyncio.sleep(0)
        task.cancel(f"scope {number}")
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    # Cancel scopes of anyio know their cancellations by the message.
    with pytest.raises(asyncio.CancelledError, match="scope 0"):
        await task
    assert log == ["work"]


async def test_uninterrupted_gives_results_and_errors() -> None:
    async def work() -> None:
        raise StoreError("full")

    assert await uninterrupted(asyncio.sleep(0, 5)) == 5
    with pytest.raises(StoreError, match="full"):
        await uninterrupted(work())


def test_the_leading_error_is_no_cancellation_and_the_others_are_its_notes() -> None:
    first = StoreError("disk full")
    group = BaseExceptionGroup(
        "all",
        [
            asyncio.CancelledError(),
            BaseExceptionGroup("inner", [first, ValueError("bad"), StoreError("disk full")]),
        ],
    )
    assert leading_error(group) is first
    assert first.__notes__ == ["at the same time: ValueError: bad"]


async def test_the_leading_error_keeps_its_cause() -> None:
    reason = OSError("no space left on device")

    async def work() -> None:
        raise StoreError("disk full") from reason

    with pytest.raises(StoreError, match="disk full") as caught:
        await together([work(), work()])
    assert caught.value.__cause__ is reason


def test_a_reason_is_stated_once() -> None:
    hint = "there are no credentials (NoCredentialsError); give key and secret"
    texts = [f"s3://b/{name}: writing failed: {hint}" for name in "abc"]
    texts.insert(2, "s3://b/d: writing failed: the bucket is full")
    first, *rest = map(StoreError, texts)
    group = BaseExceptionGroup("all", [first, *rest])
    group.add_note(f"cleaning up failed too: s3://b: removing failed: {hint}")
    add_note(leading_error(group), f"cleaning up failed too: s3://b: removing failed: {hint}")
    assert first.__notes__ == [
        "at the same time: StoreError: s3://b/d: writing failed: the bucket is full",
        "cleaning up failed too: s3://b: removing failed, for the same reason",
    ]


def test_a_group_of_cancellations_leads_with_one() -> None:
    group = BaseExceptionGroup("all", [asyncio.CancelledError(), asyncio.CancelledError()])
    assert isinstance(leading_error(group), asyncio.CancelledError)
