"""Many leaves: a worker thread opens them, while the caller waits for the snapshot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import blocking
from asyncckpt.adapters.jax import JaxAdapter
from asyncckpt.adapters.torch import TorchAdapter
from asyncckpt.errors import UnsupportedLeafError, UsageError
from asyncckpt.save import snapshot as snapshots
from asyncckpt.save.snapshot import AT_ONCE, Snapshot, take_snapshot
from tests.watch import nothing_left_behind


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One array is many."""
    monkeypatch.setattr(snapshots, "AT_ONCE", 0)


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class Named(torch.Tensor):
    """A subclass, which may run any code."""


def mixture() -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4)
    big = np.arange(5, dtype=">f4")
    return {
        "numpy": np.arange(6.0),
        "big": big,
        "numpy scalar": np.float32(2),
        "torch": base,
        "tied": base.view(3, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "subclass": torch.ones(3).as_subclass(Named),
        "strided": base.t(),
        "conj": torch.complex(base, base).conj(),
        "bf16": base.to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "jax": jnp.arange(7),
        "jax16": jnp.ones(3, jnp.bfloat16),
        "int4": jnp.ones(4, jnp.int4),
        "key": jax.random.key(3),
        "scalars": [1, 0.5, True, "text", None],
        "bytes": b"x" * 5000,
    }


def columns(found: Snapshot) -> list[Any]:
    sources = found.sources
    arrays = []
    for number, plain in enumerate(sources.plain):
        source = sources[number]
        view = source.view
        owner = getattr(source.adapter, "name", None)
        facts = (source.spec, source.framework, source.extra, source.shards, owner)
        arrays.append((plain is None, facts, view is not None and (view.strides, view.tobytes())))
    rest = found.scalars, found.array_leaf, found.extra, found.tied, found.nbytes
    return [found.structure, found.paths, found.kinds, found.values, rest, arrays]


def test_a_snapshot_is_the_same_whoever_opens_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = mixture()
    at_once = take_snapshot(tree)
    assert at_once.rest is None
    monkeypatch.setattr(snapshots, "AT_ONCE", 0)
    later = take_snapshot(tree)
    assert later.rest is not None
    in_thread(later.tie)
    assert later.rest is None
    at_once.tie()
    assert len(later.tied) == 1
    assert columns(later) == columns(at_once)


@pytest.mark.parametrize("count", [AT_ONCE, AT_ONCE + 1])
async def test_only_many_arrays_are_opened_by_another_thread(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[threading.Thread]] = {}
    for kind in (TorchAdapter, JaxAdapter):
        opened = kind.source

        def source(self: Any, path: str, leaf: Any, opened: Any = opened) -> Any:
            threads.setdefault(path, set()).add(threading.current_thread())
            return opened(self, path, leaf)

        monkeypatch.setattr(kind, "source", source)
    many = {f"t{number}": torch.tensor(number) for number in range(count - 3)}
    special = {
        "jax": jnp.ones(3),
        "key": jax.random.key(3),
        "subclass": torch.ones(3).as_subclass(Named),
    }
    tree = {**many, **special}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree)
        restored = await ckpt.restore(1)
    assert all(restored[name] == number for number, name in enumerate(many))
    assert threads.keys() == tree.keys()
    here = {threading.current_thread()}
    assert all(threads[name] == here for name in special)
    assert all((threads[name] == here) is (count <= AT_ONCE) for name in many)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("verb", ["save", "start_save"])
async def test_leaves_that_the_thread_refuses_fail_the_save_and_leave_nothing(
    tmp_path: Path, verb: str
) -> None:
    gone = jnp.ones(3)
    gone.delete()
    tree = {"a": torch.ones(3), "x": torch.ones(3).to_sparse(), "y": gone}
    with nothing_left_behind():
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            with pytest.raises(UnsupportedLeafError, match="2 leaves") as caught:
                await getattr(ckpt, verb)(1, tree)
            assert "x: " in str(caught.value) and "y: this array was deleted" in str(caught.value)
            assert caught.value.path == "x"
            assert await ckpt.steps() == []
            await ckpt.save(1, {"a": torch.ones(3)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


@pytest.mark.usefixtures("few")
def test_leaves_refused_in_both_threads_are_named_together(tmp_path: Path) -> None:
    tree = {"a": torch.ones(3).to_sparse(), "b": object(), "c": torch.ones(3)}
    with pytest.raises(UnsupportedLeafError, match="2 leaves") as caught:
        blocking.save(tmp_path / "x", tree)
    assert "a: " in str(caught.value) and "b: " in str(caught.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("few")
async def test_a_caller_cancelled_meanwhile_gets_its_leaves_back_after_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    opened = TorchAdapter.source

    def source(self: Any, path: str, leaf: Any) -> Any:
        begun.set()
        assert go.wait(60)
        ended.set()
        return opened(self, path, leaf)

    with nothing_left_behind():
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            await ckpt.save(0, {"a": torch.ones(3)})
            monkeypatch.setattr(TorchAdapter, "source", source)
            starting = asyncio.create_task(ckpt.start_save(1, {"a": torch.ones(3)}))
            await asyncio.to_thread(begun.wait, 60)
            starting.cancel()
            await asyncio.sleep(0)
            assert not starting.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert ended.is_set()
            assert await ckpt.steps() == [0]


@pytest.mark.usefixtures("few")
async def test_an_array_that_other_processes_share_is_refused_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = TorchAdapter.source

    def partial(self: Any, path: str, leaf: Any) -> Any:
        source = opened(self, path, leaf)
        source.shards, source.partial, source.view = (), True, None
        return source

    monkeypatch.setattr(TorchAdapter, "source", partial)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(UsageError, match=r"^a: the shards of"):
            await ckpt.save(1, {"a": torch.ones(3)})
        assert await ckpt.steps() == []
