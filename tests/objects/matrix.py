"""One fault at one request of a save or restore, and everything that has to hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import asyncckpt
from asyncckpt.errors import AsyncCheckpointError, CheckpointExistsError
from asyncckpt.flow import buffers
from asyncckpt.format.ocdbt.manifest import MANIFEST_NAME
from asyncckpt.format.record import decode_record
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.gc import remove_garbage
from asyncckpt.stores.objects.layout import owner
from asyncckpt.stores.objects.store import ObjectStore
from tests.crash.scenarios import same
from tests.objects.stores import HURRIED, SAVE_OPTIONS, Place, state
from tests.simulator import Fault
from tests.watch import slot_pools

FAULTS: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "503": {"status": 503},
    "429": {"status": 429},
    "403": {"status": 403},
    "412": {"status": 412},
    "409": {"status": 409},
    "reset": {"reset": True},
    "closed": {"close": True},
    "lost": {"reset": True, "applied": True},
    "lost 500": {"status": 500, "applied": True},
    "hang": {"hang": True},
    "lost hang": {"hang": True, "applied": True},
    "truncated": {"truncate": 20},
    "stalled": {"stall": 20},
    "corrupt": {"flip": 37},
}
"""What happens to a request. ``lost``: it takes effect and its answer does not come."""


REFUSALS = ("403",)
"""Faults after which nothing is tried again."""


LET_GO_S = 5.0
"""Seconds after which a request that was given up still holds memory: it is not coming back."""


@dataclass(frozen=True, slots=True)
class Point:
    """A fault at a request: at the `number`-th, and the `times` - 1 after it that fit `kinds`."""

    number: int
    name: str
    times: int = 1

    @property
    def lasts(self) -> bool:
        """Whether it happens to all tries of a request, and to those that tidy up after it."""
        return self.times >= (2 if self.name in REFUSALS else HURRIED.retry.tries)

    def fault(self) -> Fault:
        """As the simulator takes it."""
        # Contents are only ever damaged on their way back: a store that keeps other bytes than it
        # was sent is found by checksums, not by requests.
        kinds = ("get_object", "head_object", "list_objects") if self.name == "corrupt" else None
        when = FAULTS[self.name]
        return Fault(number=self.number, times=self.times, kind=kinds, name=self.name, **when)

    def __str__(self) -> str:
        times = "" if self.times == 1 else f" and {self.times - 1} more"
        return f"{self.name} at request {self.number}{times}"


@dataclass(slots=True)
class Visited:
    """What a matrix has come to.

    Attributes:
        points: at which a fault happened.
        outcomes: of the operations, by name.
        wrong: violations of the invariant.
        kinds: of requests that a fault happened to.
        collected: how often something was left that `collect` has removed.
    """

    points: int
    outcomes: Counter[str]
    wrong: list[str]
    kinds: Counter[str]
    collected: int = 0

    @classmethod
    def none(cls) -> Visited:
        """Nothing yet."""
        return cls(0, Counter(), [], Counter())


@dataclass(frozen=True, slots=True)
class Failure:
    """What an error says, without the error, whose traceback holds what its frames held."""

    kind: str
    text: str
    location: str
    is_ours: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What this one says."""
        location = str(getattr(error, "location", ""))
        return cls(
            type(error).__name__, str(error), location, isinstance(error, AsyncCheckpointError)
        )


