"""Awaits that end only when the work has ended, through repeated cancellations."""

# Rule 1: the work is cancelled CLEANUP_S (or `grace_s`) after its caller, and its waits for threads
#   end after ABANDON_S, so a cancelled caller does not wait for an unresponsive mount.
#   (tests/cancellation/test_stuck_mount.py)
# Rule 2: the work is never left running: the await ends only when its task has ended.

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

from asyncckpt.errors import AsyncCheckpointError, DeadlineExceededError, SaveAbortedError
from asyncckpt.flow.driver import blocks_here
from asyncckpt.flow.threads import finished, seen
from asyncckpt.options import CLEANUP_S

_FAILED = " failed: "
"""Separator of place and action from the reason in store errors."""

_troubles: ContextVar[list[str] | None] = ContextVar("_troubles", default=None)

A = TypeVar("A")
T = TypeVar("T")


async def to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result; drop a cancellation of the caller.

    For clean-up, and for publication, whose outcome must be known.

    Cancellation: waits for `CLEANUP_S`, then cancels the coroutine and waits for its end.
    """
    current = asyncio.current_task()
    before = current.cancelling() if current is not None else 0
    task, _ = await _shielded(coroutine)
    while current is not None and current.cancelling() > before:
        current.uncancel()
    return task.result()


async def uninterrupted(
    coroutine: Coroutine[Any, Any, T], *, grace_s: Callable[[], float] = lambda: CLEANUP_S
) -> T:
    """Return the coroutine's result; raise a cancellation of the caller once it has ended.

    For clean-up on behalf of callers, whose cancellation must not be lost.

    Cancellation: waits for `grace_s()`, then cancels the coroutine, waits for its end and raises.
    """
    if blocks_here():
        return await coroutine
    task, cancellation = await _shielded(coroutine, grace_s)
    try:
        if cancellation is not None:
            seen(task)  # the caller gets the cancellation instead
            raise cancellation  # itself: by its message, a cancel scope of anyio knows its own
        return task.result()
    finally:
        del task, cancellation  # breaks the reference cycle of error, traceback and frame


async def _shielded(
    coroutine: Coroutine[Any, Any, T], grace_s: Callable[[], float] = lambda: CLEANUP_S
) -> tuple[asyncio.Task[T], asyncio.CancelledError | None]:
    """Run the coroutine to its end; return its task and a cancellation of the caller."""
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError as cancellation:
        if not await finished(task, timeout_s=grace_s()):
            task.cancel()
            await finished(task)
        return task, cancellation
    return task, None


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results; raise the leading error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise_leading(errors)
    return [task.result() for task in tasks]


async def mapped(
    function: Callable[[A], Awaitable[T]], items: Sequence[A], at_once: int
) -> list[T]:
    """Call a function for all items, up to `at_once` at a time; return the results in order.

    Raises the leading error.
    """
    results: dict[int, T] = {}
    waiting = iter(enumerate(items))

    async def stream() -> None:
        for number, item in waiting:
            results[number] = await function(item)

    streams = min(at_once, len(items))
    if streams == 1:
        await stream()
    else:
        await together(stream() for _ in range(streams))
    return [results[number] for number in range(len(items))]


async def cleaned_up(cleanup: Awaitable[None], error: BaseException) -> None:
    """Await the clean-up after an error; if it fails too, add a note to the error."""
    try:
        await cleanup
    except AsyncCheckpointError as failure:
        add_note(error, f"cleaning up failed too: {failure}")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error; omit a reason that the error already states."""
    known = said(error)
    what, failed, reason = note.partition(_FAILED)
    if failed and reason in known:
        note = f"{what} failed, for the same reason"
    if note not in known:
        error.add_note(note)


def troubles() -> list[str]:
    """Return a list that holds the last text given to `troubled` in this task and those it starts.

    It says why an operation may be late, and is empty as long as nothing has failed.
    """
    found: list[str] = []
    _troubles.set(found)
    return found


def troubled(text: str) -> None:
    """Note a failed try that is repeated, for the error of the operation's deadline."""
    found = _troubles.get()
    if found is not None:
        found[:] = [f"; the last try that failed: {text}"]


@contextlib.asynccontextmanager
async def within(
    seconds: float | None, location: str, failure: str, option: str, *, begun: float | None = None
) -> AsyncIterator[None]:
    """Cancel the block after `seconds` (None: never), and raise a `DeadlineExceededError` instead.

    The time counts from `begun`, by `perf_counter` (None: now). The error states the `failure` and
    the `option` that allows more time. The block's own `TimeoutError` propagates.

    A save in the block may turn the cancellation into a `SaveAbortedError`.
    """
    spent_s = 0.0 if begun is None else time.perf_counter() - begun
    timeout = asyncio.timeout(None if seconds is None else seconds - spent_s)
    found = troubles()
    try:
        async with timeout:
            yield
    except (TimeoutError, SaveAbortedError):
        if not timeout.expired():
            raise
        text = f"{location}: {failure} within {seconds} s; raise {option}{''.join(found)}"
        raise DeadlineExceededError(text, location=location) from None


def leading_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a task group that is not a cancellation, with notes on the rest.

    A pipeline fails for one reason: later failures are context, and omitted if they repeat it.
    """
    errors: list[BaseException] = []
    notes: list[str] = []
    _flatten(group, errors, notes)
    errors.sort(key=lambda error: isinstance(error, asyncio.CancelledError))
    first = errors[0]
    for other in errors[1:]:
        what, _, reason = str(other).partition(_FAILED)
        if not isinstance(other, asyncio.CancelledError) and (reason or what) not in said(first):
            first.add_note(f"at the same time: {type(other).__name__}: {other}")
    for note in notes:
        add_note(first, note)
    return first


def raise_leading(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the leading error of a task group, with its own cause instead of the group."""
    first = leading_error(group)
    raise first from first.__cause__


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of every frame in the error's tracebacks.

    Otherwise a caller that keeps the error would keep staging memory alive.
    """
    waiting: list[BaseException | None] = [error]
    done: set[int] = set()
    while waiting:
        this = waiting.pop()
        if this is None or id(this) in done:
            continue
        done.add(id(this))
        traceback.clear_frames(this.__traceback__)
        waiting += [this.__cause__, this.__context__]
        if isinstance(this, BaseExceptionGroup):
            waiting += this.exceptions


def said(error: BaseException) -> str:
    """Return the text of an error, followed by its notes."""
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def _flatten(error: BaseException, into: list[BaseException], notes: list[str]) -> None:
    if isinstance(error, BaseExceptionGroup):
        notes += getattr(error, "__notes__", ())
        for inner in error.exceptions:
            _flatten(inner, into, notes)
    else:
        into.append(error)
