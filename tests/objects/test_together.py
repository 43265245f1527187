"""Saves by several `Checkpointer`s that coordinate, on object stores.

Each plays a process in a thread. On local disk, `tests/session/together` does the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import Checkpointer, DirectoryCoordinator, KeepLast, SaveOptions
from asyncckpt.errors import (
    CheckpointExistsError,
    MismatchError,
    SaveAbortedError,
    UnsupportedLeafError,
)
from tests.crash.scenarios import same
from tests.objects.stores import CLIENTS, state
from tests.simulator import Fault, Gate, Request, Simulator, simulator
from tests.stores.objects.stores import new_session, options_of

Part = Callable[[Checkpointer, int], Coroutine[Any, Any, Any]]

COUNT = 2
OPTIONS = SaveOptions(host_memory_nbytes=64 << 20, chunk_nbytes=32 << 10)

SESSIONS = [new_session() for _ in range(COUNT)]
"""What botocore knows about S3, read once by each thread."""

HIT_REQUESTS = 18
"""Most requests of a save by two processes whose plan is known.

They write the mark, entries, data of both, index, record and fixed names, look at record, mark and
entries, and remove what was passed on. Looking for the mark too early is not counted."""


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as running:
        yield running


class Job:
    """Two processes that share a root on the simulator."""

    def __init__(self, kind: str, sim: Simulator, path: Path) -> None:
        self.sim = sim
        self.kind = kind
        self.prefix = path.name
        self._keys = path / "keys"

    def opened(self, coordinator: object, process: int = 0, **options: Any) -> Checkpointer:
        scheme, storage_options = options_of(self.kind, self.sim)
        if "session" in storage_options:
            storage_options["session"] = SESSIONS[process]
        return Checkpointer(
            f"{scheme}://bucket/{self.prefix}",
            storage_options=storage_options,
            coordinator=coordinator,
            **{"save_options": OPTIONS, **options},
        )

    def play(self, part: Part, **options: Any) -> list[Any]:
        """Let both processes play their parts; return results and errors."""
        results: list[Any] = [None] * COUNT

        async def main(process: int) -> Any:
            coordinator = DirectoryCoordinator(
                self._keys, process_index=process, process_count=COUNT
            )
            try:
                async with self.opened(coordinator, process, **options) as ckpt:
                    return await part(ckpt, process)
            finally:
                await coordinator.close()

        def one(process: int) -> None:
            try:
                results[process] = asyncio.run(main(process))
            except BaseException as error:  # also what pytest raises
                results[process] = error

        threads = [threading.Thread(target=one, args=(p,), daemon=True) for p in range(COUNT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a process hangs"
        return results

    def saved(self, part: Part, **options: Any) -> list[Any]:
        """As `play`, where nobody fails."""
        results = self.play(part, **options)
        assert not [result for result in results if isinstance(result, BaseException)], results
        return results

    def names(self) -> list[str]:
        """Return the names of all objects below the root."""
        start = f"{self.prefix}/"
        return [key.removeprefix(start) for key in self.sim.stored() if key.startswith(start)]

    def left(self, *steps: int) -> list[str]:
        """Return the objects that belong to none of these steps, nor to the store's own probes."""
        kept = tuple(f"{step}/" for step in steps)
        return [name for name in self.names() if not name.startswith((*kept, ".asyncckpt/"))]

    def verify(self, step: int, tree: Any) -> None:
        """Check the step, by one process that reads every byte."""

        async def check() -> None:
            async with self.opened("single") as ckpt:
                assert (await ckpt.verify(step)).ok
                assert same(await ckpt.restore(step), tree)

        asyncio.run(check())


@pytest.fixture(params=CLIENTS)
def job(request: pytest.FixtureRequest, sim: Simulator, tmp_path: Path) -> Job:
    return Job(request.param, sim, tmp_path)