class Matrix:
    """Saves and restores of step 1 beside an intact step 0, through one Checkpointer."""

    def __init__(self, place: Place, ckpt: asyncckpt.Checkpointer) -> None:
        self.visited = Visited.none()
        self._place = place
        self._sim = place.sim
        self._ckpt = ckpt
        self._session = ckpt._session
        store = self._session.root.store
        assert isinstance(store, ObjectStore)
        self._store = store
        self._intact: dict[str, int] = {}
        self._tasks = 0

    async def prepare(self) -> None:
        """Step 0 stands and nothing else, connections and threads are there."""
        self._sim.clear()
        await self._ckpt.save(0, state(0))
        await self._ckpt.save(1, state(1))
        await self._ckpt.restore(1)
        await self._settled()
        self._remove(1)
        self._intact = self._generations()
        self._tasks = await self._count_tasks()

    # ---------------------------------------------------------------------------------- one point

    async def save(self, point: Point) -> bool:
        """Whether the fault happened; all laws were checked."""
        fault = self._arm(point)
        error: Failure | None = None
        try:
            await self._ckpt.save(1, state(1))
        except Exception as caught:
            error = Failure.of(caught)
        await self._settled()
        met = self._disarm(fault, "save", error)
        self._check_error(point, error)
        self._check_commits(point)
        await self._check_quiet(point)
        await self._check_listed(point, error)
        await self._again(point, error)
        self._remove(1)
        return met

    async def restore(self, point: Point) -> bool:
        """As `save`, for a restore of step 1, which stands."""
        fault = self._arm(point)
        error: Failure | None = None
        found = None
        try:
            found = await self._ckpt.restore(1)
        except Exception as caught:
            error = Failure.of(caught)
        met = self._disarm(fault, "restore", error)
        self._check_error(point, error)
        if error is None and not same(found, state(1)):
            self._wrong(point, "the restore returned other values than were saved")
        await self._check_quiet(point)
        if error is not None and not same(await self._ckpt.restore(1), state(1)):
            self._wrong(point, "the restore after it returned other values than were saved")
        return met

    def _arm(self, point: Point) -> Fault:
        self._sim.reset()
        fault = point.fault()
        self._sim.faults.append(fault)
        return fault

    def _disarm(self, fault: Fault, what: str, error: Failure | None) -> bool:
        self._sim.faults.clear()
        self.visited.outcomes[f"{what}: {'done' if error is None else error.kind}"] += 1
        if not fault.happened:
            return False
        self.visited.points += 1
        self.visited.kinds.update(r.kind for r in self._sim.requests if fault.name in r.faults)
        return True

    # --------------------------------------------------------------------------------------- laws

    def _wrong(self, point: Point, text: str) -> None:
        log = "\n".join(
            f"    {r.number} {r.kind} {r.key} {r.nbytes} -> {r.status} {','.join(r.faults)}"
            for r in self._sim.requests
        )
        self.visited.wrong.append(f"{self._place.kind}, {point}: {text}\n{log}")

    def _check_error(self, point: Point, error: Failure | None) -> None:
        if error is None:
            return
        if not error.is_ours:
            self._wrong(point, f"{error.kind} is no error of ours: {error.text}")
        url = self._store.url
        if not error.location.startswith(url) or url not in error.text:
            self._wrong(point, f"the error does not say where: {error}")

    def _check_commits(self, point: Point) -> None:
        """No record was created twice."""
        applied = [
            request
            for request in self._sim.requests
            if request.kind == "put_object"
            and request.key.endswith(f"/1/{RECORD_NAME}")
            and request.applied_s
            and request.status in (0, 200, 500)
        ]
        if len(applied) > 1:
            self._wrong(point, f"{len(applied)} records were created by one save")
        committed_s = min((request.applied_s for request in applied), default=math.inf)
        for request in self._sim.requests:
            path = request.key.partition("/1/")[2]
            if (
                request.kind == "put_object"
                and path not in ("", RECORD_NAME)
                and owner(path) is None
                and 0 < request.applied_s < committed_s
            ):
                self._wrong(point, f"{path}, which others may own, was written before the record")

    async def _check_quiet(self, point: Point) -> None:
        """Nothing is held that was not held before: task, slot, upload; step 0 is untouched."""
        runtime = self._session.runtime
        tasks = await self._count_tasks()
        if tasks > self._tasks:
            self._wrong(point, f"{tasks - self._tasks} tasks are left on the engine's loop")
        pools = slot_pools(runtime.budget)
        # What a request that was given up still held goes with its connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LET_GO_S):
                while runtime.budget.in_use or any(pool.discarded for pool in pools):
                    await asyncio.sleep(0.001)
        if runtime.budget.in_use or runtime.budget.waiting:
            self._wrong(point, f"{runtime.budget!r} is not free")
            gc.collect()  # so that it is not held against the points that follow
        for pool in pools:
            if pool.kept or pool.discarded or len(pool._free) != pool._allocated:
                self._wrong(point, f"{pool!r} misses slots; {pool.discarded} are discarded")
        if self._generations() != self._intact:
            self._wrong(point, "objects of step 0 were written or removed")

    async def _check_listed(self, point: Point, error: Failure | None) -> None:
        """A step is listed if and only if its record is valid, and then it is complete."""
        steps = await self._ckpt.steps()
        if steps not in ([0, 1], [0]) or (error is None and steps != [0, 1]):
            self._wrong(point, f"listed are {steps}; the save ended with {error}")
        if error is not None and error.kind == "CheckpointExistsError":
            self._wrong(point, f"nothing stood there before, and the save ended with {error}")
        if error is not None and 1 in steps and "unknown" not in error.text:
            self._wrong(point, f"step 1 is listed, and the save ended with {error}")
        if 1 in steps:
            try:
                report = await self._ckpt.verify(1)
                if not report.ok:
                    self._wrong(point, f"step 1 is listed, and {report}")
                if not same(await self._ckpt.restore(1), state(1)):
                    self._wrong(point, "step 1 is listed and restores to other values")
                self._check_fixed(point)
            except AsyncCheckpointError as damage:
                self._wrong(point, f"step 1 is listed, and {damage!r}")
        if error is not None and (self._sim.uploads or self._leftovers(listed=1 in steps)):
            # What belongs to a record that may still arrive is kept; a store that answers no abort
            # is tidied up later; and a request that was cancelled may arrive after the deletion
            # of what it writes. Only an upload that an abort of its own was answered for is gone.
            self.visited.collected += 1
            if self._sim.uploads and not point.lasts:
                self._wrong(point, f"uploads are left: {[u.key for u in self._sim.uploads]}")
            await self._collect()
        if self._sim.uploads and not (point.lasts and error is None):
            self._wrong(point, f"uploads cannot be collected: {[u.key for u in self._sim.uploads]}")
        if not point.lasts or error is not None:
            for problem in self._leftovers(listed=1 in steps):
                self._wrong(point, problem)

    def _check_fixed(self, point: Point) -> None:
        """The manifest, where it stands, is the record's: TensorStore reads what we read.

        That the record's own leads to the index of the save was verified before.
        """
        below = f"{self._place.root}/1"
        stored = self._sim.stored("bucket")
        record = decode_record(self._sim.get("bucket", f"{below}/{RECORD_NAME}"), location=below)
        manifest = f"{below}/{record.database}/{MANIFEST_NAME}"
        if manifest in stored and self._sim.get("bucket", manifest) != record.manifest:
            self._wrong(point, f"{manifest} is of another index than the record's")

    def _leftovers(self, *, listed: bool) -> list[str]:
        """What is wrong with the objects below step 1: all should belong to it, if it is listed."""
        found = []
        keys = [key.removeprefix("1/") for key in self._place.keys("1/")]
        owners = {owner(key) for key in keys} - {None}
        if len(owners) != listed:
            found.append(f"objects of dead attempts are left: {keys}")
        data = [key.partition(".r")[0] for key in keys if "/d/" in key]
        if len(data) != len(set(data)):
            found.append(f"data were left twice: {keys}")
        return found

    async def _collect(self) -> None:
        """What is left of dead attempts is gone, as if a week had passed."""
        await self._session.call(
            lambda: remove_garbage(self._store._context, -5.0, dry_run=False)
        ).wait()

    async def _again(self, point: Point, error: Failure | None) -> None:
        """A save that failed can be repeated, or its step stands after all."""
        if error is None:
            return
        try:
            with contextlib.suppress(CheckpointExistsError):
                await self._ckpt.save(1, state(1))
            if not same(await self._ckpt.restore(1), state(1)):
                self._wrong(point, "saved again, the step restores to other values")
        except AsyncCheckpointError as error:
            self._wrong(point, f"it cannot be saved again: {error!r}")
        await self._settled()

    # ------------------------------------------------------------------------------------- around

    async def _settled(self) -> None:
        """What a save goes on with after it was acknowledged has ended."""

        async def wait() -> None:
            await self._store._context.background.ended()

        await self._session.call(wait).wait()

    async def _count_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return await self._session.call(count).wait()

    def _generations(self) -> dict[str, int]:
        below = f"{self._place.root}/0/"
        stored = self._sim.stored("bucket")
        return {key: found.generation for key, found in stored.items() if key.startswith(below)}

    def _remove(self, step: int) -> None:
        for key in self._place.keys(f"{step}/"):
            self._sim.delete("bucket", f"{self._place.root}/{key}")


