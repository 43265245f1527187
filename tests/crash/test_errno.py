"""A mutating system call that fails makes the save raise and leave nothing, or changes nothing.

An error arrives once, or from then on at every call; before the call has taken effect, or after.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.faults import ForkServer, Mode, Outcome
from tests.crash.invariant import roots, violations
from tests.crash.scenarios import ACT, SCENARIOS, Scenario, State, returned
from tests.crash.test_kill import FEWEST_CALLS

FLUSHES = ("fsync", "fdatasync")
RENAMES = ("rename", "renameat", "renameat2")
# An interrupted call of these is made again by Python, or by the library.
REPEATED = ("open64", "openat64", "write", "pwrite64", *FLUSHES, "ftruncate64", "renameat2")
MAIN = ("new", "overwrite", "retention", "delete", "nested")


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of failing.

    Attributes:
        harmless: the library makes good for it, so that the save must succeed.
        only: the calls that it is tried on, all if empty.
    """

    mode: Mode = "error"
    errno: int = errno.EIO
    persistent: bool = False
    harmless: bool = False
    only: tuple[str, ...] = ()


KINDS = {
    "EIO": Kind(),
    "ENOSPC": Kind(errno=errno.ENOSPC),
    "EDQUOT": Kind(errno=errno.EDQUOT),
    "EIO-for-good": Kind(persistent=True),
    "ENOSPC-for-good": Kind(errno=errno.ENOSPC, persistent=True),
    "EROFS-for-good": Kind(errno=errno.EROFS, persistent=True),
    "EINTR": Kind(errno=errno.EINTR),
    "EINTR-where-Python-repeats": Kind(errno=errno.EINTR, harmless=True, only=REPEATED),
    "short-write": Kind("short", harmless=True),
    "flush-fails-late": Kind("error_after", only=FLUSHES),
    "rename-fails-late": Kind("error_after", only=RENAMES),
}
FREQUENT = ("EIO", "ENOSPC")


def fail_at_each_call(
    server: ForkServer, scratch: Path, name: str, kind: Kind, control: str = ""
) -> tuple[int, list[str]]:
    """How many calls were made to fail, and what was wrong afterwards."""
    visited, wrong = 0, []
    for number, args, outcome in server.each_call(
        ACT,
        roots(scratch, name, control),
        mode=kind.mode,
        errno=kind.errno,
        persistent=kind.persistent,
        only=kind.only,
    ):
        root = Path(args["root"])
        found = complaints(SCENARIOS[name], root, kind, outcome)
        wrong += [f"{problem}\n{outcome.describe()}\n{outcome.result}" for problem in found]
        visited = number
        shutil.rmtree(root)
    print(f"{name} {control}: {visited} calls failed")
    return visited, wrong


def complaints(scenario: Scenario, root: Path, kind: Kind, outcome: Outcome) -> list[str]:
    """What is wrong with how the scenario ended, and with what it left."""
    if outcome.exit_status != 0:
        return ["the process did not end by itself"]
    failure: dict[str, Any] | None = outcome.result["failure"]
    wrong = [f"{what} is left in the process" for what in outcome.result["left"]]
    assert outcome.at is not None
    labels = returned(outcome.calls)
    if failure is None:
        lost = outcome.at.name in FLUSHES and kind.mode != "short" and kind.errno != errno.EINTR
        if lost and not _is_of_deletion(scenario, kind, outcome):
            wrong.append("a flush failed and the save was acknowledged")
    else:
        wrong += _complaints_about(failure, root, kind)
    wrong += violations(scenario, root, _possible(scenario, labels, failure))
    return wrong


def _is_of_deletion(scenario: Scenario, kind: Kind, outcome: Outcome) -> bool:
    """Whether the first failing call is of a deletion, which comes after the save, if there is one.

    Where there is no space for a move, a deletion is flushed elsewhere.
    """
    assert outcome.at is not None
    if scenario is SCENARIOS["delete"] and kind.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    before = outcome.calls[: outcome.at.number]
    return any(Path(call.path).name.startswith("trash-") for call in before)


def _complaints_about(failure: dict[str, Any], root: Path, kind: Kind) -> list[str]:
    wrong = []
    if kind.harmless:
        wrong.append("the library does not make good for it")
    if not failure["ours"]:
        wrong.append(f"a {failure['type']} was raised")
    if str(root) not in failure["text"] or not str(failure["location"]).startswith(str(root)):
        wrong.append("the error does not say where it happened")
    if f"({errno.errorcode[kind.errno]})" not in failure["text"]:
        wrong.append("the error does not say what happened")
    if "removing the attempt" in failure["text"]:
        wrong.append("the error is that of the clean-up")
    return wrong


def _possible(
    scenario: Scenario, labels: Sequence[str], failure: dict[str, Any] | None
) -> tuple[State, ...]:
    """What may be listed after the scenario returned, or raised."""
    if failure is None:
        # Old steps that could not be deleted are tried again by the next save.
        after = scenario.states[-1]
        return tuple(state for state in scenario.states if after.items() <= state.items())
    if failure["visible"]:
        return scenario.states[1:]
    states = scenario.after_error or scenario.states[:1]
    return tuple(state for state in states if all(int(label) in state for label in labels))


def holds_at_each_call(server: ForkServer, scratch: Path, name: str, kind: str) -> None:
    visited, wrong = fail_at_each_call(server, scratch, name, KINDS[kind])
    assert wrong == []
    assert visited >= (1 if KINDS[kind].only else FEWEST_CALLS[name])


@pytest.mark.parametrize("kind", FREQUENT)
@pytest.mark.parametrize("name", MAIN)
def test_a_call_that_fails_raises_and_leaves_nothing(
    server: ForkServer, scratch: Path, name: str, kind: str
) -> None:
    holds_at_each_call(server, scratch, name, kind)


def test_a_replaced_checkpoint_that_could_not_be_removed_is_swept_later(
    server: ForkServer, scratch: Path
) -> None:
    kind = Kind(only=("unlinkat", "unlink", "rmdir"))
    visited, wrong = fail_at_each_call(server, scratch, "overwrite", kind)
    assert wrong == []
    assert visited >= 10


def test_an_error_of_the_cleanup_does_not_replace_the_first_one(
    server: ForkServer, scratch: Path
) -> None:
    """The flush after the rename fails, and so does everything after it."""
    kind = Kind(persistent=True, only=("fsync", "rename", "unlink"))
    visited, wrong = fail_at_each_call(server, scratch, "new", kind)
    assert wrong == []
    assert visited >= 8


@pytest.mark.parametrize(
    ("control", "kind", "complaint"),
    [
        (
            "flush_errors_ignored",
            Kind(only=FLUSHES),
            "a flush failed and the save was acknowledged",
        ),
        ("write_errors_ignored", Kind(only=("pwrite64",)), "is listed, and"),
        ("short_writes_ignored", Kind("short", only=("pwrite64",)), "is listed, and"),
        ("nothing_aborted", Kind(only=("fdatasync",)), "is left in the process"),
    ],
)
def test_a_broken_rule_is_noticed(
    server: ForkServer, scratch: Path, control: str, kind: Kind, complaint: str
) -> None:
    _, wrong = fail_at_each_call(server, scratch, "new", kind, control)
    assert [text for text in wrong if complaint in text], wrong


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_of_every_save_fails_in_every_way(
    server: ForkServer, scratch: Path, name: str, kind: str
) -> None:
    holds_at_each_call(server, scratch, name, kind)