def test_two_processes_save_and_restore_on_an_object_store(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        first = await ckpt.save(1, state(1))
        second = await ckpt.save(2, state(2))
        assert (first.plan_cached, second.plan_cached) == (False, True)
        assert same(await ckpt.restore(1), state(1))
        assert same(await ckpt.restore(), state(2))
        return second

    one, two = job.saved(part)
    assert (one.save_id, one.stored_nbytes) == (two.save_id, two.stored_nbytes)
    assert job.left(1, 2) == []
    assert [name for name in job.names() if "-exchange" in name or ".begun" in name] == []
    job.verify(1, state(1))
    job.verify(2, state(2))


def test_overwrite_and_delete_leave_nothing_of_the_old_one(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        first = await ckpt.save(1, state(1))
        with pytest.raises(CheckpointExistsError):
            await ckpt.save(1, state(2))
        await ckpt.save(1, state(3), overwrite=True)
        await ckpt.save(2, state(2))
        await ckpt.delete(2)
        return first

    first = job.saved(part)[0]
    assert job.left(1) == []
    assert [name for name in job.names() if first.save_id in name] == []
    job.verify(1, state(3))


def test_retention_is_done_by_process_0(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        reports = [await ckpt.save(step, state(step)) for step in range(3)]
        return [report.deleted_steps for report in reports]

    assert job.saved(part, keep=KeepLast(1)) == [[(), (0,), (1,)], [(), (), ()]]
    assert job.left(2) == []
    job.verify(2, state(2))


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_fails_leaves_nothing_on_any(job: Job, process: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        tree = state(1)
        with pytest.raises(UnsupportedLeafError, match="odd"):
            await ckpt.save(1, {**tree, "odd": object()} if this == process else tree)
        other = state(1)
        other["w"][3, 3] += this == process
        with pytest.raises(MismatchError, match=r"\bw\b"):
            await ckpt.save(1, other)
        await ckpt.save(2, tree)

    job.saved(part)
    assert job.left(2) == []
    job.verify(2, state(1))


@pytest.mark.usefixtures("unraced")
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_is_cancelled_leaves_nothing_on_any(job: Job, process: int) -> None:
    gate = Gate()
    # It does not take effect, and all others have by then: a request that does after its sender was
    # cancelled may do so after the clean-up too, and no sender can know.
    first_file = "?" * 32 + ("-1-0" if process else "-0")
    others = 4 if process else 5  # mark, fixed name, entries, the other's file; process 0's index
    key = f"{job.prefix}/2/*/d/{first_file}"
    fault = Fault(key=key, kind="put_object", number=1, gate=gate, hang=True)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state(1))
        if this == process:
            job.sim.faults.append(fault)
        with pytest.raises(SaveAbortedError):
            pending = await ckpt.start_save(2, state(2))
            if this == process:
                await gate.reached.wait()
                while len([name for name in job.names() if name.startswith("2/")]) < others:
                    await asyncio.sleep(0.01)
                pending.cancel()
                gate.release()
            await pending
        await ckpt.save(3, state(3))

    try:
        job.saved(part)
    finally:
        gate.release()
        job.sim.faults.clear()
    assert job.left(1, 3) == []
    job.verify(3, state(3))


def is_early(request: Request) -> bool:
    """Whether a process has looked for the attempt before it was begun."""
    return request.key.endswith("-x-.begun") and request.status == 404


@pytest.mark.usefixtures("unraced")
def test_a_hit_makes_few_requests(job: Job) -> None:
    barrier = threading.Barrier(COUNT)
    seen: list[Counter[str]] = []

    async def part(ckpt: Checkpointer, process: int) -> Any:
        for step in range(3):
            await ckpt.save(step, state(step))
            await ckpt.wait()
            # The last look at the record, and removals, are not waited for: nothing needs them.
            core = ckpt._session
            await core.call(core.root.store._context.background.ended).wait()  # type: ignore[attr-defined]
            await asyncio.to_thread(barrier.wait, 20)
            if process == 0:
                start = f"{job.prefix}/"
                log = [r for r in job.sim.requests if r.key.startswith(start) or not r.key]
                seen.append(Counter(r.kind for r in log if not is_early(r)))
                job.sim.reset()
            await asyncio.to_thread(barrier.wait, 20)

    job.sim.reset()
    job.saved(part)
    print(job.kind, *map(dict, seen), sep="\n  ")
    assert seen[1].total() <= HIT_REQUESTS
    assert seen[2].total() <= HIT_REQUESTS
    assert seen[2]["list_objects"] == 0
