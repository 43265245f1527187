"""RELIABILITY row 7: any sequence of operations keeps what the model says."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from asyncckpt import KeepLast
from asyncckpt.errors import StoreError
from asyncckpt.flow.threads import Workers
from asyncckpt.restore import decode
from asyncckpt.restore.decode import Decode
from asyncckpt.stores.local.store import LocalStore
from tests.properties.crashes import CrashStore
from tests.properties.machine import CheckpointMachine
from tests.properties.model import Keep
from tests.properties.roots import visited
from tests.stores.checkpoints import save

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
# And these in a longer run. A step that another trainer publishes while it is being saved is not
# among them: it depends on who is faster, and the conformance suite of stores settles it.
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
    "verify: damaged",
)


@pytest.fixture(autouse=True)
def in_memory(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all roots in memory: thousands of flushes and deletions would wait for the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of warnings about what the machine does on purpose are not kept."""
    caplog.set_level(logging.CRITICAL, "asyncckpt")


ROUNDS = 16
"""What one of them happens to leave out, another one does: what Hypothesis draws depends on the
modules that are imported, and with that on the tests that ran before."""


def run(runs: int, *, operations: int, number: int = 0) -> Counter[str]:
    """The operations that this many machines have carried out, others for each number."""
    visited.clear()
    run_state_machine_as_test(
        seed(number)(CheckpointMachine),
        settings=settings(
            max_examples=runs,
            stateful_step_count=operations,
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        ),
    )
    print(f"\n{runs} runs, {visited.total()} operations")
    for name, count in sorted(visited.items()):
        print(f"{count:8} {name}")
    return Counter(visited)


def test_any_sequence_of_operations_keeps_what_the_model_says() -> None:
    counts: Counter[str] = Counter()
    missing = set(OPERATIONS)
    for number in range(ROUNDS):
        counts += run(60, operations=16, number=number)
        missing -= {re.split(": | in ", name)[0] for name in counts}
        if not missing and counts.total() >= 1500:
            break
    assert not missing
    assert counts.total() >= 1500


async def test_a_deletion_of_a_dead_process_is_finished_by_a_sweep(
    tmp_path: Path,
) -> None:
    workers = Workers(2, "test-io")
    store = CrashStore(LocalStore(tmp_path, workers))
    await save(store, "1", "a")
    store.die(at=2, after=False)
    remove = await store.unlist("1")
    with pytest.raises(StoreError, match="the process is dead"):
        await remove()
    next_process = LocalStore(tmp_path, workers)
    assert await next_process.sweep() == []
    store.bury()
    (trash,) = await next_process.sweep()
    assert trash.startswith("trash-1-")
    await next_process.close()
    workers.shutdown()


async def sweep_nothing(self: LocalStore) -> list[str]:
    return []


def keep_one_less(self: KeepLast, steps: Sequence[int], metrics: Any) -> set[int]:
    return set(sorted(steps)[len(steps) - self.n + 1 :])


def crash(machine: CheckpointMachine) -> None:
    for at in range(1, 12):
        machine.crash(who=0, index=0, seed=2, metrics={}, overwrite=True, at=at, after=True)


def save_often(machine: CheckpointMachine) -> None:
    for step in range(4, 8):
        machine.save(who=0, step=step, seed=step, metrics={}, overwrite=False, packed=False)


def corrupt(machine: CheckpointMachine) -> None:
    for turn in range(40):
        machine.corrupt(index=turn % 8, at=turn / 40, bit=turn % 8)
        machine.heal(index=0)


@pytest.mark.filterwarnings("ignore:Using `assume` outside a property-based test")
@pytest.mark.parametrize(
    ("patches", "act", "complaint"),
    [
        ([(LocalStore, "sweep", sweep_nothing)], crash, "_leftovers"),
        ([(KeepLast, "keep", keep_one_less)], save_often, "deleted_steps"),
        (
            [(Decode, "expect", lambda *_: None), (decode, "trailer_matches", lambda *_: True)],
            corrupt,
            "not what was saved",
        ),
    ],
    ids=["leftovers stay", "retention keeps too few", "checksums are not compared"],
)
def test_a_broken_rule_is_noticed(
    patches: list[tuple[Any, str, Any]],
    act: Callable[[CheckpointMachine], None],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the machine compares notices it, in operations that Hypothesis need not find first."""
    for owner, name, broken in patches:
        monkeypatch.setattr(owner, name, broken)
    machine = CheckpointMachine()
    with pytest.raises(AssertionError) as caught:
        machine.first_trainer(keep=Keep(last=3))
        act(machine)
    assert complaint in "".join(traceback.format_exception(caught.value))
    monkeypatch.undo()
    for trainer in machine.root.trainers:
        trainer.end()
    shutil.rmtree(machine.root.path)


@pytest.mark.long
def test_a_thousand_sequences_keep_what_the_model_says() -> None:
    counts = run(1000, operations=50)
    assert {*OPERATIONS, *OUTCOMES} <= {*+counts, "cancel", "corrupt", "crash"}
    assert counts.total() >= 40_000
