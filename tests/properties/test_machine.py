"""RELIABILITY row 7: any sequence of operations keeps what the model says."""

from __future__ import annotations

import logging
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.machine import CheckpointMachine
from tests.properties.roots import visited

# Each of these must happen, or the machine has stopped testing what it is for.
OPERATIONS = (
    "cancel",
    "corrupt",
    "crash",
    "delete",
    "delete_after",
    "deleted by retention",
    "failing save",
    "heal",
    "inspect",
    "newest",
    "overwrite",
    "restore",
    "restore like",
    "restore_into",
    "save",
    "second trainer",
    "start_save",
    "verify",
    "wait",
)
# And these in a longer run.
OUTCOMES = (
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
    "delete: no such step",
    "restore: damaged",
    "restore: no such step",
    "restore_into another shape",
    "save: the step exists",
    "start_save: the step appeared",
    "verify: damaged",
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of warnings about what the machine does on purpose are not kept."""
    caplog.set_level(logging.CRITICAL, "asyncckpt")


def run(runs: int, *, operations: int) -> Counter[str]:
    """The operations that this many machines have carried out."""
    visited.clear()
    run_state_machine_as_test(
        CheckpointMachine,
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
    print(f"\n{runs} runs, {visited.total()} operations")
    for name, count in sorted(visited.items()):
        print(f"{count:8} {name}")
    return visited


def test_any_sequence_of_operations_keeps_what_the_model_says() -> None:
    counts = run(100, operations=16)
    kinds = {re.split(": | in ", name)[0] for name in +counts}
    assert set(OPERATIONS) <= kinds
    assert counts.total() >= 1500


@pytest.mark.long
def test_a_thousand_sequences_keep_what_the_model_says() -> None:
    counts = run(1000, operations=50)
    assert {*OPERATIONS, *OUTCOMES} <= {*+counts, "cancel", "corrupt", "crash"}
    assert counts.total() >= 40_000
