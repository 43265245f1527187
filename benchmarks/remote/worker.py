"""The process of one subject or raw client: it does what its parent asks, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.remote import ours, peers, raw, state
from benchmarks.remote.raw import CLIENTS, Point
from benchmarks.remote.subject import Setup, Subject, Values, loop_factory
from benchmarks.subject import Restored
from benchmarks.workloads import Tree, Workload, difference, flat_arrays, targets_like

PEERS: dict[str, Callable[[Setup], Subject]] = {
    "tensorstore": peers.TensorStore,
    "dcp": peers.Dcp,
    "s3torchconnector": peers.S3Connector,
    "safetensors": peers.Safetensors,
    "orbax": peers.Orbax,
}

TINY = Workload("tiny", "opens connections", {"x": np.arange(8.0)})


class SubjectWorker:
    """Saves and restores workloads with one subject."""

    def __init__(
        self, setup: Setup, kind: str, point: Point | None, reads: int | None = None
    ) -> None:
        self._setup = setup
        self._kind = kind
        self._workload = Workload("", "", {})
        self._standing_nbytes = 0
        self._subject = self._made(point, reads)

    def _made(self, point: Point | None, reads: int | None = None) -> Subject:
        if self._kind in PEERS:
            return PEERS[self._kind](self._setup)
        return ours.Ours(self._setup, self._kind, point, reads)

    def load(self, path: str) -> Values:
        """Load the workload of this file, and do what is done once."""
        self._workload = state.read(Path(path))
        before = measure.resident_nbytes()
        self._subject.open(self._workload)
        # What a prepared pool takes; it would be missing from peaks that are counted later.
        self._standing_nbytes = max(0, measure.resident_nbytes() - before)
        return {}

    def _measured(self, work: Callable[[], Mapping[str, float]]) -> Values:
        values = measured(work)
        values["extra_nbytes"] += self._standing_nbytes
        return values

    def lean(self, path: str, name: int, restore: bool) -> Values:
        """One save, or one restore in place, with all memory that it takes, kept or not.

        What a client and its libraries take at first was taken before. A restore is one of what
        another process saved this way.
        """
        warm = self._made(None)
        warm.open(TINY)
        if not restore:
            warm.save(TINY, name + 1)
        warm.restore(TINY, name + 1)
        warm.close()
        self._workload = state.read(Path(path))
        targets = targets_like(self._workload.tree) if restore else None

        def work() -> Mapping[str, float]:
            if targets is None:
                self._subject.open(self._workload)
                return self._subject.save(self._workload, name)
            self._subject.open(TINY)
            return self._subject.restore_into(targets, name).values

        values = measured(work)
        if targets is not None:
            self._compare(targets, flat=False)
        return values

    def point(self, name: int, nbytes: int, streams: int) -> Values:
        """Save with files of this size and so many streams, by a `Checkpointer` of its own."""
        subject = self._made(Point(nbytes, streams))
        try:
            subject.open(TINY)
            subject.save(TINY, name + 1)  # its session is open
            subject.prepare(self._workload)
            return measured(lambda: subject.save(self._workload, name))
        finally:
            subject.close()

    def save(self, name: int) -> Values:
        return self._measured(lambda: self._subject.save(self._workload, name))

    def background(self, name: int) -> Values:
        return self._measured(lambda: self._subject.background(self._workload, name))

    def restore(self, name: int, in_place: bool) -> Values:
        """Compare what came back with the source."""
        targets = targets_like(self._workload.tree) if in_place else None
        restored: Restored | None = None

        def work() -> Mapping[str, float]:
            nonlocal restored
            if targets is None:
                restored = self._subject.restore(self._workload, name)
            else:
                restored = self._subject.restore_into(targets, name)
            return restored.values

        values = self._measured(work)
        assert restored is not None
        self._compare(restored.tree, flat=restored.flat)
        return values

    def discard(self, name: int) -> Values:
        self._subject.discard(name)
        return {}

    def _compare(self, tree: Tree, *, flat: bool) -> None:
        source = self._workload.tree
        wrong = difference(flat_arrays(source) if flat else source, tree)
        if wrong:
            raise AssertionError(f"something else was restored: {wrong}")

    def close(self) -> Values:
        self._subject.close()
        return {}


class RawWorker:
    """Puts and gets bytes with a bare client."""

    def __init__(self, setup: Setup, kind: str) -> None:
        self._prefix = setup.prefix
        self._client = CLIENTS[kind](setup.endpoints)
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._runner.run(self._client.open())
        self._data = np.empty(0, dtype=np.uint8)

    def load(self, path: str) -> Values:
        """Objects have bytes of this file."""
        self._data = state.shared(Path(path))
        return {}

    def write(self, name: int, nbytes: int, size: int, streams: int) -> Values:
        """Objects of `size` bytes, `nbytes` in all."""
        parts = raw.bodies(self._client, self._data, nbytes, size)
        prefix = f"{self._prefix}/{name}"

        def work() -> Values:
            wall_s = self._runner.run(raw.write(self._client, prefix, parts, streams))
            return {"wall_s": wall_s}

        return measured(work)

    def read(self, name: int, sizes: list[int], size: int, streams: int, copy: bool) -> Values:
        """Every byte of the objects of these sizes, in ranges of `size`."""
        target = np.ones(sum(sizes), dtype=np.uint8) if copy else None
        prefix = f"{self._prefix}/{name}"

        def work() -> Values:
            reading = raw.read(self._client, prefix, sizes, size, streams, target)
            return {"wall_s": self._runner.run(reading)}

        return measured(work)

    def close(self) -> Values:
        self._runner.run(self._client.close())
        self._runner.close()
        return {}


def measured(work: Callable[[], Mapping[str, float]]) -> Values:
    """Run `work`; add the CPU seconds and the peak of memory of this process meanwhile."""
    gc.collect()
    baseline = measure.resident_nbytes()
    measure.reset_peak()
    cpu_before_s = measure.cpu_seconds()
    values = dict(work())
    cpu_s = measure.cpu_seconds() - cpu_before_s
    extra_nbytes = max(0, measure.peak_nbytes() - baseline)
    return {"cpu_s": cpu_s, "extra_nbytes": extra_nbytes, **values}


def serve(
    pipe: Connection,
    errors: Path,
    setup: Setup,
    kind: str,
    bare: bool,
    point: Point | None,
    reads: int | None,
) -> None:
    """Answer requests, each a method and its arguments, until the other end of the pipe closes.

    An answer has values, or says why there are none. What is printed goes to the file `errors`.
    """
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for printed in (1, 2):
        os.dup2(file, printed)
    worker: Any = None
    try:
        worker = RawWorker(setup, kind) if bare else SubjectWorker(setup, kind, point, reads)
        pipe.send(({}, ""))
        while True:
            name, arguments = pipe.recv()
            try:
                answer = getattr(worker, name)(**arguments), ""
            except Exception as error:
                traceback.print_exc()
                answer = {}, described(error)
            pipe.send(answer)
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(({}, described(error)))
    finally:
        # Threads of the libraries that are measured are not waited for.
        sys.stderr.flush()
        os._exit(0)


def described(error: BaseException) -> str:
    """Type and text of an error, of a group those of the first one in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
