"""The scenarios on one service after another: who does what, in which order, what is checked."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure, workloads
from benchmarks.measure import Protocol, Sample, median
from benchmarks.remote import roundtrips, state
from benchmarks.remote.child import Child, Failed, Role, child
from benchmarks.remote.forms import MIB, SHORT, WORKLOADS, Form
from benchmarks.remote.raw import BUCKET, Point
from benchmarks.remote.results import (
    AUTO,
    BACKGROUND,
    FLOOR,
    IN_PLACE,
    MEMORY,
    OWN,
    RESTORE,
    SAME,
    SAVE,
    SCENARIOS,
    Grid,
    Measurement,
    Results,
    Sweep,
    Swept,
)
from benchmarks.remote.rounds import Case, Probes
from benchmarks.remote.state import Described
from benchmarks.subject import budget_nbytes
from benchmarks.workloads import Workload
from tests.simulator import SimulatorProcess, simulator_process

RECORD, DATA = "checkpoint.json", "/d/"
"""Parts of our keys: the commit record, and everything that is data."""

FRESH = 1
"""Copies of the state that a run may make anew; the service uses its memory again."""

WARM_UPS = 3
"""Saves under ``"auto"`` before it is compared with the best point of a sweep."""

LABELS = {
    "s3torchconnector": "torch DCP, s3torchconnector",
    "obstore": "obstore",
    "obstore-gcs": "obstore (GCS)",
    "s3fs": "s3fs",
    "gcsfs": "gcsfs",
    "tensorstore": "TensorStore OCDBT",
    "dcp": "torch DCP, s3fs",
    "safetensors": "safetensors, s3fs",
    "orbax": "Orbax",
}


@dataclass(frozen=True, slots=True)
class Cast:
    """Subjects that are measured on a service.

    Attributes:
        clients: libraries, alone and under ours.
        peers: of ours.
        same: clients under ours that are also measured with the sizes and streams that were best
            for them alone; the fastest one is, in any case.
        lean: clients under ours that save a state larger than their budget.
        swept: the client whose sizes and streams are swept.
    """

    clients: tuple[str, ...]
    peers: tuple[str, ...]
    same: tuple[str, ...] = ()
    lean: tuple[str, ...] = ()
    swept: str | None = None


CASTS = {
    "s3": Cast(
        ("obstore", "s3fs"),
        ("tensorstore", "dcp", "s3torchconnector", "safetensors"),
        same=("obstore", "s3fs"),
        lean=("obstore", "s3fs"),
        swept="obstore",
    ),
    "gcs": Cast(
        ("gcsfs", "obstore-gcs"),
        ("orbax",),
        same=("gcsfs", "obstore-gcs"),
        lean=("gcsfs",),
        swept="gcsfs",
    ),
    "loopback": Cast(
        ("obstore", "s3fs", "gcsfs"), ("tensorstore", "dcp", "s3torchconnector", "safetensors")
    ),
}
SHORT_CASTS = {**CASTS, "loopback": Cast(("obstore",), ("tensorstore",))}

PEERS_NOT = {"W3": ("dcp", "s3torchconnector", "safetensors", "orbax")}
"""Subjects left out of a workload, because they would do there what they do with W1, as slowly."""

SLOW = {
    "dcp": (RESTORE, BACKGROUND),
    "s3torchconnector": (RESTORE, BACKGROUND),
    "safetensors": (BACKGROUND,),
    "orbax": (SAVE, RESTORE, BACKGROUND),
}
"""Subjects and scenarios that are so slow that they get `Form.slow_samples` samples."""


@dataclass(slots=True)
class Suite:
    """Runs the scenarios and collects what they find.

    Attributes:
        form: how much.
        directory: for the states; everything in it is removed by whoever made it.
        found: where measurements and errors go.
        rng: of the order.
        scenarios: those to run.
        workloads: ids of those to run, ``W4`` for any number of leaves.
        log: gets a line per scenario.
    """

    form: Form
    directory: Path
    found: Results
    rng: random.Random
    scenarios: frozenset[str] = frozenset(SCENARIOS)
    workloads: frozenset[str] = frozenset(WORKLOADS)
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    _files: dict[str, tuple[Described, Path]] = field(default_factory=dict, init=False)
    _until_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._until_s = time.monotonic() + self.form.limit_s

    def run(self, profile: str) -> None:
        """Measure everything about this service; failures are in `found.errors`."""
        if self.is_late(profile):
            return
        with simulator_process(profile, buckets=[BUCKET]) as service:
            _OnService(self, profile, service).run()

    def workload(self, name: str) -> tuple[Described, Path]:
        """Return the description of a workload, and the file that it is in."""
        if name not in self._files:
            makers: dict[str, Callable[[], Workload]] = {
                "W1": functools.partial(workloads.llama, self.form.nbytes),
                "W3": functools.partial(workloads.single, self.form.nbytes),
                "W4": functools.partial(workloads.small, self.form.small),
                "large": functools.partial(workloads.llama, self.form.large_nbytes),
            }
            path = self.directory / name
            self._files[name] = state.write(makers[name](), path), path
        return self._files[name]

    def attempt(self, what: str, scenario: str | None, work: Callable[[], Any]) -> None:
        """Do the work if its scenario is to be run; record what it raises as an error."""
        if scenario is not None and scenario not in self.scenarios:
            return
        if scenario is not None and self.is_late(what):
            return
        start = time.perf_counter()
        try:
            work()
        except Exception as error:
            self.report(what, error)
        else:
            self.log(f"  {what}: {time.perf_counter() - start:.1f} s")

    def is_late(self, what: str) -> bool:
        """Whether the time is up; then what is left out is noted."""
        late = time.monotonic() > self._until_s
        if late:
            self.found.note(f"{what}: left out, the time was up")
            self.log(f"  {what}: left out, the time is up")
        return late

    def report(self, what: str, error: Exception) -> None:
        """Record the error."""
        self.found.errors.append(f"{what}: {error}")
        trace = "" if isinstance(error, Failed) else "".join(traceback.format_exception(error))
        self.log(f"  {what} failed: {error}\n{trace}")


class _OnService:
    """One service, and the processes that use it."""

    def __init__(self, suite: Suite, profile: str, service: SimulatorProcess) -> None:
        self._suite = suite
        self._form = suite.form
        self._profile = profile
        self._service = service
        self._cast = (SHORT_CASTS if suite.form.name == SHORT.name else CASTS)[profile]
        # The odd ones are for what a process saves to open its connections.
        self._names = itertools.count(2, 2)
        self._raw: dict[str, Child] = {}
        self._grids: dict[tuple[str, str], Grid] = {}  # by client and direction
        self._processes = itertools.count(1)

    def run(self) -> None:
        suite = self._suite
        suite.log(f"{self._profile}")
        with contextlib.ExitStack() as stack:
            for client in self._cast.clients:
                self._start(stack, Role(f"raw {LABELS[client]}", client, raw=True), self._raw)
            suite.attempt("grid of the bare clients", None, self._measure_grids)
            if not self._grids:
                return
            with contextlib.ExitStack() as subjects:
                cast = self._subjects(subjects)
                for name in ("W1", "W3", "W4"):
                    if name in suite.workloads:
                        self._transfers(name, cast)
            for client in self._cast.lean:
                what = f"{MEMORY}, {LABELS[client]}"
                suite.attempt(what, MEMORY, functools.partial(self._memory, client))
            if self._cast.swept:
                suite.attempt("sweep", "sweep", lambda: self._sweep(str(self._cast.swept)))

    # ------------------------------------------------------------------------------- processes

    def _start(self, stack: contextlib.ExitStack, role: Role, into: dict[str, Child]) -> None:
        try:
            into[role.kind if role.raw else role.label] = stack.enter_context(
                self._child(role, self._form.nbytes)
            )
        except Failed as error:
            self._suite.report(f"{self._profile}: start", error)

    @contextlib.contextmanager
    def _child(
        self, role: Role, nbytes: int, budget: int | None = None, prefix: str = ""
    ) -> Iterator[Child]:
        prefix = prefix or f"{role.kind}-{next(self._processes)}"
        budget = budget_nbytes(nbytes) if budget is None else budget
        with child(role, self._service, self._suite.directory, prefix, budget) as made:
            yield made

    def _subjects(self, stack: contextlib.ExitStack) -> dict[str, Child]:
        cast: dict[str, Child] = {}
        for client in self._cast.clients:
            label = f"asyncckpt, {LABELS[client]}"
            self._start(stack, Role(label, client), cast)
            if client in self._raw and client in (*self._cast.same, self._fastest("put")):
                reads = self._best(client, "get").streams
                point = self._best(client, "put")
                role = Role(f"{label}, {SAME}", client, point=point, reads=reads)
                self._start(stack, role, cast)
        for peer in self._cast.peers:
            if peer not in self._form.peers:
                continue
            # The one that is part of no extra that tests need.
            if peer == "s3torchconnector" and importlib.util.find_spec(peer) is None:
                self._suite.found.note(f"{LABELS[peer]}: not installed")
            else:
                self._start(stack, Role(LABELS[peer], peer), cast)
        return cast

    # ----------------------------------------------------------------------------------- floors

    def _measure_grids(self) -> None:
        form = self._form
        _, path = self._suite.workload("W1")
        grids: dict[tuple[str, str], Grid] = {}
        for client, process in self._raw.items():
            process.ask("load", path=str(path))

            def add(direction: str, rates: dict[Point, float], client: str = client) -> Point:
                made = Grid(self._profile, LABELS[client], direction, rates)
                grids[client, direction] = made
                return made.best

            points = list(grid(form.grid_sizes, form.grid_streams, form.nbytes))
            writing = functools.partial(self._put_s, process)
            # Then no floor of saves is needed, and puts take longer than gets.
            restores = self._suite.scenarios == {RESTORE}
            size = add("put", self._rates(points, writing, restores)).nbytes
            points = list(grid(form.range_sizes, form.grid_streams, form.nbytes))
            name = next(self._names)
            sizes = self._put(process, name, Point(size, 16), form.nbytes)
            reading = functools.partial(self._get_s, process, name, sizes)
            best = add("get", self._rates(points, reading))
            copied = self._rates([best], functools.partial(reading, copy=True))
            add("get and copy to its place", copied)
            self._service.clear()
        # Those of puts first, as in the tables.
        self._suite.found.grids += sorted(grids.values(), key=lambda grid: grid.direction != "put")
        self._grids = grids

    def _best(self, client: str, direction: str) -> Point:
        return self._grids[client, direction].best

    def _fastest(self, direction: str) -> str:
        """Return the client that is the floor of a direction."""
        return max(self._raw, key=lambda client: max(self._grids[client, direction].rates.values()))

    def _rates(
        self, points: list[Point], probe: Callable[[Point], float], only: bool = False
    ) -> dict[Point, float]:
        """Bytes per second of each point, which is probed once if it is `only` for a choice."""
        seconds: dict[Point, list[float]] = {point: [] for point in points}
        for _ in range(1 if only else self._form.grid_samples):
            order = list(points)
            self._suite.rng.shuffle(order)
            for point in order:
                seconds[point].append(probe(point))
        # The fastest of each: one request in a hundred is slow, and that says nothing of a point.
        return {point: self._form.nbytes / min(found) for point, found in seconds.items()}

    def _put_s(self, process: Child, point: Point, nbytes: int | None = None) -> float:
        """Seconds of the floor of saves; what it wrote is gone."""
        values = self._written(process, next(self._names), point, nbytes or self._form.nbytes)
        self._service.clear()
        return values["wall_s"]

    def _put(self, process: Child, name: int, point: Point, nbytes: int) -> list[int]:
        """Objects to read are there; returns their sizes."""
        self._written(process, name, point, nbytes)
        return [min(point.nbytes, nbytes - at) for at in range(0, nbytes, point.nbytes)]

    @staticmethod
    def _written(process: Child, name: int, point: Point, nbytes: int) -> dict[str, float]:
        return process.ask(
            "write", name=name, nbytes=nbytes, size=point.nbytes, streams=point.streams
        )

    def _get_s(
        self, process: Child, name: int, sizes: list[int], point: Point, copy: bool = False
    ) -> float:
        """Seconds of the floor of restores."""
        return self._read(process, name, sizes, point, copy)["wall_s"]

    @staticmethod
    def _read(
        process: Child, name: int, sizes: list[int], point: Point, copy: bool = False
    ) -> dict[str, float]:
        size, streams = point.nbytes, point.streams
        asked = {"name": name, "sizes": sizes, "size": size, "streams": streams, "copy": copy}
        return process.ask("read", **asked)

    # ------------------------------------------------------------------------ saves and restores

    def _transfers(self, name: str, cast: Mapping[str, Child]) -> None:
        suite = self._suite
        workload, path = suite.workload(name)
        suite.log(f" {workload.id}: {workload.leaf_count} leaves, {workload.nbytes / MIB:.0f} MiB")
        there = {}
        for label, process in cast.items():
            if process.role.point is not None and name != "W1":
                continue
            if process.role.kind in PEERS_NOT.get(name, ()):
                continue
            try:
                process.ask("load", path=str(path))
                there[label] = process
            except Failed as error:
                suite.report(f"{self._profile} {workload.id}: {label}", error)
        what = f"{self._profile} {workload.id}"
        suite.attempt(f"{what} {SAVE}", SAVE, lambda: self._saves(workload, there))
        suite.attempt(f"{what} {RESTORE}", RESTORE, lambda: self._restores(workload, there))
        if name in ("W1", "W4"):
            work = functools.partial(self._lags, workload, there)
            suite.attempt(f"{what} {BACKGROUND}", BACKGROUND, work)

    def _saves(self, workload: Described, cast: Mapping[str, Child]) -> None:
        probes, fastest = Probes(self._service), self._fastest("put")
        if workload.is_large:
            process, best = self._raw[fastest], self._best(fastest, "put")
            probes.floor = functools.partial(self._put_s, process, best, workload.nbytes)
        cases, keys = [], {}
        for label, process in cast.items():
            run, finish = self._saving(process, "save")
            ours = label.startswith("asyncckpt")
            # Unshaped, requests sent together are answered one after the other.
            after = self._commit if ours and self._profile != "loopback" else dict
            samples = self._samples(process, workload, SAVE)
            more: dict[str, Any] = {"finish": finish, "samples": samples, "after": after}
            cases.append(Case(label, run, probes=probes, **more))
            how = AUTO if process.role.point is None else SAME
            keys[label] = (process, how if ours else "")
        for client, process in self._raw.items() if workload.is_large else ():
            if client == fastest:
                continue
            best = self._best(client, "put")

            def put(process: Child = process, best: Point = best) -> dict[str, float]:
                return self._written(process, next(self._names), best, workload.nbytes)

            label = process.role.label
            cases.append(Case(label, put, finish=self._service.clear, probes=probes))
            keys[label] = (process, str(best))
        self._take(workload, SAVE, cases, keys, probes, "put")

    def _saving(
        self, process: Child, how: str
    ) -> tuple[Callable[[], dict[str, float]], Callable[[], None]]:
        """Save, and do what follows a save; nothing is deleted in the background."""
        saved: list[int] = []

        def run() -> dict[str, float]:
            name = next(self._names)
            values = process.ask(how, name=name)
            saved.append(name)
            return values

        def finish() -> None:
            while saved:
                process.ask("discard", name=saved.pop())
            self._service.clear()

        return run, finish

    def _restores(self, workload: Described, cast: Mapping[str, Child]) -> None:
        probes = Probes(self._service)
        cases, keys = [], {}
        for client, process in self._raw.items() if workload.is_large else ():
            name, best = next(self._names), self._best(client, "get")
            sizes = self._put(process, name, self._best(client, "put"), workload.nbytes)
            if client == self._fastest("get"):
                probes.floor = functools.partial(self._get_s, process, name, sizes, best)
                continue
            get = functools.partial(self._read, process, name, sizes, best)
            cases.append(Case(process.role.label, get, probes=probes))
            keys[process.role.label] = (process, str(best))
        for label, process in cast.items():
            ours, name = label.startswith("asyncckpt"), next(self._names)
            try:
                process.ask("save", name=name)
            except Failed as error:
                self._suite.report(f"{self._profile} {workload.id} to restore: {label}", error)
                continue
            columns = [OWN] if not ours else [IN_PLACE] if process.role.point else [IN_PLACE, OWN]
            samples = self._samples(process, workload, RESTORE)
            how = AUTO if process.role.point is None else SAME
            for column in columns:
                run = functools.partial(
                    process.ask, "restore", name=name, in_place=column == IN_PLACE
                )
                cases.append(Case(f"{label}, {column}", run, samples=samples, probes=probes))
                keys[cases[-1].name] = (process, f"{column}, {how}" if ours else column)
        self._take(workload, RESTORE, cases, keys, probes, "get")
        self._service.clear()

    def _lags(self, workload: Described, cast: Mapping[str, Child]) -> None:
        probes = Probes(self._service)
        cases, keys = [], {}
        for label, process in cast.items():
            if process.role.point is not None:
                continue
            run, finish = self._saving(process, "background")
            samples = self._samples(process, workload, BACKGROUND)
            cases.append(Case(label, run, finish=finish, samples=samples, probes=probes))
            how = "start_save" if label.startswith("asyncckpt") else "in a thread"
            keys[label] = (process, how)
        self._take(workload, BACKGROUND, cases, keys, probes)

    def _take(
        self,
        workload: Described,
        scenario: str,
        cases: list[Case],
        keys: Mapping[str, tuple[Child, str]],
        probes: Probes,
        direction: str = "",
    ) -> None:
        def failed(case: measure.Case, error: Exception) -> None:
            self._suite.report(f"{self._profile} {workload.id} {scenario}: {case.name}", error)

        for case in cases:
            case.fresh_nbytes = FRESH * workload.nbytes
        if probes.floor is not None:
            probes.floor()  # the first one warms up
        steady_s = self._form.steady_s if self._profile == "loopback" else 0.0
        protocol = Protocol(self._form.samples, repeats_for_s=steady_s)
        taken = measure.rounds(cases, protocol, self._suite.rng, failed)
        if probes.floor is not None:
            self._add_floor(workload, scenario, taken, self._fastest(direction), direction)
        for name, samples in taken.items():
            process, column = keys[name]
            self._add(workload, scenario, process.role, column, samples)

    def _add_floor(
        self,
        workload: Described,
        scenario: str,
        taken: Mapping[str, list[Sample]],
        client: str,
        direction: str,
    ) -> None:
        """Record the floor as a measurement, with all its probes as samples."""
        probes = dict.fromkeys(
            probe
            for samples in taken.values()
            for sample in samples
            for probe in (sample.floor_before_s, sample.floor_after_s)
            if probe is not None
        )
        samples = [Sample(wall_s=probe, cpu_s=float("nan"), extra_nbytes=0) for probe in probes]
        column = f"{self._best(client, direction)}, {FLOOR}"
        self._add(workload, scenario, self._raw[client].role, column, samples)

    def _add(
        self, workload: Described, scenario: str, role: Role, column: str, samples: list[Sample]
    ) -> None:
        label = role.label.removesuffix(f", {SAME}")
        self._suite.found.measurements.append(
            Measurement(
                self._profile,
                workload.id,
                scenario,
                label,
                column,
                workload.nbytes,
                workload.leaf_count,
                label.startswith("asyncckpt"),
                role.raw,
                tuple(samples),
            )
        )

    def _samples(self, process: Child, workload: Described, scenario: str) -> int | None:
        kind = process.role.kind
        if kind not in self._cast.peers:
            return self._form.lag_samples if scenario == BACKGROUND else None
        if workload.id != "W1" or scenario in SLOW.get(kind, ()):
            return self._form.slow_samples
        return min(self._form.peer_samples, self._form.samples)

    def _commit(self) -> dict[str, float]:
        found = roundtrips.commit(self._service.requests(), record=RECORD, data=DATA)
        if found is None:
            return {}
        return {
            "record_trips": found.to_record,
            "end_trips": found.to_end,
            "record_s": found.record_s,
            "end_s": found.end_s,
            "largest_nbytes": self._largest_nbytes(),
        }

    def _largest_nbytes(self) -> int:
        sizes = self._service.objects(BUCKET)
        return max((nbytes for key, nbytes in sizes.items() if DATA in key), default=0)

    # --------------------------------------------------------------------------- small budgets

    def _memory(self, client: str) -> None:
        form = self._form
        workload, path = self._suite.workload("large")
        role = Role(f"asyncckpt, {LABELS[client]}", client)
        taken: dict[str, list[Sample]] = {SAVE: [], RESTORE: []}
        for _ in range(form.budget_samples):
            name = next(self._names)
            prefix = f"budget-{name}"
            for column, samples in taken.items():
                # Each in a process that has done nothing else.
                with self._child(role, workload.nbytes, form.budget_nbytes, prefix) as process:
                    restore = column == RESTORE
                    values = process.ask("lean", path=str(path), name=name, restore=restore)
                samples.append(
                    Sample(
                        wall_s=values.pop("wall_s"),
                        cpu_s=values.pop("cpu_s"),
                        extra_nbytes=int(values.pop("extra_nbytes")),
                        values={**values, "budget_nbytes": form.budget_nbytes},
                    )
                )
            self._service.clear()
        for column, samples in taken.items():
            self._add(workload, MEMORY, role, column, samples)

    # ---------------------------------------------------------------------------------- sweeps

    def _sweep(self, client: str) -> None:
        form = self._form
        workload, path = self._suite.workload("W1")
        points = list(grid(form.sweep_sizes, form.sweep_streams, workload.nbytes))
        seconds: dict[Point, list[float]] = {point: [] for point in points}
        role = Role(f"asyncckpt, {LABELS[client]}", client)
        with self._child(role, workload.nbytes) as process:
            process.ask("load", path=str(path))
            for _ in range(form.sweep_samples):
                order = list(points)
                self._suite.rng.shuffle(order)
                for point in order:
                    seconds[point].append(self._point_s(process, point))
            near = sorted(points, key=lambda point: median(seconds[point]))[: form.finalists]
            cold_s, picked = self._auto(process)
            for _ in range(WARM_UPS - 1):
                self._auto(process)
            auto: list[float] = []
            for _ in range(form.samples):
                order = [None, *near]
                self._suite.rng.shuffle(order)
                for candidate in order:
                    if candidate is not None:
                        seconds[candidate].append(self._point_s(process, candidate))
                        continue
                    self._service.reset()
                    wall_s, picked = self._auto(process)
                    auto.append(wall_s)
        swept = tuple(Swept(point, tuple(found)) for point, found in seconds.items())
        self._suite.found.sweeps.append(
            Sweep(self._profile, role.label, workload.nbytes, swept, tuple(auto), cold_s, picked)
        )

    def _auto(self, process: Child) -> tuple[float, Point]:
        """Seconds of a save, and the largest file and most requests that the service saw."""
        run, finish = self._saving(process, "save")
        try:
            wall_s = run()["wall_s"]
            return wall_s, Point(self._largest_nbytes(), self._service.stats()["max_in_flight"])
        finally:
            finish()

    def _point_s(self, process: Child, point: Point) -> float:
        try:
            name, nbytes, streams = next(self._names), point.nbytes, point.streams
            return process.ask("point", name=name, nbytes=nbytes, streams=streams)["wall_s"]
        finally:
            self._service.clear()


def grid(sizes: tuple[int, ...], streams: tuple[int, ...], nbytes: int) -> Iterator[Point]:
    """Return the points that differ: more streams than there are objects change nothing."""
    for size in sizes:
        count = -(-nbytes // size)
        enough = False
        for number in streams:
            if not enough:
                yield Point(size, number)
            enough = number >= count
