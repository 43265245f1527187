"""A run that is stopped and goes on in a new process, beside one that never was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import blocking
from tests import children

SAVED, STEPS = 2, 6
"""The checkpoint is of the state after step 2; steps 0 to 5 are the whole run."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train.

    Attributes:
        fresh: seed -> the state before the first step, all of which is in the checkpoint.
        step: state, number of the step -> the state after it, and the loss.
        leaves: state -> its leaves by path, found without asyncckpt.
        content: what must be equal of a leaf: type, dtype, shape and every bit.
        resume: Checkpointer, step in it, a fresh state -> the saved state.
    """

    fresh: Callable[[int], Any]
    step: Callable[[Any, int], tuple[Any, Any]]
    leaves: Callable[[Any], Mapping[str, Any]]
    content: Callable[[Any], tuple[Any, ...]]
    resume: Callable[[blocking.Checkpointer, int, Any], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The bits of every loss, and a digest of every leaf at the end."""

    losses: list[str]
    leaves: dict[str, str]


def uninterrupted(run: Run) -> Outcome:
    """The whole run; nothing is saved."""
    return _outcome(run, *_train(run, run.fresh(0), range(STEPS)))


def interrupted(module: str, runs: Mapping[str, Run], root: Path) -> dict[str, Outcome]:
    """Every run, its second half in a new process, which is one for all of them.

    The checkpoint of each is a step of one root, so that they share staging memory.

    Args:
        module: full name of the module whose `RUNS` are `runs`.
    """
    with blocking.Checkpointer(root) as ckpt:
        first = [_first_half(run, ckpt, number) for number, run in enumerate(runs.values())]
    result = root.with_suffix(".json")  # not a pipe: it is longer than what a pipe holds
    children.output(
        """
        import importlib, sys
        from tests.states import resuming
        resuming.second_halves(importlib.import_module(sys.argv[1]).RUNS, *sys.argv[2:])
        """,
        module,
        root,
        result,
    )
    second = json.loads(result.read_text())
    return {
        name: Outcome(losses + rest["losses"], rest["leaves"])
        for name, losses, rest in zip(runs, first, second, strict=True)
    }


def second_halves(runs: Mapping[str, Run], root: str, result: str) -> None:
    """The new process: every run goes on, and its outcome is written as JSON."""
    with blocking.Checkpointer(root) as ckpt:
        assert ckpt.steps() == list(range(len(runs)))
        outcomes = [_second_half(run, ckpt, number) for number, run in enumerate(runs.values())]
    Path(result).write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes]))


def _first_half(run: Run, ckpt: blocking.Checkpointer, number: int) -> list[str]:
    """Losses until the checkpoint, whose source is trained on as soon as `start_save` returns."""
    state, losses = _train(run, run.fresh(0), range(SAVED + 1))
    ckpt.start_save(number, state)
    _train(run, state, range(SAVED + 1, STEPS))
    return losses


def _second_half(run: Run, ckpt: blocking.Checkpointer, number: int) -> Outcome:
    """What a state made from another seed goes on to, once it is restored."""
    state = run.resume(ckpt, number, run.fresh(1))
    return _outcome(run, *_train(run, state, range(SAVED + 1, STEPS)))


def _train(run: Run, state: Any, steps: range) -> tuple[Any, list[str]]:
    losses = []
    for number in steps:
        state, loss = run.step(state, number)
        losses.append(np.asarray(loss, np.float64).tobytes().hex())
    return state, losses


def _outcome(run: Run, state: Any, losses: list[str]) -> Outcome:
    digests = {}
    for path, leaf in run.leaves(state).items():
        digests[path] = hashlib.sha256(repr(run.content(leaf)).encode()).hexdigest()[:16]
    return Outcome(losses, digests)


def batch(step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs (8, 5) and labels (8,) of a step."""
    rng = np.random.default_rng([7, step])
    return rng.normal(size=(8, 5)).astype(np.float32), rng.integers(3, size=8)
