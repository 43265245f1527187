"""What power loss could take away: at no moment is something visible that is not durable.

The calls of an undisturbed run are replayed on a model of a disk that keeps only what was flushed:
a file's bytes after a flush of the file, a name after a flush of its directory.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.crash.faults import Call, ForkServer
from tests.crash.invariant import roots
from tests.crash.scenarios import ACT, SCENARIOS, Scenario

RECORD = "checkpoint.json"
MAKES = ("mkdir", "mkdirat")
OPENS = ("open", "open64", "openat", "openat64")
WRITES = ("write", "pwrite64", "fallocate", "ftruncate64", "posix_fallocate")
FLUSHES = ("fsync", "fdatasync")
RENAMES = ("rename", "renameat2")
REMOVES = ("unlink", "unlinkat", "rmdir")


class Disk:
    """What is not durable yet, after some calls.

    Attributes:
        problems: what was visible, or taken for durable, while it was not.
    """

    def __init__(self, root: Path, scenario: Scenario) -> None:
        self._root = str(root)
        self._steps = str(scenario.steps(root))
        self._visible = {f"{self._steps}/{step}" for step in scenario.before}
        self._replaced: set[str] = set()
        self._files: set[str] = set()
        self._bytes: set[str] = set()
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._last = ("", "")
        self.problems: list[str] = []

    def apply(self, call: Call) -> None:
        """The call was made."""
        path = call.path
        if os.path.basename(path).startswith("returned-"):
            self._acknowledged(call)
        elif call.name in MAKES:
            self._renamed_in(path)
        elif call.name in OPENS:
            if path not in self._files:
                self._files.add(path)
                self._renamed_in(path)
        elif call.name in WRITES:
            if os.path.basename(path) == RECORD:
                self._written_last(call)
            self._bytes.add(path)
        elif call.name in FLUSHES:
            self._bytes.discard(path)
            if path not in self._files:
                self._names.pop(path, None)
        elif call.name in RENAMES:
            self._rename(call)
        elif call.name in REMOVES:
            self._removed(call)
        else:
            raise AssertionError(f"a call that the model does not know: {call}")

    def _renamed_in(self, path: str) -> None:
        self._names[os.path.dirname(path)].add(path)

    def _below(self, path: str) -> list[str]:
        """What below the path is not durable."""
        left = [f"bytes of {p}" for p in self._bytes if _is_below(p, path)]
        names = [n for d, ns in self._names.items() if d == path or _is_below(d, path) for n in ns]
        return sorted(left) + [f"the name {name}" for name in sorted(names)]

    def _written_last(self, call: Call) -> None:
        attempt = os.path.dirname(call.path)
        for path in self._bytes - {call.path}:
            if _is_below(path, attempt):
                self.problems.append(f"{call}: the record is written before {path} is durable")

    def _rename(self, call: Call) -> None:
        source, target = call.path, call.second_path
        if call.name == "renameat2" and target in self._visible:
            # The first one may not replace and fails, the second one exchanges.
            repeated, self._last = self._last == (source, target), (source, target)
            if not repeated:
                return
            self._replaced.add(source)
        else:
            if source in self._visible and self._names[self._steps]:
                self.problems.append(f"{call}: moved away before what was saved last is durable")
            self._move(source, target)
        if os.path.dirname(target) == self._steps:
            self.problems += [f"{call}: {left} is not durable" for left in self._below(source)]
            self.problems += [f"{call}: {left} is not durable" for left in self._below(target)]
            self._visible.add(target)
        elif source in self._visible:
            self._visible.discard(source)
            self._replaced.add(target)
        self._renamed_in(source)
        self._renamed_in(target)

    def _move(self, source: str, target: str) -> None:
        def moved(path: str) -> str:
            inside = path == source or _is_below(path, source)
            return target + path[len(source) :] if inside else path

        self._files = set(map(moved, self._files))
        self._bytes = set(map(moved, self._bytes))
        names = {moved(d): set(map(moved, ns)) for d, ns in self._names.items()}
        self._names = defaultdict(set, names)

    def _removed(self, call: Call) -> None:
        # After power loss the old name may be back: then its bytes have to be there.
        if any(_is_below(call.path, path) for path in self._replaced) and self._names[self._steps]:
            self.problems.append(f"{call}: removed before its new name is durable")
        self._files.discard(call.path)
        self._bytes.discard(call.path)
        self._renamed_in(call.path)

    def _acknowledged(self, call: Call) -> None:
        at = self._steps
        while True:
            for name in self._names[at]:
                if name == self._steps or name in self._visible or _is_below(self._steps, name):
                    self.problems.append(f"{call}: the name {name} is not durable")
            if at == self._root:
                break
            at = os.path.dirname(at)
        for step in self._visible:
            self.problems += [f"{call}: {left} is not durable" for left in self._below(step)]


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(f"{directory}/")


def problems_of(calls: Iterable[Call], root: Path, scenario: Scenario) -> list[str]:
    """What power loss could have broken after some of these calls."""
    disk = Disk(root, scenario)
    for call in calls:
        disk.apply(call)
    return disk.problems


def calls_of(
    server: ForkServer, scratch: Path, name: str, control: str = ""
) -> tuple[Path, Sequence[Call]]:
    args = roots(scratch, name, control)(1)
    outcome = server.run(ACT, args)
    assert outcome.exit_status == 0, outcome.describe()
    assert outcome.result["failure"] is None, outcome.result
    shutil.rmtree(args["root"])
    return Path(args["root"]), outcome.calls


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_visible_or_acknowledged_before_it_is_durable(
    server: ForkServer, scratch: Path, name: str
) -> None:
    root, calls = calls_of(server, scratch, name)
    assert problems_of(calls, root, SCENARIOS[name]) == []
    assert sum(call.name in FLUSHES for call in calls) >= 4


def _may_be_lost(flush: Call, calls: Sequence[Call]) -> bool:
    """Whether this flush is of something that no checkpoint depends on."""
    before = calls[flush.number - 2]
    made_control = before.name == "mkdir" and os.path.basename(before.path) == ".asyncckpt"
    name = os.path.basename(flush.path)
    return name.endswith(".owner") or name == ".asyncckpt" or made_control


def _with_repetitions(flush: Call, calls: Sequence[Call]) -> list[Call]:
    """The flush and those of the same path that follow before a save is acknowledged."""
    found = [flush]
    for call in calls[flush.number :]:
        if os.path.basename(call.path).startswith("returned-"):
            break
        if call.name in FLUSHES and call.path == flush.path:
            found.append(call)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_save_without_any_one_of_its_flushes_is_noticed(
    server: ForkServer, scratch: Path, name: str
) -> None:
    root, calls = calls_of(server, scratch, name)
    flushes = [call for call in calls if call.name in FLUSHES and not _may_be_lost(call, calls)]
    unnoticed = []
    for flush in flushes:
        # The second save in the background may be done before the first one is acknowledged: then
        # it flushes the same directory for both.
        lost = _with_repetitions(flush, calls) if name == "background" else [flush]
        if not problems_of((c for c in calls if c not in lost), root, SCENARIOS[name]):
            unnoticed.append(str(flush))
    assert unnoticed == []
    print(f"{name}: {len(flushes)} flushes left out, one at a time")


@pytest.mark.parametrize(
    ("control", "complaint"),
    [
        ("files_not_flushed", "the record is written before"),
        ("directories_not_flushed", "the name"),
        ("data_after_publication", "bytes of"),
    ],
)
def test_a_broken_rule_is_noticed(
    server: ForkServer, scratch: Path, control: str, complaint: str
) -> None:
    root, calls = calls_of(server, scratch, "new", control)
    problems = problems_of(calls, root, SCENARIOS["new"])
    assert [text for text in problems if complaint in text], problems
