"""What processes do in tests of failures: saves that one process spoils, and deaths at a stage."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import numpy as np

from asyncckpt import Checkpointer, SaveOptions
from asyncckpt.coordinators.rounds import Round
from asyncckpt.save.shared import SharedSave
from asyncckpt.stores.local.attempt import LocalAttempt, LocalJoinedAttempt
from asyncckpt.stores.local.datafile import LocalDataFile
from tests.processes.numpy_cases import coordinator, state
from tests.processes.worker import Worker

SILENCE_S = 2.0
"""How long a process may be silent here."""

OPTIONS = SaveOptions(silence_s=SILENCE_S, arrival_s=2.0)


def spoiled(kind: str, tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of the process that is wrong."""
    match kind:
        case "another leaf":
            tree["more"] = np.ones(3)
        case "another shape":
            tree["table"] = np.ones((2, 2), np.float32)
        case "another replica":
            tree["table"][-1, -1] += 1
        case "another small replica":
            tree["small"][1] += 1
        case "another scalar":
            tree["step"] += 1
        case "not supported":
            tree["odd"] = object()
        case "a gap":
            del tree["arrays"]["columns"]
    return tree


async def save_spoiled(worker: Worker, root: str, kind: str, process: int, tree: str) -> None:
    """Save as step 1 a state that is wrong on one process."""
    mine = state(worker, worker.count, seed=1)
    if worker.index == process:
        mine = spoiled(kind, mine)
    options = SaveOptions(tree=tree, arrival_s=20)  # type: ignore[arg-type]
    async with Checkpointer(root, coordinator=coordinator(worker), save_options=options) as ckpt:
        await ckpt.save(1, mine)


async def save_on_one(worker: Worker, root: str) -> None:
    """`if rank == 0: save(...)`, and all go on."""
    async with Checkpointer(root, coordinator=coordinator(worker), save_options=OPTIONS) as ckpt:
        await ckpt.latest_step()
        if worker.index == 0:
            await ckpt.save(1, state(worker, worker.count, seed=1))


async def open_and_save(worker: Worker, root: str, silence_s: float = SILENCE_S) -> None:
    """Save step 1, and keep the `Checkpointer` open."""
    options = SaveOptions(silence_s=silence_s, arrival_s=2.0)
    ckpt = Checkpointer(root, coordinator=coordinator(worker), save_options=options)
    worker.state["open"] = ckpt
    await ckpt.save(1, state(worker, worker.count, seed=1))


async def save_again(worker: Worker) -> None:
    """Save step 2, and close."""
    ckpt = worker.state.pop("open")
    try:
        await ckpt.save(2, state(worker, worker.count, seed=2))
    finally:
        await ckpt.close()


STAGES: dict[str, tuple[Any, str]] = {
    "call": (SharedSave, "run"),
    "plan": (SharedSave, "_plan"),
    "write": (LocalDataFile, "write"),
    "seal": (LocalDataFile, "seal"),
    "settle": (LocalJoinedAttempt, "settle"),
    "message": (Round, "post"),
    "commit": (Round, "commit"),
    "publish": (LocalAttempt, "publish"),
    "outcome": (Round, "finish"),
}
"""Where a process dies: at the call of a method."""


def die_at(worker: Worker, stage: str) -> None:
    """Let this process die by SIGKILL when it comes to this stage."""
    owner, name = STAGES[stage]

    def die(*args: Any, **keywords: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    mock.patch.object(owner, name, die).start()
