"""Store requests beside data of a save by several processes: counted at the service."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from asyncckpt import Checkpointer, DirectoryCoordinator, ShardedArray
from tests.simulator import LOOPBACK, Request, simulator

ROWS = 1 << 18
SAVES = 3
"""The first one plans; the last one is counted."""


def requests_of_a_save(path: Path, count: int) -> list[Request]:
    """Let so many processes save an array of which each holds a part; return the last requests."""
    ready = threading.Barrier(count)
    failed: list[BaseException] = []
    with simulator(LOOPBACK, buckets=["bucket"]) as service:
        storage = service.s3_options(client="obstore")
        before: list[int] = []

        async def play(process: int) -> None:
            begin, end = process * ROWS // count, (process + 1) * ROWS // count
            values = np.arange(begin, end, dtype=np.float32)
            array = ShardedArray((ROWS,), "float32", [((begin,), values)])
            coordinator = DirectoryCoordinator(path, process_index=process, process_count=count)
            async with Checkpointer(
                "s3://bucket/run", storage_options=storage, coordinator=coordinator
            ) as ckpt:
                for step in range(SAVES):
                    await asyncio.to_thread(ready.wait, 60)
                    if step == SAVES - 1 and process == 0:
                        before.append(len(service.requests))
                    await asyncio.to_thread(ready.wait, 60)
                    await ckpt.save(step, {"w": array, "step": step})
                await asyncio.to_thread(ready.wait, 60)
                if process == 0:
                    before.append(len(service.requests))
            await coordinator.close()

        def run(process: int) -> None:
            try:
                asyncio.run(play(process))
            except BaseException as error:
                failed.append(error)
                ready.abort()

        threads = [threading.Thread(target=run, args=(p,)) for p in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        return service.requests[slice(*before)]


def kinds(found: list[Request]) -> tuple[Counter[tuple[str, str]], int]:
    """Return the requests of the other processes, and the number of those of process 0 alone.

    Looks for an attempt that process 0 has not begun yet come by the clock, and are left out.
    """
    answered = [r for r in found if r.status < 400]
    others = Counter(
        (r.kind, "attempt" if r.key.endswith(".begun") else "entries")
        for r in answered
        if r.key.endswith(".begun") or "-entries-" in r.key
    )
    data = [r for r in answered if re.search(r"/d/[0-9a-f]{32}(-\d+)?-0$", r.key)]
    return others, len(answered) - sum(others.values()) - len(data)


@pytest.mark.usefixtures("unraced")
def test_each_process_makes_three_requests_beside_data(tmp_path: Path) -> None:
    own = []
    for count in (2, 6):
        others, rest = kinds(requests_of_a_save(tmp_path / str(count), count))
        own.append(rest)
        assert others == {
            ("put_object", "attempt"): 1,
            ("get_object", "attempt"): count - 1,
            ("put_object", "entries"): count - 1,
            ("get_object", "entries"): count - 1,
        }
    # What process 0 does besides depends on the layout alone: record, index, manifest, names.
    assert max(own) <= 8
