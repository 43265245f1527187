"""Two processes of JAX or torch, of which one dies at a stage of a save.

`batch` is a scenario for `ForkServer`, whose process has imported both runtimes and started
neither: a visit forks two processes, which join a job of their own in a second instead of ten.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from asyncckpt import SaveOptions, blocking
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.save.shared import SharedSave
from asyncckpt.save.stage import Staging
from asyncckpt.stores.local.attempt import LocalAttempt, LocalJoinedAttempt
from asyncckpt.stores.local.datafile import LocalDataFile
from tests.crash.invariant import leftovers
from tests.crash.jobs import forked, reported, visited, waited
from tests.crash.scenarios import OPTIONS
from tests.ports import free_port

IMPORTS = (
    "asyncckpt.adapters.dtensor",
    "asyncckpt.adapters.jax",
    "asyncckpt.adapters.torch",
    "asyncckpt.coordinators.jax",
    "asyncckpt.coordinators.torch",
    "jaxlib.mlir.dialects.mhlo",
    "torch._dynamo",  # the first distributed tensor of a process imports it, in half a second
    "uvloop",
    "tests.crash.runtimes",
)
BATCH = "tests.crash.runtimes:batch"

SILENCE_S = 2.0
JOB_OPTIONS = SaveOptions(silence_s=SILENCE_S, arrival_s=15.0)

LIMIT_S = 60.0
"""A process that takes longer than this hangs."""

STAGES: dict[str, tuple[Any, str]] = {
    "call": (SharedSave, "run"),
    "plan": (SharedSave, "_plan"),
    "stage": (Staging, "_copy_windows"),
    "write": (LocalDataFile, "write"),
    "settle": (LocalJoinedAttempt, "settle"),
    "ready": (Round, "post"),
    "outcome": (SharedSave, "_outcome"),
    "decision": (Round, "commit"),
    "record": (LocalAttempt, "publish"),
    "report": (Round, "finish"),
}
"""Where a process dies: at the call of a method."""

BEFORE = ("call", "plan", "stage", "write")
"""Stages of every process."""

OWN: dict[int, tuple[str, ...]] = {
    0: (*BEFORE, "decision", "record", "report"),
    1: (*BEFORE, "settle", "ready", "outcome"),
}
"""All stages of process 0, and of the other."""

COMMITTED = ("outcome", "report")
"""Stages after which the new step is there, whoever is not."""


class Visit(NamedTuple):
    """One death.

    Attributes:
        kind: `jax`, `recoverable` (JAX with recoverability) or `torch`.
        victim: index of the process.
        stage: where it dies.
    """

    kind: str
    victim: int
    stage: str


def batch(root: str, visits: list[Any], width: int) -> Any:
    """Make the visits, `width` of them at a time; return what was found at each."""
    faulthandler.cancel_dump_traceback_later()  # its thread would be missing after a fork
    return visited(Path(root), visits, width, lambda place, visit: _made(place, Visit(*visit)))


def _made(place: Path, visit: Visit) -> Any:
    """Let the job run; return how its processes ended, and what a later process finds."""
    place.mkdir()
    root, port = place / "root", free_port()
    pids = [
        forked(partial(_process, visit, index, port, place), place / f"{index}.json")
        for index in range(2)
    ]
    hung = [index for index, pid in enumerate(pids) if not waited(pid, LIMIT_S)]
    ends = [reported(place / f"{index}.json") for index in range(2)]
    again = place / "again.json"
    waited(forked(partial(_again, root), again), LIMIT_S)
    return {"visit": visit, "hung": hung, "ends": ends, "again": reported(again)}


def _process(visit: Visit, index: int, port: int, place: Path) -> Any:
    """Save step 1, and step 2, in which the victim dies; return how the latter ended."""
    with (place / f"{index}.txt").open("w") as words:
        os.dup2(words.fileno(), 2)  # jaxlib has much to say about its end
    tree = JOIN["torch" if visit.kind == "torch" else "jax"](visit, index, port)
    tree |= {"host": np.arange(1000.0), "step": 1, "name": "run"}
    failure = None
    with blocking.Checkpointer(place / "root", save_options=JOB_OPTIONS) as ckpt:
        ckpt.save(1, tree)
        tree["step"] = 2
        if index == visit.victim:
            _die_at(visit.stage)
        began = time.monotonic()
        try:
            ckpt.save(2, tree)
        except AsyncCheckpointError as error:
            failure = [type(error).__name__, str(error)]
        took_s = time.monotonic() - began
    return {"failure": failure, "took_s": took_s}


def _die_at(stage: str) -> None:
    owner, name = STAGES[stage]

    def die(*args: Any, **keywords: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    mock.patch.object(owner, name, die).start()


def _join_jax(visit: Visit, index: int, port: int) -> dict[str, Any]:
    """Join the job; return a sharded, a replicated and a local array."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_recoverability", visit.kind == "recoverable")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    data = np.arange(60_000, dtype=np.float32).reshape(200, 300)
    arrays: dict[str, Any] = {"local": jnp.arange(7)}
    for name, spec in (("rows", P("x")), ("whole", P())):
        where = NamedSharding(mesh, spec)
        arrays[name] = jax.make_array_from_callback(data.shape, where, lambda at: data[at])
    return arrays


def _join_torch(visit: Visit, index: int, port: int) -> dict[str, Any]:
    """Join the job; return a distributed and a local tensor."""
    address = f"tcp://127.0.0.1:{port}"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=index, world_size=2)
    data = torch.arange(60_000.0).reshape(200, 300)
    rows = distribute_tensor(data, init_device_mesh("cpu", (2,)), [Shard(0)])
    return {"rows": rows, "local": torch.arange(7)}


JOIN: dict[str, Callable[[Visit, int, int], dict[str, Any]]] = {
    "jax": _join_jax,
    "torch": _join_torch,
}


def _again(root: Path) -> Any:
    """Open, read and save as one new process; return the steps and what is left."""
    with blocking.Checkpointer(root, save_options=OPTIONS, coordinator="single") as ckpt:
        steps, wrong = ckpt.steps(), []
        for step in steps:
            if not (report := ckpt.verify(step)).ok:
                wrong.append(str(report))
            if (found := ckpt.restore(step)["step"]) != step:
                wrong.append(f"step {step} restores what {found} was")
        ckpt.save(3, {"step": 3})
        if ckpt.latest_step() != 3:
            wrong.append(f"listed after a save is {ckpt.steps()}")
    return {"steps": steps, "wrong": wrong, "left": leftovers(root)}
