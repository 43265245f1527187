"""Values that each process keeps for itself: `PerProcess`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from asyncckpt import Checkpointer, PerProcess, SaveOptions
from asyncckpt.errors import MismatchError
from tests.session.together.job import Job


def test_random_keys_of_jax_may_differ_by_process(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step in (1, 2):
            await ckpt.save(step, {"rng": PerProcess(jax.random.key(this))})
        back = await ckpt.restore(like={"rng": PerProcess(jax.random.key(7))})
        return bool(back["rng"].value == jax.random.key(this))

    assert job.play(part) == [True] * job.count


@pytest.mark.parametrize("same", [False, True], ids=["auto", "same"])
@pytest.mark.parametrize("process", [0, 1])
def test_arrays_of_one_process_may_change_their_shapes_with_every_save(
    job: Job, process: int, same: bool
) -> None:
    """Buffers of a data loader; with `tree="same"`, the first change cannot be foreseen."""

    def tree(this: int, step: int) -> dict[str, Any]:
        rows = step if this == process else 3
        return {"w": np.ones(4), "loader": PerProcess({"buffer": np.full(rows, step)})}

    options = SaveOptions(tree="same" if same else "auto")

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, tree(this, 1), options=options)
        if same:
            with pytest.raises(MismatchError, match=f"loader/{process}/buffer: this has changed"):
                await ckpt.save(2, tree(this, 2), options=options)
        for step in range(2 + same, 8):
            await ckpt.save(step, tree(this, step), options=options)
        back = await ckpt.restore(like=tree(this, 7))
        return back["loader"].value["buffer"].tolist(), await ckpt.steps()

    steps = [1, *range(2 + same, 8)]
    assert job.play(part) == [([7] * (7 if p == process else 3), steps) for p in range(job.count)]


def test_a_number_per_process_is_replaced_in_place(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, {"seed": PerProcess(10 + this), "w": np.ones(2)})
        target = {"seed": PerProcess(0), "w": np.zeros(2)}
        report = await ckpt.restore_into(target)
        return target["seed"].value, report.replaced

    assert job.play(part) == [(10 + p, (f"seed/{p}",)) for p in range(job.count)]


def test_texts_of_one_process_may_be_long(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        tree = {"log": PerProcess("1,2,3," * 100_000 + str(this))}
        await ckpt.save(1, tree)
        back = await ckpt.restore(like=tree)
        return bool(back["log"].value == tree["log"].value)

    assert job.play(part) == [True] * job.count
