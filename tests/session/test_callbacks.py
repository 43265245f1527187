"""Callbacks on the library's thread may do anything except wait for the library."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import blocking
from asyncckpt.errors import UsageError
from tests.script import Script

TREE = {"w": np.ones(1 << 18)}
OWN_THREAD = r"called on the library's own thread \(by progress=, .* would wait for itself"


HANG_S = 30.0
"""What takes longer waits for itself."""


@contextlib.contextmanager
def used(ckpt: blocking.Checkpointer) -> Iterator[blocking.Checkpointer]:
    """The checkpointer is closed in the end; a test that hangs fails and goes on."""
    try:
        yield ckpt
    except TimeoutError:
        ckpt._session.runtime.engine.abandoned = True
        raise
    finally:
        ckpt.close()


CALLS: list[Callable[[blocking.Checkpointer, blocking.PendingSave], Any]] = [
    lambda ckpt, _: ckpt.latest_step(),
    lambda ckpt, _: ckpt.restore(1),
    lambda ckpt, _: ckpt.save(7, TREE),
    lambda ckpt, _: ckpt.start_save(7, TREE),
    lambda ckpt, _: ckpt.delete(1),
    lambda ckpt, _: ckpt.wait(),
    lambda ckpt, _: ckpt.close(),
    lambda _, pending: pending.result(),
    lambda _, pending: pending.result(timeout_s=30),
]


@pytest.mark.parametrize(
    "call",
    CALLS,
    ids="latest_step restore save start_save delete wait close result timeout".split(),
)
def test_a_blocking_call_from_progress_is_refused_and_the_save_goes_on(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    errors: list[str] = []

    def progress(_: Any) -> None:
        try:
            call(ckpt, pending)
        except UsageError as error:
            errors.append(str(error))

    with used(blocking.Checkpointer(tmp_path)) as ckpt:
        ckpt.save(1, TREE)
        write = Script(ckpt).hold("write")
        pending = ckpt.start_save(2, TREE, progress=progress)
        write.reached_blocking()
        write.go()
        assert pending.result(timeout_s=HANG_S).step == 2
        assert errors and all(re.match(OWN_THREAD, error) for error in errors)
        ckpt.wait()
        assert ckpt.steps() == [1, 2]  # what was refused was not done, and will not be


def test_the_save_of_another_checkpointer_may_be_waited_for(tmp_path: Path) -> None:
    done: list[int | None] = []

    def progress(_: Any) -> None:
        if not done:
            done.append(other.start_save(5, {"a": 1}).result().step)

    with (
        used(blocking.Checkpointer(tmp_path / "run")) as ckpt,
        used(blocking.Checkpointer(tmp_path / "other")) as other,
    ):
        ckpt.start_save(2, TREE, progress=progress).result(timeout_s=HANG_S)
        assert done == other.steps() == [5]


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError])
def test_a_policy_that_ends_the_program_deletes_nothing_and_ends_nothing(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    class Ending:
        def keep(self, steps: Sequence[int], metrics: Any) -> set[int]:
            raise kind("over")

    with blocking.Checkpointer(tmp_path, keep=Ending()) as ckpt:
        for step in (1, 2):
            (note,) = ckpt.save(step, TREE).notes
            assert "no step was deleted" in note and kind.__name__ in note
        assert ckpt.steps() == [1, 2]


def test_a_policy_that_looks_at_its_run_deletes_nothing_and_is_told_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Curious:
        def keep(self, steps: Sequence[int], metrics: Any) -> set[int]:
            ckpt.inspect(max(steps))
            return set()

    with (
        used(blocking.Checkpointer(tmp_path, keep=Curious())) as ckpt,
        caplog.at_level(logging.WARNING, "asyncckpt"),
    ):
        for step in (1, 2):
            (note,) = ckpt.start_save(step, TREE).result(timeout_s=HANG_S).notes
            assert "no step was deleted" in note and "would wait for itself" in note
        assert ckpt.steps() == [1, 2]
