"""Saves of leaves that JAX is still computing: no thread waits inside JAX, so all can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import asyncckpt
from asyncckpt import blocking
from asyncckpt.adapters import jax as jax_adapter
from asyncckpt.adapters.jax import JaxAdapter
from asyncckpt.errors import DeadlineExceededError, SaveAbortedError
from asyncckpt.options import LeafOptions, SaveOptions
from tests.adapters.test_jax_shards import on_accelerators
from tests.eight_devices import eight_devices as eight_devices
from tests.eight_devices import on_eight_devices
from tests.signals import raised_once
from tests.watch import nothing_left_behind

pytestmark = pytest.mark.usefixtures("eight_devices")

KINDS = ("rows", "one device", "small", "keys", "compressed", "offloaded")
"""Each is copied in another way."""

SHAPES = {"small": (2, 3), "keys": (6, 2)}
POLLS = 3
LIMIT_S = 20.0


class Computation:
    """A leaf that is computed until `go` is set.

    Attributes:
        looks: how often a save has looked whether the leaf is computed.
        on_look: called each time.
        looked: set once it has done so `POLLS` times.
    """

    def __init__(self, kind: str) -> None:
        self.go, self.looked = threading.Event(), threading.Event()
        self.looks = 0
        self.on_look: Callable[[], None] = lambda: None
        shape = SHAPES.get(kind, (64, 1024))
        self.values = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        where = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("a",)), P("a"))

        def late(x: Any) -> Any:
            assert self.go.wait(60)
            return np.asarray(x)

        @jax.jit
        @partial(jax.shard_map, mesh=where.mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
        def wait(x: Any) -> Any:
            return jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        self.array: jax.Array = wait(jax.device_put(self.values, where))
        if kind in ("one device", "small"):
            self.array = self.array.addressable_shards[0].data
            self.values = self.values[: len(self.array)]
        self.leaf: Any = self.array
        if kind == "keys":
            self.leaf = jax.random.wrap_key_data(self.array)
        self.options = partial(
            SaveOptions,
            leaf_options=lambda path, spec: LeafOptions(
                compression="zstd" if kind == "compressed" else None
            ),
        )

    def pending(self, source: Any) -> bool:
        self.looks += 1
        self.on_look()
        if self.looks >= POLLS:
            self.looked.set()
        return _pending(source)

    def saved_in(self, step: Any) -> None:
        """The leaf was restored."""
        found = step["leaf"]
        if isinstance(found, jax.Array) and found.dtype != np.uint32:
            found = jax.random.key_data(found)
        np.testing.assert_array_equal(np.asarray(found), self.values)


_pending = jax_adapter._pending
_array = JaxAdapter._array


def array_if_computed(self: JaxAdapter, source: Any, shard: int) -> Any:
    """What the adapter begins each of its reads with."""
    array = source.captured
    assert array.is_deleted() or array.is_ready(), "a thread waits in JAX for a leaf"
    return _array(self, source, shard)


@contextlib.contextmanager
def computing(kind: str) -> Iterator[Computation]:
    made = Computation(kind)
    devices = on_accelerators() if kind == "offloaded" else contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as patch, devices:
        patch.setattr(jax_adapter, "_pending", made.pending)
        patch.setattr(JaxAdapter, "_array", array_if_computed)
        try:
            assert not made.array.is_ready()
            yield made
        finally:
            made.go.set()
            if not made.array.is_deleted():
                made.array.block_until_ready()


def nothing_is_saved(root: str, ckpt: blocking.Checkpointer) -> None:
    assert ckpt.steps() == []
    assert {path.name for path in Path(root).iterdir()} <= {".asyncckpt"}
    attempts = Path(root, ".asyncckpt", "epoch-0")
    assert not attempts.exists() or [*attempts.iterdir()] == []


@pytest.mark.parametrize("snapshot", ["copy", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@on_eight_devices
def test_a_save_waits_outside_jax_until_its_leaves_are_computed(
    kind: str, snapshot: Any, tmp_path: str
) -> None:
    with computing(kind) as computation:

        def on_look() -> None:
            if computation.looks == POLLS:
                computation.go.set()

        computation.on_look = on_look
        options = computation.options(snapshot=snapshot)
        with blocking.Checkpointer(tmp_path, save_options=options) as ckpt:
            ckpt.start_save(1, {"leaf": computation.leaf, "ready": np.arange(9.0)}).result()
            assert computation.looked.is_set()
            computation.saved_in(ckpt.restore(1))


@pytest.mark.parametrize("snapshot", ["copy", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@on_eight_devices
def test_a_deadline_ends_a_save_while_a_leaf_is_being_computed(
    kind: str, snapshot: Any, tmp_path: str
) -> None:
    with computing(kind) as computation, nothing_left_behind():
        options = computation.options(snapshot=snapshot, deadline_s=0.3)
        with blocking.Checkpointer(tmp_path, save_options=options) as ckpt:
            with pytest.raises(DeadlineExceededError, match="did not finish within"):
                ckpt.save(1, {"leaf": computation.leaf})
            nothing_is_saved(tmp_path, ckpt)
        assert not computation.array.is_ready()


@pytest.mark.parametrize("kind", KINDS)
@on_eight_devices
def test_ctrl_c_ends_a_save_while_a_leaf_is_being_computed(kind: str, tmp_path: str) -> None:
    with computing(kind) as computation, nothing_left_behind():

        def when() -> None:
            assert computation.looked.wait(LIMIT_S)

        with blocking.Checkpointer(tmp_path, save_options=computation.options()) as ckpt:
            with raised_once(KeyboardInterrupt, when), pytest.raises(KeyboardInterrupt):
                ckpt.save(1, {"leaf": computation.leaf})
            nothing_is_saved(tmp_path, ckpt)
        assert not computation.array.is_ready()


@on_eight_devices
def test_a_save_in_the_background_is_cancelled_while_its_leaf_is_being_computed(
    tmp_path: str,
) -> None:
    with computing("rows") as computation, nothing_left_behind():
        options = computation.options(snapshot="reference")
        with blocking.Checkpointer(tmp_path, save_options=options) as ckpt:
            pending = ckpt.start_save(1, {"leaf": computation.leaf})
            assert computation.looked.wait(LIMIT_S)
            pending.cancel()
            with pytest.raises(SaveAbortedError):
                pending.result()
            nothing_is_saved(tmp_path, ckpt)
        assert not computation.array.is_ready()


@pytest.mark.parametrize("kind", ["rows", "small"])
@on_eight_devices
async def test_a_cancelled_task_ends_its_save_while_a_leaf_is_being_computed(
    kind: str, tmp_path: str
) -> None:
    with computing(kind) as computation:
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            saving = asyncio.create_task(ckpt.save(1, {"leaf": computation.leaf}))
            assert await asyncio.to_thread(computation.looked.wait, LIMIT_S)
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            assert await ckpt.steps() == []
        assert not computation.array.is_ready()


@pytest.mark.parametrize("donated", [False, True])
@on_eight_devices
def test_a_leaf_deleted_while_it_is_being_computed_ends_the_save_with_an_error(
    donated: bool, tmp_path: str
) -> None:
    with computing("one device") as computation:

        def on_look() -> None:
            if computation.looks == POLLS:
                if donated:
                    jax.jit(lambda x: x + 1, donate_argnums=0)(computation.array)
                else:
                    computation.array.delete()

        computation.on_look = on_look
        with blocking.Checkpointer(tmp_path) as ckpt:
            with pytest.raises(asyncckpt.errors.StagingError, match="deleted") as caught:
                ckpt.save(1, {"leaf": computation.leaf})
            assert caught.value.path == "leaf"
            nothing_is_saved(tmp_path, ckpt)
