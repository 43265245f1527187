"""Eight processes of each runtime save; eight, four and five restore."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncckpt
from tests.processes import jax_cases, numpy_cases, torch_cases
from tests.processes.fixtures import Pools
from tests.processes.test_numpy import check_spread, some
from tests.processes.values import differing

COUNT = 8

pytestmark = pytest.mark.long


async def test_numpy(pools: Pools, tmp_path: Path) -> None:
    pool, root = pools("numpy", COUNT), str(tmp_path)
    some(pool, COUNT, numpy_cases.save, root, COUNT, 1)
    assert differing(await asyncckpt.restore(tmp_path / "1"), numpy_cases.whole_state(1)) == []
    for count in (8, 4, 5):
        assert some(pool, count, numpy_cases.restore, root, count, 1) == [[]] * count
    some(pool, 5, numpy_cases.save, root, 5, 2)
    assert some(pool, COUNT, numpy_cases.restore, root, COUNT, 2) == [[]] * COUNT


@pytest.mark.parametrize("kind", ["replicas", "hsdp", "one of 60 %"])
async def test_each_byte_is_written_once_and_by_all_alike(
    pools: Pools, tmp_path: Path, kind: str
) -> None:
    await check_spread(pools("numpy", COUNT), tmp_path, kind)


def test_jax(pools: Pools, tmp_path: Path) -> None:
    eight, four, root = pools("jax", COUNT), pools("jax", 4), str(tmp_path)
    told = eight.all(jax_cases.save_twice, root)
    assert told == told[:1] * COUNT
    # From replicas of shards to shards on all, and back to front.
    for kind in ("mesh", "flat", "turned"):
        assert eight.all(jax_cases.restore, root, 2, kind) == [[]] * COUNT
        assert four.all(jax_cases.restore, root, 2, kind) == [[]] * 4


@pytest.mark.parametrize(("kind", "other"), [("fsdp", "hsdp"), ("hsdp", "fsdp")])
def test_torch(pools: Pools, tmp_path: Path, kind: str, other: str) -> None:
    root = str(tmp_path)
    eight = pools("torch", COUNT)
    saved = eight.all(torch_cases.save, root, kind, "state dicts")
    assert saved == saved[:1] * COUNT
    for pool, where in ((eight, kind), (eight, other), (pools("torch", 4), other)):
        assert pool.all(torch_cases.restore, root, where, "state dicts") == saved[: pool.count]
    assert pools("torch", 5).all(torch_cases.restore, root, "fsdp", "state dicts") == saved[:5]
