"""I1: once `start_save` has returned, the caller may do to every leaf whatever it likes."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.options import MIB
from asyncckpt.save import snapshot
from asyncckpt.save.snapshot import AT_ONCE
from tests.script import Script, in_thread

RNG_SEED = 7


def bits(leaf: Any) -> bytes:
    """The values of a leaf, bit by bit."""
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().clone(memory_format=torch.contiguous_format)
        leaf = leaf.resolve_conj().resolve_neg()
        return leaf.view(torch.uint8).numpy().tobytes() if leaf.dim() else bits(leaf.reshape(1))
    if isinstance(leaf, (np.ndarray, np.generic, jax.Array)):
        return np.asarray(leaf).tobytes()
    return repr(leaf).encode()


@functools.cache
def kept(*shape: int) -> Any:
    return np.random.default_rng(RNG_SEED).standard_normal(shape).astype(np.float32)


def numbers(*shape: int) -> Any:
    return kept(*shape).copy()


def leaves() -> dict[str, Any]:
    """Every kind of leaf, in sizes that stand inline, share a window, and take several."""
    memory = numbers(400, 300)
    base = torch.tensor(numbers(300, 200))
    return {
        "numpy": numbers(1000, 900),
        "inline": numbers(5),
        "small": numbers(700),
        "strided": memory[::2, 1:],
        "fortran": np.asfortranarray(numbers(300, 200)),
        "reversed": numbers(50_000)[::-1],
        "half": numbers(600).astype(ml_dtypes.bfloat16),
        "swapped": numbers(600).astype(">f4"),
        "torch": torch.tensor(numbers(500, 400)),
        "parameter": torch.nn.Parameter(torch.tensor(numbers(300, 30))),
        "bf16": torch.tensor(numbers(70_000)).to(torch.bfloat16),
        "conj": torch.complex(base, base * 2).conj(),
        "transposed": base.t(),
        "expanded": torch.tensor(numbers(1, 300)).expand(200, 300),
        "scalar": torch.tensor(3.5),
        "jax": jnp.asarray(numbers(600, 500)),
        "jax16": jnp.asarray(numbers(400, 50)).astype(jnp.bfloat16),
        "rank0": jnp.float32(2.5),
        "numbers": {"step": 5, "rate": 0.25, "name": "run", "list": [1, 2]},
        "bytes": b"x" * 5000,
    }


def flat(tree: Any, path: str = "") -> dict[str, bytes]:
    if isinstance(tree, dict):
        items = [flat(value, f"{path}/{key}") for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [flat(value, f"{path}/{n}") for n, value in enumerate(tree)]
    else:
        return {path: bits(tree)}
    return {key: value for item in items for key, value in item.items()}


def overwrite(tree: dict[str, Any]) -> None:
    for leaf in tree.values():
        if isinstance(leaf, np.ndarray):
            leaf[...] = 0
        elif isinstance(leaf, torch.Tensor) and leaf.is_contiguous():
            with torch.no_grad():
                leaf.zero_()
    tree["strided"].base[...] = 9
    with torch.no_grad():
        tree["transposed"].t().zero_()
        tree["expanded"][:1].zero_()
        tree["conj"].conj().zero_()


def resize(tree: dict[str, Any]) -> None:
    for leaf in tree.values():
        if isinstance(leaf, np.ndarray) and leaf.flags.owndata:
            leaf.resize((3,), refcheck=False)
        elif isinstance(leaf, torch.Tensor):
            leaf.detach().untyped_storage().resize_(0)


def donate(tree: dict[str, Any]) -> None:
    step = jax.jit(lambda x: x * 0, donate_argnums=0)
    for key in ("jax", "jax16", "rank0"):
        step(tree[key]).block_until_ready()


def delete(tree: dict[str, Any]) -> None:
    for key in ("jax", "jax16", "rank0"):
        tree[key].delete()


def free(tree: dict[str, Any]) -> None:
    tree.clear()


def restructure(tree: dict[str, Any]) -> None:
    tree["numbers"]["step"] = 6
    tree["numbers"]["list"].append(3)
    tree["numbers"]["new"] = 1
    del tree["numbers"]["name"]
    tree["numpy"] = np.zeros(3)
    tree["new"] = 5


ACTS: list[Callable[[dict[str, Any]], None]] = [
    overwrite,
    resize,
    donate,
    delete,
    free,
    restructure,
]


def keep(tree: Any) -> Any:
    """The tree's containers, so that the caller's may change."""
    if isinstance(tree, dict):
        return {key: keep(value) for key, value in tree.items()}
    return [keep(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("at_once", [AT_ONCE, 0], ids=["opened at once", "opened later"])
@pytest.mark.parametrize(
    ("act", "thread", "compression"),
    [
        *((act, thread, None) for act in ACTS for thread in (False, True)),
        (overwrite, False, "zstd"),
        (free, True, "zstd"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
async def test_the_checkpoint_holds_the_values_at_the_call(
    tmp_path: Path,
    act: Callable[[dict[str, Any]], None],
    thread: bool,
    compression: Any,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "AT_ONCE", at_once)
    options = asyncckpt.SaveOptions(compression=compression, chunk_nbytes=1 * MIB)
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        state = leaves()
        expected = flat(state)
        write = Script(ckpt).hold("write")  # nothing has left the staging memory
        pending = await ckpt.start_save(1, state)
        await write.reached()
        try:
            if thread:
                await in_thread(lambda: act(state))
            else:
                act(state)
        finally:
            write.go()
        await pending
        assert (await ckpt.verify(1)).ok
        assert flat(await ckpt.restore(1)) == {
            key: value if key != "/swapped" else leaves()["swapped"].astype("<f4").tobytes()
            for key, value in expected.items()
        }


async def test_structure_and_scalars_are_taken_at_the_call_not_at_the_first_await(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        begin = Script(ckpt).hold("begin")
        state: dict[str, Any] = {"step": 1, "opt": {"lr": 0.5, "w": np.ones(3)}, "names": ["a"]}
        starting = asyncio.create_task(ckpt.start_save(1, state))
        await begin.reached()
        # Arrays must be left alone until start_save returns; containers and scalars need not.
        state["step"] = 2
        state["opt"]["lr"] = 0.1
        state["names"].append("b")
        del state["opt"]["w"]
        begin.go()
        await (await starting)
        restored = await ckpt.restore(1)
        assert restored["step"] == 1 and restored["names"] == ["a"]
        assert restored["opt"]["lr"] == 0.5 and restored["opt"]["w"].tolist() == [1, 1, 1]


class Trainer:
    """A thread that writes to arrays all the time, except while it is told to pause."""

    def __init__(self, arrays: list[Any]) -> None:
        self._arrays = arrays
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._idle: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def order(self, what: str) -> None:
        self._orders.put(what)
        if what == "pause":
            self._idle.get(timeout=60)
        if what == "end":
            self._thread.join(60)

    def _run(self) -> None:
        value = 0.0
        while (what := self._orders.get()) != "end":
            if what == "pause":
                self._idle.put(None)
            while what == "write" and self._orders.empty():
                value -= 1.0
                for array in self._arrays:
                    array[...] = value


async def test_a_thread_that_goes_on_writing_changes_no_checkpoint(tmp_path: Path) -> None:
    state = {f"l{i}": np.zeros(120_000) for i in range(6)}
    trainer = Trainer(list(state.values()))
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in range(1, 6):
            trainer.order("pause")
            for array in state.values():
                array.fill(step)
            pending = await ckpt.start_save(step, state)
            trainer.order("write")
            await pending
            restored = await ckpt.restore(step)
            assert all((array == step).all() for array in restored.values())
        trainer.order("end")


async def test_a_state_larger_than_the_budget_streams_and_is_taken_whole(tmp_path: Path) -> None:
    options = asyncckpt.SaveOptions(host_memory_nbytes=64 * MIB)
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        state = {f"l{i}": np.full(5 * MIB, i, np.float32) for i in range(6)}  # 120 MiB
        pending = await ckpt.start_save(1, state)
        for array in state.values():
            array[...] = -1
        report = await pending
        assert report.peak_staged_nbytes <= 64 * MIB
        restored = await ckpt.restore(1)
        assert all((restored[f"l{i}"] == i).all() for i in range(6))
