"""Several processes save, delete and prune together, and one of them is killed, or stopped a while.

The root then holds the old steps or the new ones, what the others were told is true, and the job
can start again, on as many processes or fewer. `jobs.py` says what is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.crash.faults import ForkServer
from tests.crash.jobs import BATCH, IMPORTS, OPERATIONS, Visit

PROCESSES = 48
"""Processes at a time: most of them wait until another is silent."""

EVERY = {2: 5, 4: 12}
"""Calls between two at which a process is killed, by the number of processes, where not every call
is visited. Of four processes, three do the same, and each begins at another call."""

STOPS = 42
"""Calls between two at which a process is stopped."""

FEWEST_CALLS = 20
"""Fewest calls that a process makes: below, something was not counted."""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """A fork server that has imported what the jobs need."""
    with ForkServer(IMPORTS) as running:
        yield running


def found_at(forks: ForkServer, scratch: Path, visits: Sequence[Visit]) -> list[Any]:
    """Return what was found at each visit."""
    root = scratch / f"{len(list(scratch.iterdir()))}"
    root.mkdir()
    width = PROCESSES // visits[0].count
    args = {"root": str(root), "visits": visits, "width": width}
    outcome = forks.run(BATCH, args, arm=False, timeout_s=3600.0)
    assert outcome.exit_status == 0, outcome.describe()
    return list(outcome.result)


def all_wrong(found: Sequence[Any]) -> str:
    """Say what is wrong, and where."""
    return "\n".join(
        f"{one['visit']} {one['at']}: {text}\n{one['reports']}"
        for one in found
        for text in one["wrong"]
    )


def holds(forks: ForkServer, scratch: Path, count: int, mode: str, every: int) -> None:
    """Check that jobs of so many processes survive the fault at one in `every` of all calls."""
    undisturbed = found_at(
        forks, scratch, [Visit(name, count, 0, "count", 0) for name in OPERATIONS]
    )
    assert all_wrong(undisturbed) == ""
    visits = []
    for one in undisturbed:
        assert min(one["calls"]) >= FEWEST_CALLS
        for victim, calls in enumerate(one["calls"]):
            # Each job begins at another call.
            points = range(1 + len(visits) % every, calls + 1, every)
            visits += [Visit(one["visit"][0], count, victim, mode, point) for point in points]
    found = found_at(forks, scratch, visits)
    assert all_wrong(found) == ""
    hit = Counter(tuple(one["visit"][:3]) for one in found if one["at"])
    slowest_s = max(one["took_s"] for one in found)
    print(f"{count} processes: {mode} at {hit.total()} of {len(visits)} calls visited")
    print(f"all had ended within {slowest_s:.1f} s")
    # Beats come by the clock: the last calls are not reached every time.
    assert hit.total() >= len(visits) // 3
    assert len(hit) == count * len(OPERATIONS)


@pytest.mark.parametrize("count", [2, 4])
def test_a_kill_leaves_the_old_steps_or_the_new_ones(
    forks: ForkServer, scratch: Path, count: int
) -> None:
    holds(forks, scratch, count, "kill", EVERY[count])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [2, 4])
def test_a_kill_before_any_call(forks: ForkServer, scratch: Path, count: int) -> None:
    holds(forks, scratch, count, "kill", 1)


def test_a_process_that_was_stopped_commits_nothing_twice(forks: ForkServer, scratch: Path) -> None:
    holds(forks, scratch, 2, "stop", STOPS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_stop_before_any_call(forks: ForkServer, scratch: Path) -> None:
    holds(forks, scratch, 2, "stop", 2)
