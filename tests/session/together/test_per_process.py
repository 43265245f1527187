"""Values that each process keeps for itself: `PerProcess`."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import numpy as np
import pytest

import asyncckpt
from asyncckpt import Checkpointer, PerProcess
from tests.session.together.job import Job


def test_random_keys_of_jax_may_differ_by_process(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step in (1, 2):
            await ckpt.save(step, {"rng": PerProcess(jax.random.key(this))})
        back = await ckpt.restore(like={"rng": PerProcess(jax.random.key(7))})
        return bool(back["rng"].value == jax.random.key(this))

    assert job.play(part) == [True] * job.count
