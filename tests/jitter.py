"""Random delays of worker threads and event loops, for whatever depends on their order.

    python -m pytest -p tests.jitter tests/session

A plug-in of pytest. Some calls of worker threads begin late or return late, and some steps of event
loops come late, a few of them by more than half a second, as on a machine that does other things.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

from asyncckpt.flow.threads import Workers

CALLS = 0.15
"""Share of the calls of worker threads that are delayed."""

CALL_S = 0.02
"""Longest usual delay before a call, and after it."""

PAUSED_CALLS, PAUSED_CALL_S = 0.02, 0.3
"""Share of the delayed calls that are delayed for longer, and for how long."""

STEPS = 0.004
"""Share of the steps of an event loop that are delayed."""

STEP_S = 0.05
"""Longest usual delay of a step."""

PAUSED_STEPS, PAUSED_STEP_S = 0.03, 0.6
"""Share of the delayed steps that are delayed for longer, and for how long."""

_random = random.Random(os.getpid())
_sleep = time.sleep  # tests replace it
_submit = Workers.submit
_run_once = asyncio.BaseEventLoop._run_once


def _delay_s(most_s: float, paused: float, paused_s: float) -> float:
    return paused_s if _random.random() < paused else _random.random() * most_s


def _delayed(workers: Workers, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if _random.random() >= CALLS:
        return _submit(workers, fn, *args, **kwargs)
    before, after = (_delay_s(CALL_S, PAUSED_CALLS, PAUSED_CALL_S) for _ in range(2))

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        _sleep(before)
        try:
            return fn(*args, **kwargs)
        finally:
            _sleep(after)

    return _submit(workers, call, *args, **kwargs)


def _delayed_step(loop: asyncio.BaseEventLoop) -> None:
    if _random.random() < STEPS:
        _sleep(_delay_s(STEP_S, PAUSED_STEPS, PAUSED_STEP_S))
    _run_once(loop)


def pytest_configure() -> None:
    """Delay from now on."""
    Workers.submit = _delayed
    asyncio.BaseEventLoop._run_once = _delayed_step
