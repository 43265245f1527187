"""Saves with cached plans: those of DCP, of which ranks know only a part, and ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt import blocking
from asyncckpt.arguments import COLLECT_MIN_S
from tests.processes.fixtures import Pools
from tests.simulator import simulator
from tests.stores.objects.stores import options_of
from tests.stores.objects.test_store_collect import age
from tests.torch import cases


def test_five_saves_with_cached_plans(pools: Pools, tmp_path: Path) -> None:
    """Two writers take turns; one checkpoint is replaced."""
    two, root = pools("torch", 2), str(tmp_path / "run")
    assert two.all(cases.save_with_cached_plans, root) == [[]] * 2
    with blocking.Checkpointer(root, coordinator="single") as ckpt:
        assert ckpt.steps() == [0, 1, 2, 3, 4]
        assert all(ckpt.verify(step).ok for step in ckpt.steps())


def test_schemas_are_exchanged_again_only_where_they_are_new(pools: Pools, tmp_path: Path) -> None:
    """Also if one rank has forgotten them: then all ranks exchange them."""
    two = pools("torch", 2)
    for counts in two.all(cases.count_merges, str(tmp_path / "run")):
        assert counts[1:] == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("kind", ["obstore", "gcsfs"])
def test_they_survive_gc_a_week_later_and_are_deleted_whole(
    pools: Pools, tmp_path: Path, kind: str
) -> None:
    two = pools("torch", 2)
    with simulator(keep_log=False) as sim:
        scheme, options = options_of(kind, sim)
        root = f"{scheme}://bucket/run"
        assert two.all(cases.save_with_cached_plans, root, options) == [[]] * 2
        before = sim.stored().keys()
        age(sim, COLLECT_MIN_S + 3600)
        assert blocking.collect_garbage(root, storage_options=options) == []
        assert sim.stored().keys() == before
        assert two.all(cases.load_all, root, options) == [[]] * 2
        with blocking.Checkpointer(root, coordinator="single", storage_options=options) as ckpt:
            for step in ckpt.steps():
                ckpt.delete(step)
        assert [key for key in sim.stored() if not key.startswith("run/.asyncckpt/")] == []
