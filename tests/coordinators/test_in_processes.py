"""Coordinators in the processes of real jobs: one launch for each runtime serves all tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from asyncckpt.ports import Coordinator
from asyncckpt.testing.coordinator_conformance import CoordinatorConformance
from tests.coordinators.remote import (
    answers_again,
    await_silence,
    cancel_while_stopped,
    chosen,
    give_up_while_stopped,
    missing_methods,
    open_coordinator,
    opened,
    shake_in_process,
)
from tests.processes.fixtures import Pools


class InProcesses(CoordinatorConformance):
    kind: str

    @pytest.fixture(autouse=True)
    def launched(self, pools: Pools) -> None:
        self.pool = pools(self.kind, 2)

    def opened(self, place: Path) -> AbstractAsyncContextManager[Sequence[Coordinator]]:
        return opened(self.pool)


class TestJax(InProcesses):
    kind = "jax"


class TestTorch(InProcesses):
    kind = "torch"


@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_the_runtime_is_chosen_that_was_initialised(pools: Pools, kind: str) -> None:
    expected = [(kind, index, 2) for index in range(2)]
    assert pools(kind, 2).all(chosen) == expected


def test_the_client_has_the_methods_that_are_used(pools: Pools) -> None:
    assert pools("jax", 2).all(missing_methods) == [[], []]


@pytest.mark.parametrize("kind", ["jax", "torch", "numpy"])
def test_real_processes_shake_hands_and_part(pools: Pools, kind: str) -> None:
    pool = pools(kind, 2)
    runs = []
    for parting in (False, True):
        # Each time as if it were the first: the keys of the first are still there.
        shaken = pool.all(shake_in_process, parting)
        assert len({run for run, *_ in shaken}) == 1
        assert {on_host for _, on_host, _ in shaken} == {2}
        runs.append(shaken[0][0])
    assert runs[0] != runs[1]
    assert all(left == 0 for _, _, left in pool.all(shake_in_process, True))


@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_cancelling_returns_while_the_server_is_stopped(pools: Pools, kind: str) -> None:
    pool = pools(kind, 2)
    pool.all(open_coordinator)
    pool.stop(0)
    try:
        cancelled_s, closed_s, left = pool.run(1, cancel_while_stopped, timeout_s=20)
        errors, abandoned = pool.run(1, give_up_while_stopped, timeout_s=20)
    finally:
        pool.resume(0)
    # Both would else last as long as the call, for almost `CALL_LIMIT_S`, 10 s.
    assert cancelled_s < 5
    assert closed_s < 6
    # Only the thread that is in the call; no task, and it is a daemon.
    assert left == [f"asyncckpt-{kind}-coordinator"]
    assert len(errors) == 2
    for error, name in zip(errors, abandoned, strict=True):
        assert "process 1 of 2: look(asyncckpt/x): no answer for" in error
        assert f"the thread {name} was abandoned" in error
    assert abandoned == [f"asyncckpt-{kind}-coordinator", f"asyncckpt-{kind}-coordinator-2"]
    # Goes on as soon as the server does, and the abandoned threads end.
    assert pool.run(1, answers_again, timeout_s=20) == b"value"
    assert pool.run(1, await_silence, timeout_s=20) == []