@contextlib.contextmanager
def no_garbage_collector() -> Iterator[None]:
    """Memory comes back without Python's collector, which a process that only waits never runs.

    What one failure has cancelled beside it is kept in cycles of Python's own; a `SlotPool` looks
    for those, here sooner than it does elsewhere.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with mock.patch.object(buffers, "COLLECT_AFTER_S", 0.02):
            yield
    finally:
        if enabled:
            gc.enable()


@contextlib.asynccontextmanager
async def matrix(place: Place, store: ObjectStore | None = None) -> AsyncIterator[Matrix]:
    """A matrix whose Checkpointer is closed with the block."""
    with no_garbage_collector():
        async with asyncckpt.Checkpointer(
            store or place.store(), save_options=SAVE_OPTIONS
        ) as ckpt:
            made = Matrix(place, ckpt)
            await made.prepare()
            yield made


async def every_save(made: Matrix, names: Iterable[str], *, times: int = 1) -> int:
    """Each fault happened at each request of a save; returns the requests of the longest."""
    return await _every(made.save, names, times)


async def every_restore(made: Matrix, names: Iterable[str], *, times: int = 1) -> int:
    """As `every_save`, of a restore."""
    await made._ckpt.save(1, state(1), overwrite=True)
    await made._settled()
    longest = await _every(made.restore, names, times)
    made._remove(1)
    return longest


async def _every(visit: Any, names: Iterable[str], times: int) -> int:
    longest = 0
    for name in names:
        number = 1
        while await visit(Point(number, name, times)):
            longest = max(longest, number)
            number += 1
    return longest
