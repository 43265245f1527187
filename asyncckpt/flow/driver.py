"""Driver of facade coroutines in a thread without an event loop.

`run_blocking` drives the async facade for the blocking one: every await that would suspend checks
`blocks_here` and blocks the thread instead. All of them wait for the engine: `Job.wait`,
`Engine.aclose`, `ended` and `uninterrupted`.
"""

# Rule: a coroutine under `run_blocking` never suspends, so this thread runs no event loop until it
#   ends, and the thread-local flag cannot leak into another task. The engine has its own thread.

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncckpt.errors import UsageError

T = TypeVar("T")

_here = threading.local()


def blocks_here() -> bool:
    """Return whether this thread blocks instead of awaiting."""
    return getattr(_here, "blocks", False)


def abort_with_call(job: Any) -> None:
    """Abort the job if the blocking call that this thread makes, if any, raises.

    A signal handler may raise before the call waits for the job, which must not use the caller's
    arrays after the call.
    """
    if blocks_here():
        _here.jobs.append(job)


def check_loop() -> None:
    """Check that this thread can wait: by blocking, or in an asyncio event loop.

    Raises:
        UsageError: it cannot, for example under trio.
    """
    if blocks_here():
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "asyncckpt needs an asyncio event loop, and none is running in this thread; under "
            "trio, call asyncckpt.blocking in trio.to_thread.run_sync"
        ) from None


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a facade coroutine to its end in this thread, which may have a running loop.

    If it raises, the jobs that it has begun (`abort_with_call`) end first.
    """
    before = blocks_here(), getattr(_here, "jobs", None)
    jobs: list[Any] = []
    _here.blocks, _here.jobs = True, jobs
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        for job in jobs:
            with contextlib.suppress(UsageError):  # on the engine's own thread
                run_blocking(job.abort())
        raise
    finally:
        _here.blocks, _here.jobs = before
    coroutine.close()
    raise AssertionError(f"{coroutine!r} awaits something that needs an event loop")
