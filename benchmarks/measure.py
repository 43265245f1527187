"""Sampling protocol: paired floor probes, repeated samples, CPU seconds and peak memory.

The floor (the best that plain system calls do with as many bytes) is probed right before and right
after every sample; a probe between two samples serves both if the second begins at once. Where the
two probes of a sample differ by more than the tolerance the machine was not steady, and the sample
is taken again, a bounded number of times; what is kept is the attempt whose probes agreed best, and
its spread is reported with it. The choice never looks at the sample itself.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import mmap
import random
import resource
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run.

    Attributes:
        wall_s: seconds of the timed part.
        cpu_s: CPU seconds of this process, its threads and its finished children meanwhile.
        extra_nbytes: peak resident memory above that of the start, plus what the subject keeps.
        floor_before_s: floor probe right before, None where no floor applies.
        floor_after_s: floor probe right after.
        repeats: how many attempts were thrown away because their probes differed.
        values: further figures of the same run.
    """

    wall_s: float
    cpu_s: float
    extra_nbytes: int
    floor_before_s: float | None = None
    floor_after_s: float | None = None
    repeats: int = 0
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def floor_s(self) -> float | None:
        """Mean of the two probes."""
        if self.floor_before_s is None or self.floor_after_s is None:
            return None
        return (self.floor_before_s + self.floor_after_s) / 2

    @property
    def floor_spread(self) -> float:
        """By how much the slower probe exceeds the faster one; 0.0 without a floor."""
        if self.floor_before_s is None or self.floor_after_s is None:
            return 0.0
        low, high = sorted((self.floor_before_s, self.floor_after_s))
        return high / low - 1 if low > 0 else float("inf")


LEAST_ROUNDS = 3
"""Rounds that are finished although the time is up; the report shows how many samples there are."""


SHARED_S = 2.0
"""A probe also serves the next sample if that begins within so many seconds."""


@dataclass(slots=True)
class Floor:
    """What plain system calls take for as many bytes, probed before and after samples.

    Attributes:
        probe: measures the seconds.
        clock: seconds, monotonic.
    """

    probe: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    _last_s: float | None = field(default=None, init=False)
    _ended_s: float = field(default=0.0, init=False)

    def before(self) -> float:
        """Return the probe after the previous sample if it has just ended, else a new one."""
        if self._last_s is not None and self.clock() - self._ended_s <= SHARED_S:
            return self._last_s
        return self.after()

    def after(self) -> float:
        """Return a new probe."""
        self._last_s = self.probe()
        self._ended_s = self.clock()
        return self._last_s

    def forget(self) -> None:
        """Share no earlier probe with the next sample: two probes differed, so one may be wrong."""
        self._last_s = None


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Case:
    """One measured case: `run` is timed by itself, everything around it is not.

    Attributes:
        name: unique within its rounds.
        run: does the work; returns at least `wall_s`, the seconds of its timed part; also `cpu_s`
            and `extra_nbytes`, if they are those of another process.
        prepare: called before `run`, and before a floor probe that is taken for it alone.
        finish: called after the floor probe that follows `run`: compares, deletes, settles.
        floor: what plain system calls take for as many bytes, or None. Cases of the same rounds
            share it.
        fresh_nbytes: memory that `run` may allocate; it is made sure that the machine has so much
            ready (see `Spare`).
        standing_nbytes: memory that the subject keeps between samples, added to their peaks.
        samples: how many, where it is not what the protocol says.
        warm_up: whether an unmeasured run comes first.
    """

    name: str
    run: Callable[[], Mapping[str, float]]
    prepare: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    floor: Floor | None = None
    fresh_nbytes: int = 0
    standing_nbytes: int = 0
    samples: int | None = None
    warm_up: bool = True

    def attempt(self, *, with_floor: bool) -> Sample:
        """Run once, between two probes of the floor."""
        floor = self.floor if with_floor else None
        self.prepare()
        try:
            # A full collection takes 0.3 s with all peers imported; there is one in each round.
            gc.collect(1)
            SPARE.free(self.fresh_nbytes)
            before_s = floor.before() if floor else None
            baseline = resident_nbytes()
            reset_peak()
            cpu_before_s = cpu_seconds()
            values = dict(self.run())
            cpu_s = cpu_seconds() - cpu_before_s
            extra_nbytes = max(0, peak_nbytes() - baseline) + self.standing_nbytes
            after_s = floor.after() if floor else None
        finally:
            self.finish()
            SPARE.hold(self.fresh_nbytes)
        return Sample(
            wall_s=values.pop("wall_s"),
            cpu_s=values.pop("cpu_s", cpu_s),
            extra_nbytes=int(values.pop("extra_nbytes", extra_nbytes)),
            floor_before_s=before_s,
            floor_after_s=after_s,
            values=values,
        )


class Run(ABC):
    """What is measured as a case: methods as the attributes of `Case`."""

    def prepare(self) -> None:
        """Prepare nothing."""
        return None

    @abstractmethod
    def run(self) -> Mapping[str, float]:
        """Do the work."""

    def finish(self) -> None:
        """Leave everything as it is."""
        return None

    def case(self, name: str, **more: Any) -> Case:
        """Return this as a case, with further attributes."""
        return Case(name, self.run, self.prepare, self.finish, **more)


@dataclass(frozen=True, slots=True)
class Protocol:
    """Number of samples and of their repetitions.

    Attributes:
        samples: samples per case; medians need at least five to mean something.
        max_repeats: attempts thrown away at most per sample.
        tolerance: difference of the floor probes, as a fraction, above which a sample is repeated.
        repeats_for_s: seconds that repetitions may take in all rounds of one call, so that a run
            ends in time also on a busy machine; None: no such limit.
        until_s: on the clock, when no further round begins that is not one of the first few; None:
            never.
        clock: seconds, monotonic.
    """

    samples: int = 5
    max_repeats: int = 5
    tolerance: float = 0.10
    repeats_for_s: float | None = None
    until_s: float | None = None
    clock: Callable[[], float] = time.monotonic

    def is_late(self) -> bool:
        """Whether the time is up."""
        return self.until_s is not None and self.clock() > self.until_s


