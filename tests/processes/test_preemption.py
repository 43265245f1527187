"""SIGTERM to one of four processes: all save the same step, once, and the next run continues."""

from __future__ import annotations

from pathlib import Path

import asyncckpt
from tests import children
from tests.processes import preemption_cases as cases
from tests.processes.fixtures import Pools
from tests.processes.pool import Pool

NOTICED = 2


async def preempt(four: Pool, two: Pool, root: Path, *, handled: bool) -> None:
    """Train on four processes, of which one gets SIGTERM, and go on with two others."""
    outcomes = four.all(cases.train, str(root), NOTICED)
    last = outcomes[0][1]
    assert outcomes == [(0, last, [True], handled)] * 4
    assert last > cases.NOTICED_AT
    async with asyncckpt.Checkpointer(root) as ckpt:
        assert await ckpt.steps() == [last]
        tree = await ckpt.restore()
    assert tree["step"] == last
    assert (tree["w"] == 1.5 * (last + 1)).all()
    # Whatever is left of the job, an ordinary one follows.
    assert two.all(cases.train, str(root), None) == [(last + 1, last + 3, [], handled)] * 2


async def test_torch(pools: Pools, tmp_path: Path) -> None:
    await preempt(pools("torch", 4), pools("torch", 2), tmp_path, handled=True)


async def test_jax(pools: Pools, tmp_path: Path) -> None:
    four = pools.new("jax", 4)  # its runtime has noticed the signal for good
    try:
        await preempt(four, pools("jax", 2, devices=2), tmp_path, handled=False)
    finally:
        four.close()


ONE_PROCESS = """
import os, signal, sys
import jax
from asyncckpt import blocking
from asyncckpt.errors import UsageError
from tests.ports import free_port

os.environ["JAX_PLATFORMS"] = "cpu"
early = blocking.Checkpointer(sys.argv[1], preemption=True)
jax.distributed.initialize(f"127.0.0.1:{free_port()}", 1, 0)
try:
    early.reached(0)
except UsageError as error:
    print(error)
before = signal.getsignal(signal.SIGTERM)
with blocking.Checkpointer(sys.argv[1], preemption=True) as ckpt:
    assert signal.getsignal(signal.SIGTERM) is before
    assert not ckpt.reached(0)
    os.kill(os.getpid(), signal.SIGTERM)
    step = 10
    while not ckpt.reached(step):
        step += 10  # JAX's sync point is one number, which none of these need be
    print(ckpt.save(step, {"step": step}).preempted, ckpt.latest_step() == step)
early.close()  # which restores what was there before it, not JAX's handler
"""


def test_one_process_of_jax_uses_its_sync_point(tmp_path: Path) -> None:
    early, saved = children.output(ONE_PROCESS, tmp_path).splitlines()
    assert "jax.distributed.initialize() was called after Checkpointer(preemption=True)" in early
    assert early.endswith("call it first")
    assert saved == "True True"
