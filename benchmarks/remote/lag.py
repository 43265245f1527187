"""The longest time for which the caller's loop stood still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks.local.stall import HEARTBEAT_S, heartbeat, percentile


async def watched(work: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """`work` was done while a task on the same loop woke every millisecond."""
    lags: list[float] = []
    async with asyncio.TaskGroup() as group:
        heart = group.create_task(heartbeat(lags))
        await asyncio.sleep(2 * HEARTBEAT_S)
        start = time.perf_counter()
        await work()
        wall_s = time.perf_counter() - start
        # It beats once more: a block at the very end counts too.
        await asyncio.sleep(2 * HEARTBEAT_S)
        heart.cancel()
    return {
        "wall_s": wall_s,
        "lag_max_s": max(lags, default=0.0),
        "lag_p99_s": percentile(lags, 0.99),
    }
