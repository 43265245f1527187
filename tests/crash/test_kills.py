"""Two processes save, delete and prune together, and one of them is killed, or stopped for a while.

The root then holds the old steps or the new ones, what the other process was told is true, and both
processes can start again. `pairs.py` says what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.faults import ForkServer
from tests.crash.pairs import BATCH, IMPORTS, PAIRS

WIDTH = 8
"""Pairs at a time: most of them wait until somebody is silent."""

FEW = 42
"""Calls between two points, where not every call is visited. It begins at another one each time."""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """A fork server that has imported what the pairs need."""
    with ForkServer(IMPORTS) as running:
        yield running


def visit(
    forks: ForkServer, scratch: Path, name: str, victim: int, mode: str, points: list[int]
) -> list[Any]:
    """Return what was found where the victim was hit at these of its calls."""
    root = scratch / f"{name}-{victim}-{mode}-{points[0]}"
    root.mkdir()
    args = {"root": str(root), "name": name, "victim": victim, "mode": mode}
    outcome = forks.run(
        BATCH, {**args, "points": points, "width": WIDTH}, arm=False, timeout_s=600.0
    )
    assert outcome.exit_status == 0, outcome.describe()
    return list(outcome.result)


def holds(
    forks: ForkServer, scratch: Path, name: str, victim: int, mode: str, every: int, first: int = 1
) -> None:
    (undisturbed,) = visit(forks, scratch, name, victim, "count", [0])
    assert undisturbed["wrong"] == []
    assert undisturbed["calls"] >= 20
    points = list(range(first, undisturbed["calls"] + 1, every))
    found = visit(forks, scratch, name, victim, mode, points)
    assert [one for one in found if one["wrong"]] == []
    hit = [one for one in found if one["at"]]
    slowest_s = max(one["took_s"] for one in found)
    print(f"{name}, process {victim}: {mode} at {len(hit)} of {undisturbed['calls']} calls")
    print(f"both had ended within {slowest_s:.1f} s")
    # Beats come by the clock: the last calls are not reached every time.
    assert len(hit) >= len(points) // 3


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", PAIRS)
def test_a_kill_leaves_the_old_steps_or_the_new_ones(
    forks: ForkServer, scratch: Path, name: str, victim: int
) -> None:
    holds(forks, scratch, name, victim, "kill", FEW, first=1 + 7 * list(PAIRS).index(name))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", PAIRS)
def test_a_kill_before_any_call(forks: ForkServer, scratch: Path, name: str, victim: int) -> None:
    holds(forks, scratch, name, victim, "kill", 1)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", ["overwrite", "delete"])
def test_a_process_that_was_stopped_commits_nothing_twice(
    forks: ForkServer, scratch: Path, name: str, victim: int
) -> None:
    holds(forks, scratch, name, victim, "stop", FEW, first=5 + 11 * victim)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", PAIRS)
def test_a_stop_before_any_call(forks: ForkServer, scratch: Path, name: str, victim: int) -> None:
    holds(forks, scratch, name, victim, "stop", 2)
