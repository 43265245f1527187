"""Checkpoints of other libraries, restored by asyncckpt and by who wrote them; conversions.

The plain way to convert is to hold the whole state in memory: restore with one library, save with
the other. Both ways end with everything flushed.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncckpt import blocking
from benchmarks import files
from benchmarks.local.ours import OneShot, unverified
from benchmarks.local.suite import Suite
from benchmarks.local.transfers import restores
from benchmarks.measure import Floor, Run
from benchmarks.peers import ORBAX
from benchmarks.peers.orbax import Orbax
from benchmarks.peers.safetensors import Safetensors
from benchmarks.results import CONVERT, FOREIGN, OURS, SAFETENSORS
from benchmarks.subject import Subject
from benchmarks.workloads import Tree, Workload, difference, flat_arrays, leaves

TO_SAFETENSORS, FROM_SAFETENSORS = "to safetensors", "from safetensors"
PLAIN = "through memory"


# --------------------------------------------------------------------------------- conversions


@dataclass(slots=True)
class ConvertRun(Run):
    """Converts a checkpoint; the first result is compared, all are deleted again.

    Attributes:
        work: converts `source`; gets the path of the result.
        directory: where results go.
        suffix: how their names end.
        read: what a result holds, by path.
    """

    work: Callable[[Path], object]
    source: Path
    directory: Path
    workload: Workload
    suffix: str
    read: Callable[[Path], Tree]
    _made: Path | None = field(default=None, init=False)
    _checked: bool = field(default=False, init=False)

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        files.warm(self.source)

    def run(self) -> Mapping[str, float]:
        self._made = self.directory / f"converted{self.suffix}"
        with unverified():
            start = time.perf_counter()
            self.work(self._made)
            return {"wall_s": time.perf_counter() - start}

    def finish(self) -> None:
        made, self._made = self._made, None
        if made is None or not made.exists():
            return
        try:
            if not self._checked:
                wrong = difference(flat_arrays(self.workload.tree), self.read(made))
                if wrong:
                    raise AssertionError(f"converted to something else: {wrong}")
                self._checked = True
        finally:
            if made.is_dir():
                shutil.rmtree(made)
            else:
                made.unlink()
            files.settle(self.directory)


def conversions(
    ours: Path, theirs: Path, directory: Path, workload: Workload
) -> dict[tuple[str, str], ConvertRun]:
    """(subject, direction) -> what is measured, between a checkpoint and a safetensors file."""

    def run(number: int, source: Path, work: Callable[[Path], object]) -> ConvertRun:
        to_file = source == ours
        return ConvertRun(
            work,
            source,
            directory / str(number),
            workload,
            ".safetensors" if to_file else "",
            _load_file if to_file else _restore,
        )

    return {
        (OURS, TO_SAFETENSORS): run(0, ours, lambda path: blocking.convert(ours, path)),
        (PLAIN, TO_SAFETENSORS): run(1, ours, lambda path: _save_file(_restore(ours), path)),
        (OURS, FROM_SAFETENSORS): run(2, theirs, lambda path: blocking.convert(theirs, path)),
        (PLAIN, FROM_SAFETENSORS): run(
            3, theirs, lambda path: blocking.save(path, _load_file(theirs))
        ),
    }


def _restore(path: Path) -> Tree:
    return dict(leaves(blocking.restore(path)))


def _load_file(path: Path) -> Tree:
    from safetensors.numpy import load_file

    loaded: Tree = load_file(path)
    return loaded


def _save_file(tree: Tree, path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tree, path)
    files.fsync_tree(path)


# ----------------------------------------------------------------------------------- scenarios


def run(suite: Suite, workload: Workload) -> None:
    """Measure how asyncckpt and its peers restore and convert each other's checkpoints."""
    makers: dict[str, tuple[Callable[[Path], Subject], bool]] = {}
    if importlib.util.find_spec("orbax"):
        makers[ORBAX] = (Orbax, False)
    if suite.full:
        makers[SAFETENSORS] = (Safetensors, True)
    for label, (make, flat) in makers.items():
        what = f"{workload.id} {FOREIGN}, {label}"
        work = functools.partial(_foreign, suite, workload, label, make, flat)
        suite.attempt(what, FOREIGN, work)
    if suite.full:
        suite.attempt(f"{workload.id} {CONVERT}", CONVERT, lambda: _convert(suite, workload))


def _foreign(
    suite: Suite, workload: Workload, label: str, make: Callable[[Path], Subject], flat: bool
) -> None:
    with suite.scratch("foreign") as directory:
        subject = make(directory)
        try:
            saved = subject.save(workload)
            kept = {OURS: (OneShot(directory, flat), saved), label: (subject, saved)}
            restores(suite, workload, FOREIGN, kept, of=f"of {label}, ")
        finally:
            subject.close()


def _convert(suite: Suite, workload: Workload) -> None:
    with suite.scratch("convert") as directory:
        ours = directory / "ours"
        blocking.save(ours, workload.tree)
        theirs = Safetensors(directory / "theirs").save(workload).path
        runs = conversions(ours, theirs, directory / "made", workload)
        floor = Floor(lambda: suite.floors.write_s(workload.nbytes))
        cases = [
            work.case(
                ", ".join(key),
                floor=floor,
                fresh_nbytes=2 * workload.fresh_nbytes,
            )
            for key, work in runs.items()
        ]
        taken = suite.rounds(workload, CONVERT, cases)
        for key in runs:
            if ", ".join(key) in taken:
                suite.add(workload, CONVERT, *key, "raw write", taken[", ".join(key)])
