"""Restores of many leaves and objects: what they cost, and in which thread."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.checkpoint import metadata
from asyncckpt.restore import pipeline, restore
from asyncckpt.tree import Structure
from tests.restore.loader import Loader

CPU_S = 8.0
"""For 4,000 objects; each compared with all others would take half a minute."""


async def test_the_cost_of_objects_with_a_state_dict_is_linear(tmp_path: Path) -> None:
    count = 4000
    await asyncckpt.save(tmp_path / "x", {f"o{n}": Loader(w=np.ones(2), n=n) for n in range(count)})
    target = {f"o{n}": Loader(w=np.zeros(2), n=0) for n in range(count)}
    begun = time.process_time()
    await asyncckpt.restore_into(tmp_path / "x", target, include=["**"])
    assert time.process_time() - begun < CPU_S
    assert [loader.state["n"] for loader in target.values()] == list(range(count))
    assert all(loader.loads == 1 and loader.state["w"].all() for loader in target.values())


@pytest.mark.parametrize("way", ["restore", "like", "into", "inspect"])
async def test_what_costs_time_per_leaf_does_not_hold_the_engines_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    tree = {f"{n:03}": np.full(3, n) for n in range(200)} | {"n": 1}
    threads: dict[str, set[str]] = defaultdict(set)

    def watched(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            threads[name].add(threading.current_thread().name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("decode_record", "decode_chunk_index"):
        watched(metadata, name)
    watched(Structure, "paths")
    watched(restore, "match")
    for name in ("allocate", "find_twins", "plan_reads"):
        watched(pipeline, name)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree)
        threads.clear()
        if way == "restore":
            await ckpt.restore(1)
        elif way == "like":
            await ckpt.restore(1, like=tree)
        elif way == "into":
            await ckpt.restore_into({key: np.zeros_like(tree[key]) for key in tree}, step=1)
        else:
            await ckpt.inspect(1)
    assert threads.keys() >= {"decode_record", "decode_chunk_index", "paths"}
    assert way == "inspect" or threads.keys() >= {"match", "allocate", "plan_reads"}
    assert all("compute" in thread for names in threads.values() for thread in names), threads
