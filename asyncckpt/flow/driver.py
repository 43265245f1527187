"""Running the coroutines of the facade in a thread that has no event loop.

The blocking facade is the async one, driven by `run_blocking`: every await below it that would
suspend asks `blocks_here` first, and blocks the thread instead. All of them wait for the engine:
`Job.wait`, `Engine.aclose`, `ended` and `uninterrupted`.
"""

# Rule: a coroutine under `run_blocking` never suspends, so no event loop runs in this thread until
#   it ends, and a thread-local flag cannot leak into another task. The engine has its own thread.

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncckpt.errors import UsageError

T = TypeVar("T")

_here = threading.local()


def blocks_here() -> bool:
    """Return whether this thread waits by blocking."""
    return getattr(_here, "blocks", False)


def check_loop() -> None:
    """Check that this thread can wait: by blocking, or in an event loop of asyncio.

    Raises:
        UsageError: it cannot; the coroutine runs under trio, say.
    """
    if blocks_here():
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "asyncckpt needs an event loop of asyncio, and none is running in this thread; under "
            "trio, call asyncckpt.blocking in trio.to_thread.run_sync"
        ) from None


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the facade to its end in this thread, which may have a running loop."""
    before = blocks_here()
    _here.blocks = True
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        _here.blocks = before
    coroutine.close()
    raise AssertionError(f"{coroutine!r} awaits what only an event loop can wake")
