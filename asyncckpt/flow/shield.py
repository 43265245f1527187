"""Awaits that end when the work has ended, however often they are cancelled meanwhile."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncckpt.flow.threads import finished

T = TypeVar("T")


async def to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; a cancellation of the caller does not reach it and is forgotten.

    For clean-up, and for the moment of publication, whose outcome must be known.
    """
    task = asyncio.create_task(coroutine)
    current = asyncio.current_task()
    before = current.cancelling() if current is not None else 0
    await finished(task)
    if current is not None:
        while current.cancelling() > before:
            current.uncancel()
    return task.result()


async def uninterrupted(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; a cancellation of the caller is raised once it has ended.

    For clean-up on behalf of callers, whose own cancellation must not be lost.
    """
    task = asyncio.create_task(coroutine)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller hears of
        raise asyncio.CancelledError
    return task.result()


def leading_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group that is no mere cancellation; the others become its notes.

    A pipeline fails for one reason; what fails after it, because of it, is context.
    """
    errors: list[BaseException] = []
    notes: list[str] = []
    _flatten(group, errors, notes)
    errors.sort(key=lambda error: isinstance(error, asyncio.CancelledError))
    first = errors[0]
    for other in errors[1:]:
        if not isinstance(other, asyncio.CancelledError) and str(other) != str(first):
            first.add_note(f"at the same time: {type(other).__name__}: {other}")
    for note in notes:
        first.add_note(note)
    return first


def forget_frames(error: BaseException) -> None:
    """Nothing that the error came through keeps what its functions had in hand.

    An error is kept by whoever wants to look at it later, and with it the local variables of every
    function that it left: staging memory among them, which could not be used again so long.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        this = waiting.pop()
        if this is None or id(this) in seen:
            continue
        seen.add(id(this))
        traceback.clear_frames(this.__traceback__)
        waiting += [this.__cause__, this.__context__]
        if isinstance(this, BaseExceptionGroup):
            waiting += this.exceptions


def _flatten(error: BaseException, into: list[BaseException], notes: list[str]) -> None:
    if isinstance(error, BaseExceptionGroup):
        notes += getattr(error, "__notes__", ())
        for inner in error.exceptions:
            _flatten(inner, into, notes)
    else:
        into.append(error)