@dataclass(slots=True)
class Patience:
    """Seconds that are left for repetitions; None without a limit."""

    left_s: float | None = None


def rounds(
    cases: Sequence[Case],
    protocol: Protocol,
    rng: random.Random,
    on_error: Callable[[Case, Exception], None] | None = None,
) -> dict[str, list[Sample]]:
    """Sample every case: one unmeasured run each, then rounds in a shuffled order.

    Cases that ask for a single sample, or for no warm-up, have no unmeasured run. The i-th samples
    of all cases belong to the same round, so that their ratios are of about the same minute.

    A case that raises is left out from there on, with the samples it has, and `on_error` is told;
    without `on_error` the exception goes through.
    """
    taken: dict[str, list[Sample]] = {case.name: [] for case in cases}
    if len(taken) != len(cases):
        raise ValueError(f"names of cases are not unique: {[case.name for case in cases]}")
    failed: set[str] = set()
    patience = Patience(protocol.repeats_for_s)

    def guarded(case: Case, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            if on_error is None:
                raise
            failed.add(case.name)
            on_error(case, error)

    def sampled(case: Case) -> None:
        taken[case.name].append(take(case, protocol, patience))

    try:
        for case in cases:
            if case.warm_up and case.samples != 1:
                guarded(case, functools.partial(case.attempt, with_floor=False))
        for index in range(protocol.samples):
            if index >= LEAST_ROUNDS and protocol.is_late():
                break
            order = [case for case in cases if case.samples is None or index < case.samples]
            rng.shuffle(order)
            gc.collect()
            for case in order:
                if case.name not in failed:
                    guarded(case, functools.partial(sampled, case))
    finally:
        SPARE.release()
    return {name: samples for name, samples in taken.items() if samples}


def take(case: Case, protocol: Protocol, patience: Patience) -> Sample:
    """Take a sample whose floor probes agree, or of all attempts the one where they agree best."""
    best: Sample | None = None
    repeats = 0
    while True:
        start = protocol.clock()
        sample = case.attempt(with_floor=True)
        if repeats and patience.left_s is not None:
            patience.left_s -= protocol.clock() - start
        if best is None or sample.floor_spread < best.floor_spread:
            best = sample
        if sample.floor_spread <= protocol.tolerance:
            break
        if case.floor is not None:
            case.floor.forget()
        if repeats >= protocol.max_repeats:
            break
        if patience.left_s is not None and patience.left_s <= 0:
            break
        repeats += 1
    return dataclasses.replace(best, repeats=repeats)


# ------------------------------------------------------------------------------------ resources


def cpu_seconds() -> float:
    """User and system CPU seconds of this process with all threads, and of its ended children."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def reset_peak() -> bool:
    """`peak_nbytes` counts from now; False where the system cannot reset it (not Linux)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def peak_nbytes() -> int:
    """Largest resident set since `reset_peak`, in bytes (elsewhere than Linux: since the start)."""
    peak = proc_nbytes("self/status", "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_nbytes() -> int:
    """Resident set of this process in bytes."""
    resident = proc_nbytes("self/status", "VmRSS")
    return peak_nbytes() if resident is None else resident


TOUCH_THREADS = 2
"""Each core waits for the pages that it touches: two of them wait at the same time."""


class Spare:
    """Memory that this process holds between samples, and frees right before each.

    A virtual machine may hand free pages back to its host within seconds, and getting them again
    costs more than anything that is measured here: first touches at 0.5 GB/s were seen, and at
    20 GB/s right after. Whoever allocates, or writes through the page cache, would pay for it at
    random. What is freed at once before a sample is memory that the machine really has, and what
    the sample leaves is taken before the host gets it.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    @property
    def holds(self) -> bool:
        """Whether it holds any."""
        return self._memory is not None

    def hold(self, nbytes: int) -> None:
        """Hold at least so many bytes, touched; what is held already stays."""
        if len(self._memory or b"") >= nbytes:
            return
        self.release()
        self._memory = memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE]
        with ThreadPoolExecutor(TOUCH_THREADS) as pool:
            list(pool.map(lambda part: part.fill(1), np.array_split(pages, TOUCH_THREADS)))

    def free(self, nbytes: int) -> None:
        """Free at least so many bytes; if none are needed, go on holding."""
        if nbytes:
            self.hold(nbytes)
            self.release()

    def release(self) -> None:
        """Free all."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


SPARE = Spare()
"""That of this process: free memory belongs to all cases."""


def device_read_nbytes() -> int | None:
    """Bytes this process made block devices read so far; None where the system does not say."""
    return proc_nbytes("self/io", "read_bytes")


def call_read_nbytes() -> int | None:
    """Bytes this process read so far by system calls; None where the system does not say."""
    return proc_nbytes("self/io", "rchar")


def proc_nbytes(name: str, key: str) -> int | None:
    """Return a number of bytes from a file in /proc; None where the system does not say."""
    number, _, unit = (proc_value(name, key) or "").partition(" ")
    return int(number) * (1024 if unit == "kB" else 1) if number else None


def proc_value(name: str, key: str) -> str | None:
    """Return the text after the first `key` in a file in /proc, or None."""
    try:
        lines = Path("/proc", name).read_text().splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for found, _, value in pairs if found.strip() == key), None)


# ------------------------------------------------------------------------------------- medians


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of nothing."""
    return statistics.median(values) if values else float("nan")
