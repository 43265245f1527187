"""What processes do in tests of preemption: train until the scheduler ends the job."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncckpt import blocking
from tests.processes.worker import Worker

NOTICED_AT = 30
"""The step at which the process that is ended first gets SIGTERM."""

Mean = Callable[[float], float]


def train(worker: Worker, root: str, noticed: int | None) -> tuple[int, int, list[bool], bool]:
    """Train from the newest step, with a collective in each, until preempted; save, and end.

    Process `noticed` gets SIGTERM, or without one, the job ends after three steps.

    Returns:
        First and last step, whether the saves were those of a preemption, and whether a handler
        of Python was there meanwhile.
    """
    mean = MEANS[worker.kind]()
    state = {"w": np.zeros(1000), "step": -1}
    reports = []
    before = signal.getsignal(signal.SIGTERM)
    with blocking.Checkpointer(root, preemption=True, grace_s=30) as ckpt:
        handled = signal.getsignal(signal.SIGTERM) is not before
        if ckpt.latest_step() is not None:
            state = ckpt.restore(like=state)
        first = int(state["step"]) + 1
        for step in itertools.count(first):
            state = {"w": state["w"] + mean(worker.index), "step": step}
            if ckpt.reached(step):
                reports.append(ckpt.save(step, state))
                break
            if noticed is None and step == first + 2:
                break
            if worker.index == noticed and step == NOTICED_AT:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001 * worker.index)  # no process is as fast as another
    assert signal.getsignal(signal.SIGTERM) is before
    return first, step, [report.preempted for report in reports], handled


def _torch() -> Mean:
    import torch
    import torch.distributed as dist

    def mean(value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor)
        return float(tensor) / dist.get_world_size()

    return mean


def _jax() -> Mean:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("x",))
    devices = len(jax.local_devices())
    add = jax.jit(jnp.mean, out_shardings=NamedSharding(mesh, P()))

    def mean(value: float) -> float:
        mine = np.full(devices, value, np.float32)
        parts: Any = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), mine)
        return float(add(parts))

    return mean


MEANS: dict[str, Callable[[], Mean]] = {"jax": _jax, "torch": _torch}
"""The mean of a value over all processes, by the collectives of a runtime."""
