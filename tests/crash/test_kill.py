"""A process that is killed before any mutating system call leaves the old steps or the new ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash.faults import ForkServer
from tests.crash.invariant import leftovers, roots, violations
from tests.crash.scenarios import ACT, SCENARIOS, returned

# Fewest calls that each scenario can make: below, something was not counted.
FEWEST_CALLS = {
    "new": 40,
    "overwrite": 50,
    "retention": 59,
    "delete": 18,
    "nested": 43,
    "background": 74,
    "zstd": 40,
    "overwrite_in_two_steps": 55,
    "large": 55,
}
MAIN = ("new", "overwrite", "retention", "delete", "nested")


def kill_at_each_call(
    server: ForkServer, scratch: Path, name: str, control: str = "", only: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """How often the scenario was killed, and what was wrong afterwards."""
    scenario = SCENARIOS[name]
    visited, wrong = 0, []
    for number, args, outcome in server.each_call(ACT, roots(scratch, name, control), only=only):
        assert outcome.killed, outcome.describe()
        root = Path(args["root"])
        found = violations(scenario, root, scenario.possible(returned(outcome.calls)))
        wrong += [f"{problem}\n{outcome.describe()}" for problem in found]
        visited = number
        shutil.rmtree(root)
    print(f"{name} {control}: killed at {visited} points")
    return visited, wrong


def holds_at_each_call(server: ForkServer, scratch: Path, name: str) -> None:
    visited, wrong = kill_at_each_call(server, scratch, name)
    assert wrong == []
    assert visited >= FEWEST_CALLS[name]


@pytest.mark.parametrize("name", MAIN)
def test_a_kill_before_any_call_leaves_the_old_steps_or_the_new_ones(
    server: ForkServer, scratch: Path, name: str
) -> None:
    holds_at_each_call(server, scratch, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in MAIN])
def test_a_kill_before_any_call_of_a_rarer_save(
    server: ForkServer, scratch: Path, name: str
) -> None:
    holds_at_each_call(server, scratch, name)


def test_a_save_for_itself_sweeps_what_killed_ones_left(server: ForkServer, scratch: Path) -> None:
    args = roots(scratch, "nested")(1)
    steps = SCENARIOS["nested"].steps(Path(args["root"]))
    for _ in range(2):
        assert server.run(ACT, args, mode="kill", n=1, only=("fdatasync",)).killed
    assert len(leftovers(steps)) > 4
    assert server.run(ACT, args).result == {"failure": None, "left": []}
    assert [path.name for path in steps.iterdir()] == ["2"]


@pytest.mark.parametrize(
    ("control", "name", "only", "complaint"),
    [
        ("data_after_publication", "new", ("write",), "is listed, and"),
        ("record_first", "new", ("rename",), "is listed, and"),
        ("old_removed_first", "overwrite", ("rename",), "listed is {}"),
        ("retention_first", "retention", ("renameat2",), "listed is {2: 2}"),
    ],
)
def test_a_broken_rule_is_noticed(
    server: ForkServer,
    scratch: Path,
    control: str,
    name: str,
    only: tuple[str, ...],
    complaint: str,
) -> None:
    _, wrong = kill_at_each_call(server, scratch, name, control, only)
    assert [text for text in wrong if complaint in text], wrong
