"""RELIABILITY row 7: any sequence of operations keeps what the model says."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties import machine

# Each of them must have happened, or the machine has stopped testing what it is for.
OPERATIONS = (
    "cancel in flight",
    "cancel: too late",
    "corrupt: cut",
    "corrupt: flip",
    "corrupt: gone",
    "corrupt: longer",
    "corrupt: zeros",
    "crash in delete_after",
    "crash in flight",
    "crash in save",
    "crash in save, committed",
    "delete",
    "delete: no such step",
    "delete_after",
    "deleted by retention",
    "failing save",
    "heal",
    "inspect",
    "inspect: damaged",
    "overwrite",
    "newest",
    "restore",
    "restore like",
    "restore: damaged",
    "restore: no such step",
    "restore_into",
    "restore_into another shape",
    "save",
    "save: the step exists",
    "second trainer",
    "start_save",
    "trainer ends",
    "verify",
    "verify: damaged",
    "wait",
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of warnings about what the machine does on purpose are not kept."""
    caplog.set_level(logging.CRITICAL, "asyncckpt")


def run(runs: int, *, operations: int) -> Counter[str]:
    """The operations that this many machines have carried out."""
    machine.visited.clear()
    run_state_machine_as_test(
        machine.CheckpointMachine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=operations,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    total = sum(machine.visited.values())
    print(f"\n{runs} runs, {total} operations")
    for name, count in sorted(machine.visited.items()):
        print(f"{count:8} {name}")
    return machine.visited


def test_any_sequence_of_operations_keeps_what_the_model_says() -> None:
    visited = run(100, operations=20)
    assert [name for name in OPERATIONS if not visited[name]] == []
    assert sum(visited.values()) >= 2000


@pytest.mark.long
def test_a_thousand_sequences_keep_what_the_model_says() -> None:
    visited = run(1000, operations=50)
    assert [name for name in OPERATIONS if visited[name] < 20] == []
    assert sum(visited.values()) >= 40_000
