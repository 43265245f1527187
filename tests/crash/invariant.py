"""The invariant of RELIABILITY, as a function that says in words how a root violates it.

A step is listed if and only if its record is valid, and then every byte of it is present and
verifies; a save that returned is never lost; what was there before still restores; leftovers go.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncckpt import blocking
from asyncckpt.errors import AsyncCheckpointError
from tests.crash.scenarios import OPTIONS, SCENARIOS, Scenario, State, expected, same, state

AGAIN = 9
"""Version of what is saved last."""


def roots(directory: Path, name: str, control: str = "") -> Callable[[int], dict[str, Any]]:
    """Makes a fresh root for every run, a copy of one that was prepared."""
    template = directory / f"{name}-before"
    prepare(SCENARIOS[name], template)

    def make(run: int) -> dict[str, Any]:
        root = directory / f"{name}-{run}"
        shutil.copytree(template, root)
        return {"root": str(root), "name": name, "control": control}

    return make


def prepare(scenario: Scenario, root: Path) -> None:
    """The root is as the scenario expects it."""
    root.mkdir()
    if scenario.before:
        with blocking.Checkpointer(scenario.steps(root), save_options=OPTIONS) as ckpt:
            for step, version in scenario.before.items():
                ckpt.save(step, state(version, rows=scenario.rows))


def look(ckpt: blocking.Checkpointer, rows: int) -> tuple[State, list[str]]:
    """What is listed, and what is wrong with it."""
    found: dict[int, int] = {}
    wrong: list[str] = []
    for step in ckpt.steps():
        found[step] = 0
        try:
            report = ckpt.verify(step)
            tree = ckpt.restore(step)
        except AsyncCheckpointError as error:
            wrong.append(f"step {step} is listed, and {type(error).__name__}: {error}")
            continue
        found[step] = tree["version"]
        if not report.ok:
            wrong.append(f"step {step} is listed, and {report}")
        if not same(tree, expected(found[step], rows=rows)):
            wrong.append(f"step {step} restores to other values than were saved")
    if ckpt.latest_step() != max(found, default=None):
        wrong.append(f"the latest step is {ckpt.latest_step()} of {list(found)}")
    return found, wrong


def violations(scenario: Scenario, root: Path, possible: Sequence[State]) -> list[str]:
    """What is wrong below the root, where one of the `possible` states has to be."""
    steps = scenario.steps(root)
    ckpt = blocking.Checkpointer(steps, save_options=OPTIONS)
    found, wrong = look(ckpt, scenario.rows)
    if found not in possible and found not in scenario.between:
        wrong.append(f"listed is {found}, possible are {list(possible)}")
    with ckpt:  # sweeps
        if found not in possible:
            found, more = look(ckpt, scenario.rows)
            wrong += more
        if found not in possible or ckpt.steps() != sorted(found):
            wrong.append(f"listed after a sweep is {ckpt.steps()}, possible are {list(possible)}")
        wrong += [f"{path} is left after a sweep" for path in leftovers(steps)]
        if wrong:
            return wrong
        ckpt.save(scenario.again, state(AGAIN, rows=scenario.rows), overwrite=True)
        if not same(ckpt.restore(scenario.again), expected(AGAIN, rows=scenario.rows)):
            wrong.append(f"step {scenario.again} saved again restores to other values")
        after = sorted({*found, scenario.again})
        if ckpt.steps() != after:
            wrong.append(f"listed after saving again is {ckpt.steps()} instead of {after}")
    names = sorted(os.listdir(steps))
    if names != sorted(map(str, after)):
        wrong.append(f"{steps} holds {names} after everything was closed")
    return wrong


def leftovers(steps: Path) -> list[str]:
    """Everything in the control directory but what belongs there.

    That is the lock, claims, the empty directories of epochs, and the last errors of processes,
    which the next job logs.
    """
    control, kept = steps / ".asyncckpt", ("epoch-", "claim-", "error-")
    return [
        str(path)
        for path in control.rglob("*")
        if path.name != "lock" and not (path.parent == control and path.name.startswith(kept))
    ]
