"""Every request of a save by two processes fails in every way, on S3 and on GCS.

As `tests/objects/test_faults.py` does for one process. Each process is a thread with an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import Checkpointer, DirectoryCoordinator
from asyncckpt.errors import AsyncCheckpointError, SaveError, SaveOutcomeUnknownError
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.gc import remove_garbage
from asyncckpt.stores.objects.layout import owner
from tests.crash.scenarios import same
from tests.objects.matrix import FAULTS
from tests.objects.stores import CLIENTS, SAVE_OPTIONS, Place, state
from tests.simulator import Fault, Simulator, simulator

COUNT = 2
WAIT_S = 60.0

SOME = ("503", "412", "lost")
ALL = ("500", "503", "412", "409", "reset", "closed", "lost", "hang")

REQUESTS = 12
"""Fewest requests of a save by two processes: below, something was not seen."""


class Pair:
    """Two processes that save step 1 again and again beside step 0, with one fault at a time.

    Attributes:
        wrong: violations of the laws.
        points: requests at which a fault happened.
        outcomes: how saves ended, by name.
    """

    def __init__(self, place: Place, keys: Path, names: Sequence[str], every: int) -> None:
        self._place = place
        self._sim = place.sim
        self._keys = keys
        self._names = names
        self._every = every
        self._barrier = threading.Barrier(COUNT)
        self._errors: list[AsyncCheckpointError | None] = [None] * COUNT
        self._point = ""
        self._fault = Fault(number=1)
        self.wrong: list[str] = []
        self.points = 0
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        """Visit all points; raises what a process raises."""
        raised: list[BaseException] = []

        def play(process: int) -> None:
            try:
                asyncio.run(self._play(process))
            except BaseException as error:
                raised.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=play, args=(p,), daemon=True) for p in range(COUNT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]

    async def _play(self, process: int) -> None:
        keys = DirectoryCoordinator(self._keys, process_index=process, process_count=COUNT)
        store = self._place.store()
        try:
            async with Checkpointer(store, coordinator=keys, save_options=SAVE_OPTIONS) as ckpt:
                for step in (0, 1):
                    await ckpt.save(step, state(step))
                for name in self._names:
                    number = 1
                    while await self._visit(ckpt, process, name, number):
                        number += self._every
        finally:
            await keys.close()

    async def _visit(self, ckpt: Checkpointer, process: int, name: str, number: int) -> bool:
        """Save with a fault at a request; return whether there was such a request."""
        self._barrier.wait(WAIT_S)
        if process == 0:
            self._remove(1)
            self._sim.reset()
            self._point = f"{name} at request {number}"
            self._fault = Fault(number=number, name=name, **FAULTS[name])
            self._sim.faults.append(self._fault)
        self._barrier.wait(WAIT_S)
        self._errors[process] = None
        try:
            await ckpt.save(1, state(1))
        except AsyncCheckpointError as error:
            self._errors[process] = error
        await self._settled(ckpt)
        self._barrier.wait(WAIT_S)
        if process == 0:
            self._sim.faults.clear()
            if self._fault.happened:
                await self._check(ckpt)
        self._barrier.wait(WAIT_S)
        return self._fault.happened

    async def _check(self, ckpt: Checkpointer) -> None:
        self.points += 1
        one, two = self._errors
        for error in (one, two):
            self.outcomes["done" if error is None else type(error).__name__] += 1
        records = [
            request
            for request in self._sim.requests
            if request.kind == "put_object"
            and request.key.endswith(f"/1/{RECORD_NAME}")
            and request.applied_s
            and request.status in (0, 200, 500)
        ]
        if len(records) > 1:
            self._wrong(f"{len(records)} records were created by one save")
        async with Checkpointer(self._place.store(), coordinator="single") as alone:
            steps = await alone.steps()
            listed = 1 in steps
            if steps[:1] != [0]:
                self._wrong(f"listed are {steps}")
            if not listed and (one is None or two is None):
                self._wrong(f"the save ended with {one!r} and {two!r}, and is not listed")
            if listed and not any(map(may_be_listed, (one, two))):
                self._wrong(f"the save is listed, and ended with {one!r} and {two!r}")
            if listed and not (
                (await alone.verify(1)).ok and same(await alone.restore(1), state(1))
            ):
                self._wrong("the step is listed, and is not whole")
        if one is not None or two is not None:
            await self._collect(ckpt)
        if self._sim.uploads:
            self._wrong(f"uploads are left: {[upload.key for upload in self._sim.uploads]}")
        owners = {owner(key.removeprefix("1/")) for key in self._place.keys("1/")} - {None}
        if len(owners) != listed:
            self._wrong(f"objects of {len(owners)} attempts are left: {self._place.keys('1/')}")

    def _wrong(self, text: str) -> None:
        log = "\n".join(
            f"    {r.number} {r.kind} {r.key} -> {r.status} {','.join(r.faults)}"
            for r in self._sim.requests
        )
        self.wrong.append(f"{self._place.kind}, {self._point}: {text}\n{log}")

    async def _settled(self, ckpt: Checkpointer) -> None:
        """What a save goes on with after it was acknowledged has ended."""
        store: Any = ckpt._session.root.store

        async def wait() -> None:
            await store._context.background.ended()

        await ckpt._session.call(wait).wait()

    async def _collect(self, ckpt: Checkpointer) -> None:
        """What is left of dead attempts is gone, as if a week had passed."""
        store: Any = ckpt._session.root.store
        await ckpt._session.call(lambda: remove_garbage(store._context, -5.0, dry_run=False)).wait()

    def _remove(self, step: int) -> None:
        for key in self._place.keys(f"{step}/"):
            self._sim.delete("bucket", f"{self._place.root}/{key}")


def may_be_listed(error: AsyncCheckpointError | None) -> bool:
    """Whether a save that has ended so may have been committed."""
    return error is None or isinstance(error, SaveOutcomeUnknownError) or "unknown" in str(error)


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator(part_min_nbytes=1) as running:
        yield running


def visit(kind: str, sim: Simulator, path: Path, names: Sequence[str], every: int) -> None:
    workers = Workers(4, "test-objects")
    try:
        pair = Pair(Place(kind, sim, workers), path / "keys", names, every)
        pair.run()
    finally:
        workers.shutdown()
    print(f"\n{kind}: {pair.points} points, {dict(pair.outcomes)}")
    assert pair.wrong == [], "\n".join([f"{len(pair.wrong)} in all", *pair.wrong[:3]])
    assert pair.points >= len(names) * REQUESTS // every


@pytest.mark.parametrize(("status", "kept"), [(503, True), (403, False)])
@pytest.mark.parametrize("kind", CLIENTS)
def test_all_keep_their_data_while_the_record_may_still_arrive(
    kind: str, sim: Simulator, tmp_path: Path, status: int, *, kept: bool
) -> None:
    workers = Workers(4, "test-objects")
    place = Place(kind, sim, workers)
    refused = "forbidden" if kind == "gcsfs" else "AccessDenied"
    code = None if kept else refused
    fault = Fault(kind="put_object", key=f"*/1/{RECORD_NAME}", status=status, code=code, number=0)

    async def main(process: int) -> None:
        keys = DirectoryCoordinator(tmp_path, process_index=process, process_count=COUNT)
        store = place.store()
        try:
            async with Checkpointer(store, coordinator=keys, save_options=SAVE_OPTIONS) as ckpt:
                await ckpt.save(0, state(0))
                sim.faults.append(fault)
                with pytest.raises(SaveError) as caught:
                    await ckpt.save(1, state(1))
                assert isinstance(caught.value, SaveOutcomeUnknownError) == kept
                sim.faults.clear()
                await ckpt.save(2, state(2))
        finally:
            await keys.close()

    raised: list[BaseException] = []

    def play(process: int) -> None:
        try:
            asyncio.run(main(process))
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=play, args=(p,), daemon=True) for p in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    workers.shutdown()
    assert raised == []
    theirs = [name for name in place.keys("1/") if name.endswith("-1-0")]
    assert bool(theirs) == kept


@pytest.mark.parametrize("kind", ["gcsfs", "obstore"])
def test_a_fault_at_some_requests_of_two_processes_leaves_a_whole_step_or_none(
    kind: str, sim: Simulator, tmp_path: Path
) -> None:
    visit(kind, sim, tmp_path, SOME, every=4)


@pytest.mark.long
@pytest.mark.parametrize("kind", CLIENTS)
def test_a_fault_at_any_request_of_two_processes_leaves_a_whole_step_or_none(
    kind: str, sim: Simulator, tmp_path: Path
) -> None:
    visit(kind, sim, tmp_path, ALL, every=1)
