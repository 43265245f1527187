"""A process that is killed before any mutating system call leaves the old steps or the new ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.faults import ForkServer
from tests.crash.invariant import prepare, violations
from tests.crash.scenarios import ACT, IMPORTS, SCENARIOS, returned

# Fewest calls that each scenario can make: below, something was not counted.
FEWEST_CALLS = {
    "new": 40,
    "overwrite": 50,
    "retention": 90,
    "delete": 12,
    "nested": 40,
    "background": 75,
    "zstd": 45,
    "overwrite_in_two_steps": 50,
    "large": 45,
}
MAIN = ("new", "overwrite", "retention", "delete", "nested")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(IMPORTS) as running:
        yield running


def roots(tmp_path: Path, name: str, control: str = "") -> Callable[[int], dict[str, Any]]:
    """Makes a fresh root for every run, a copy of one that was prepared."""
    template = tmp_path / f"{name}-before"
    prepare(SCENARIOS[name], template)

    def make(number: int) -> dict[str, Any]:
        root = tmp_path / f"{name}-{control}-{number}"
        shutil.copytree(template, root)
        return {"root": str(root), "name": name, "control": control}

    return make


def kill_at_each_call(
    server: ForkServer, tmp_path: Path, name: str, control: str = ""
) -> tuple[int, list[str]]:
    """The number of calls before which the scenario was killed, and what was wrong after each."""
    scenario = SCENARIOS[name]
    visited, wrong = 0, []
    for number, args, outcome in server.each_call(ACT, roots(tmp_path, name, control)):
        assert outcome.killed, outcome.describe()
        root = Path(args["root"])
        found = violations(scenario, root, scenario.possible(returned(outcome.calls)))
        wrong += [f"{problem}\n{outcome.describe()}" for problem in found]
        visited = number
        shutil.rmtree(root)
    print(f"{name}: killed before each of {visited} calls")
    return visited, wrong


def holds_at_each_call(server: ForkServer, tmp_path: Path, name: str) -> None:
    visited, wrong = kill_at_each_call(server, tmp_path, name)
    assert wrong == []
    assert visited >= FEWEST_CALLS[name]


@pytest.mark.parametrize("name", MAIN)
def test_a_kill_before_any_call_leaves_the_old_steps_or_the_new_ones(
    server: ForkServer, tmp_path: Path, name: str
) -> None:
    holds_at_each_call(server, tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in MAIN])
def test_a_kill_before_any_call_of_a_rarer_save(
    server: ForkServer, tmp_path: Path, name: str
) -> None:
    holds_at_each_call(server, tmp_path, name)


@pytest.mark.parametrize(
    ("control", "name", "complaint"),
    [
        ("data_after_publication", "new", "is listed, and"),
        ("record_first", "new", "is listed, and"),
        ("old_removed_first", "overwrite", "listed is {}"),
        ("retention_first", "retention", "listed is {2: 2}"),
    ],
)
def test_a_broken_rule_is_noticed(
    server: ForkServer, tmp_path: Path, control: str, name: str, complaint: str
) -> None:
    _, wrong = kill_at_each_call(server, tmp_path, name, control)
    assert [text for text in wrong if complaint in text], wrong
