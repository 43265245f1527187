"""JAX arrays over eight devices, saved and restored: every layout onto every other."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from asyncckpt import SaveOptions, blocking
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.flow.arena import Arena
from asyncckpt.options import KIB
from asyncckpt.restore import buffers as memory
from asyncckpt.spec import DTYPES
from tests.eight_devices import eight_devices as eight_devices
from tests.eight_devices import on_eight_devices

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((8,), ("a",)),
    "columns": ((8,), (None, "a")),
    "tiles": ((4, 2), ("a", "b")),
    "tiles turned": ((4, 2), ("b", "a")),
    "two axes on one": ((4, 2), (("a", "b"),)),
    "two axes, the other way": ((2, 4), (None, ("b", "a"))),
    "rows, two replicas": ((4, 2), ("a",)),
    "rows, four replicas": ((2, 4), ("a",)),
    "last dimension": ((2, 4), (None, None, "b")),
    "bricks": ((2, 2, 2), ("c", "a", "b")),
    "bricks, two replicas": ((2, 2, 2), ("a", None, "c")),
    "replicated": ((2, 2, 2), ()),
}
CHUNK_NBYTES = 32 * KIB


def sharding(layout: str, kind: str | None = None) -> NamedSharding:
    mesh_shape, spec = LAYOUTS[layout]
    devices = np.array(jax.devices()).reshape(mesh_shape)
    return NamedSharding(Mesh(devices, ["a", "b", "c"][: devices.ndim]), P(*spec), memory_kind=kind)


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    bits = np.random.default_rng(seed).integers(-100, 100, shape)
    return np.array(bits.astype(DTYPES[dtype]))


VALUES = {
    "large": numbers("float32", (64, 48, 128), 1),
    "half": numbers("bfloat16", (128, 64, 64), 2),
    "odd": numbers("int32", (8, 40, 56), 3),
    "small": numbers("int8", (16, 24, 8), 4),
}
NBYTES = sum(value.nbytes for value in VALUES.values())


def tree(layout: str) -> dict[str, jax.Array]:
    return {key: jax.device_put(value, sharding(layout)) for key, value in VALUES.items()}


def zeros(layout: str) -> dict[str, jax.Array]:
    where = sharding(layout)
    return {k: jax.device_put(np.zeros_like(v), where) for k, v in VALUES.items()}


def assert_same_bits(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def check(found: Any, like: Any, expected: np.ndarray[Any, Any]) -> None:
    """Values, dtype and sharding are exact on every device."""
    assert found.sharding == like.sharding
    assert (found.dtype, found.shape, found.committed) == (like.dtype, like.shape, True)
    assert {shard.data.sharding.memory_kind for shard in found.addressable_shards} == {
        like.sharding.memory_kind
    }
    for shard in found.addressable_shards:
        assert_same_bits(np.asarray(shard.data), expected[shard.index])


def pointers(leaf: jax.Array) -> list[int]:
    return [int(shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def nothing_cached(leaf: jax.Array) -> bool:
    return all(a._npy_value is None for a in (leaf, *(s.data for s in leaf.addressable_shards)))


class Model:
    """An object that is filled through its state dict, so that the restore has a report."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Recorded:
    """Calls go to `inner`; what `read_into` reads of which file is kept."""

    def __init__(self, inner: Any, ranges: list[tuple[str, int, int]]) -> None:
        self.inner, self.ranges = inner, ranges

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def files(self, name: str) -> Recorded:
        return Recorded(self.inner.files(name), self.ranges)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Any], **how: Any) -> None:
        self.ranges.append((path, offset, offset + sum(b.nbytes for b in buffers)))
        await self.inner.read_into(path, offset, buffers, **how)


def checkpointer(root: str, **options: Any) -> blocking.Checkpointer:
    options = {"chunk_nbytes": CHUNK_NBYTES, "host_memory_nbytes": 64 << 20} | options
    return blocking.Checkpointer(root, save_options=SaveOptions(**options))


@pytest.mark.parametrize("saved", LAYOUTS)
@on_eight_devices
def test_a_layout_is_restored_onto_every_other_reading_each_chunk_once(
    saved: str, tmp_path: str
) -> None:
    ranges: list[tuple[str, int, int]] = []
    with checkpointer(tmp_path) as ckpt:
        leaves = tree(saved)
        ckpt.save(1, {"model": Model(leaves)})
        for leaf in ckpt.inspect(1).leaves:
            if leaf.nbytes > 64 * KIB:
                shard = sharding(saved).shard_shape(leaf.shape)
                cut = zip(leaf.shape, shard, leaf.chunk_shape, strict=True)
                assert all(n == of or n % c == 0 for of, n, c in cut), "chunks lie in shards"
            if leaf.nbytes > 512 * KIB:
                assert leaf.chunk_count >= 32, "every shard has several chunks"
        ckpt._session.root.store = Recorded(ckpt._session.root.store, ranges)  # type: ignore[assignment]
        for wanted in LAYOUTS:
            like = zeros(wanted)
            model = Model(like)
            ranges.clear()
            report = ckpt.restore_into({"model": model}, step=1)
            for key, value in VALUES.items():
                check(model.state[key], like[key], value)
            data = sorted(r for r in ranges if "/d/" in r[0] and not r[0].endswith("-index"))
            twice = [(a, b) for a, b in itertools.pairwise(data) if a[0] == b[0] and a[2] > b[1]]
            assert not twice, "no byte is read twice"
            assert sum(stop - start for _, start, stop in data) == report.read_nbytes
            assert NBYTES <= report.read_nbytes <= 1.01 * NBYTES
            assert report.nbytes == NBYTES
        assert all(map(nothing_cached, leaves.values()))


@pytest.mark.parametrize("layout", ["rows, four replicas", "replicated"])
@on_eight_devices
def test_replicas_are_stored_once(layout: str, tmp_path: str) -> None:
    with checkpointer(tmp_path) as ckpt:
        report = ckpt.save(1, tree(layout))
    stored = sum(f.stat().st_size for f in Path(tmp_path, "1").rglob("*") if f.is_file())
    assert report.nbytes == NBYTES
    assert stored <= NBYTES + 64 * KIB


@on_eight_devices
def test_every_dtype_goes_onto_another_sharding(tmp_path: str) -> None:
    shape = (64, 24, 8)
    with jax.enable_x64(True):
        expected = {name: numbers(name, shape) for name in DTYPES}
        saved = {k: jax.device_put(v, sharding("tiles")) for k, v in expected.items()}
        like = {
            name: jax.ShapeDtypeStruct(shape, name, sharding=sharding("bricks, two replicas"))
            for name in DTYPES
        }
        with checkpointer(tmp_path, compression="zstd") as ckpt:
            ckpt.save(1, saved)
            restored = ckpt.restore(1, like=like)
        for name in DTYPES:
            check(restored[name], like[name], expected[name])
        assert all(map(nothing_cached, saved.values()))


@on_eight_devices
def test_memory_kinds_are_those_of_the_target(tmp_path: str) -> None:
    kinds = ("device", "pinned_host", "unpinned_host")
    value = VALUES["half"]
    with checkpointer(tmp_path) as ckpt:
        for step, saved in enumerate(kinds):
            ckpt.save(step, {"x": jax.device_put(value, sharding("tiles", saved))})
            for wanted in kinds:
                like = jax.device_put(np.zeros_like(value), sharding("columns", wanted))
                check(ckpt.restore(step, like={"x": like})["x"], like, value)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@on_eight_devices
def test_typed_keys_give_the_same_numbers_on_another_sharding(impl: str, tmp_path: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), (64, 8))
    one = jax.device_put(jax.random.key(7, impl=impl), sharding("replicated"))
    state = {"keys": jax.device_put(keys, sharding("tiles")), "one": one}
    where = {"keys": sharding("rows, two replicas"), "one": SingleDeviceSharding(jax.devices()[3])}
    like = {name: jax.device_put(state[name], where[name]) for name in state}
    for leaf in like.values():
        leaf.delete()
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
        restored = ckpt.restore(1, like=like)
        host = ckpt.restore(1)
    np.testing.assert_array_equal(host["keys"], np.asarray(jax.random.key_data(keys)))
    for name, leaf in restored.items():
        assert (leaf.dtype, leaf.sharding) == (state[name].dtype, like[name].sharding)
        here = jax.device_put(leaf, jax.devices()[0])
        there = jax.device_put(state[name], jax.devices()[0])
        draw = jax.random.bits if name == "one" else jax.vmap(jax.vmap(jax.random.bits))
        np.testing.assert_array_equal(np.asarray(draw(here)), np.asarray(draw(there)))


@on_eight_devices
def test_numpy_and_sharded_jax_restore_each_other(tmp_path: str) -> None:
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree("bricks"))
        plain = ckpt.restore(1)
        into = {key: np.zeros_like(value) for key, value in VALUES.items()}
        ckpt.restore_into(into, step=1)
        ckpt.save(2, plain)
        like = zeros("two axes, the other way")
        again = ckpt.restore(2, like=like)
    for key, value in VALUES.items():
        assert type(plain[key]) is np.ndarray
        np.testing.assert_array_equal(plain[key], value)
        np.testing.assert_array_equal(into[key], value)
        check(again[key], like[key], value)


@on_eight_devices
def test_a_cast_and_a_scalar_go_to_every_device(tmp_path: str) -> None:
    value = VALUES["large"]
    half = jax.ShapeDtypeStruct(value.shape, "bfloat16", sharding=sharding("tiles turned"))
    count = jax.ShapeDtypeStruct((), "int32", sharding=sharding("replicated"))
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": jax.device_put(value, sharding("columns")), "count": 7})
        restored = ckpt.restore(1, like={"x": half, "count": count}, cast=True)
    assert restored["x"].sharding == half.sharding
    np.testing.assert_array_equal(
        np.asarray(restored["x"]), value.astype(DTYPES["bfloat16"]), strict=True
    )
    assert [int(shard.data) for shard in restored["count"].addressable_shards] == [7] * 8


@on_eight_devices
def test_rank_0_and_empty_arrays_keep_their_shardings(tmp_path: str) -> None:
    state = {
        "scalar": jax.device_put(np.float32(2.5), sharding("replicated")),
        "empty rows": jax.device_put(np.zeros((0, 24), np.float32), sharding("columns")),
        "empty": jax.device_put(np.zeros((16, 0, 8), np.int8), sharding("bricks, two replicas")),
    }
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state)
        restored = ckpt.restore(1, like=state)
    for key, leaf in state.items():
        check(restored[key], leaf, np.asarray(leaf))


@on_eight_devices
def test_sharded_arrays_of_a_plain_target_are_replaced_on_their_shardings(tmp_path: str) -> None:
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree("rows"))
        like, target = tree("tiles"), zeros("tiles")
        report = ckpt.restore_into(target, step=1)
        assert sorted(report.replaced) == sorted(VALUES)
        for key, values in VALUES.items():
            check(target[key], like[key], values)


@partial(jax.jit, donate_argnums=0)
def step(state: Any) -> Any:
    return jax.tree.map(lambda x: x + 1, state)


def plus(count: int) -> dict[str, np.ndarray[Any, Any]]:
    return {key: value + value.dtype.type(count) for key, value in VALUES.items()}


@pytest.mark.parametrize("layout", ["tiles", "rows, two replicas", "replicated"])
@on_eight_devices
def test_a_step_may_donate_as_soon_as_start_save_has_returned(layout: str, tmp_path: str) -> None:
    with checkpointer(tmp_path) as ckpt:
        state = jax.block_until_ready(step(tree(layout)))
        before = {key: pointers(leaf) for key, leaf in state.items()}
        pending = ckpt.start_save(1, state)
        after = step(state)
        assert all(leaf.is_deleted() for leaf in state.values())
        assert {key: pointers(leaf) for key, leaf in after.items()} == before, (
            "no view made the donation copy"
        )
        pending.result()
        restored = ckpt.restore(1, like=state)
    for key, value in plus(1).items():
        check(restored[key], state[key], value)


@on_eight_devices
def test_a_reference_holds_one_view_per_shard_and_outlives_a_donation(tmp_path: str) -> None:
    with checkpointer(tmp_path, snapshot="reference") as ckpt:
        state = jax.block_until_ready(step(tree("rows, two replicas")))
        pending = ckpt.start_save(1, state)
        assert all(map(nothing_cached, state.values()))
        after = jax.block_until_ready(step(state))
        report = pending.result()
        assert report.referenced_nbytes == NBYTES
        restored = ckpt.restore(1, like=after)
        for key, value in plus(1).items():
            check(restored[key], after[key], value)
        before = {key: pointers(leaf) for key, leaf in after.items()}
        again = step(after)
        assert {key: pointers(leaf) for key, leaf in again.items()} == before, "nothing is held"


@on_eight_devices
def test_restored_arrays_may_be_donated_and_trained_on(tmp_path: str) -> None:
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree("rows"))
        for layout in ("tiles", "rows, four replicas", "replicated"):
            like = zeros(layout)
            kept, given = ckpt.restore(1, like=like), ckpt.restore(1, like=like)
            given = step(step(given))
            for key, value in plus(2).items():
                check(given[key], like[key], value)
                check(kept[key], like[key], VALUES[key])


@on_eight_devices
def test_the_global_array_is_never_assembled(tmp_path: str) -> None:
    expected = numbers("float32", (1024, 2048))
    saved = jax.device_put(expected, sharding("rows"))
    like = jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=sharding("rows, two replicas"))
    taken: list[int] = []

    class Recording(Arena):
        def take(self, nbytes: int) -> Any:
            taken.append(nbytes)
            return super().take(nbytes)

    with checkpointer(tmp_path, chunk_nbytes=256 * KIB) as ckpt:
        ckpt.prepare(saved)
        tracemalloc.start()
        try:
            ckpt.save(1, saved)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 19, "beside the pool there is no copy of a shard (1 MiB)"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "Arena", Recording)
            restored = ckpt.restore(1, like=like)
    assert taken == [2 << 20] * 4, "one piece of memory per distinct shard"
    check(restored, like, expected)
    assert len(set(pointers(restored))) == 4, "which its replicas share"
    assert nothing_cached(saved)


@pytest.mark.parametrize("compression", [None, "zstd"])
@on_eight_devices
def test_a_small_chunk_with_as_many_bytes_as_a_shard_is_not_taken_for_it(
    compression: str | None, tmp_path: str
) -> None:
    value = VALUES["odd"]
    with checkpointer(tmp_path, compression=compression) as ckpt:
        ckpt.save(1, {"x": jax.device_put(value, sharding("rows"))})
        like = {"x": jax.device_put(np.zeros_like(value), sharding("columns"))}
        (stored,) = ckpt.inspect(1).leaves
        wanted = like["x"].sharding.shard_shape(value.shape)
        assert stored.chunk_shape != wanted
        assert np.prod(stored.chunk_shape) == np.prod(wanted)
        check(ckpt.restore(1, like=like)["x"], like["x"], value)


@on_eight_devices
def test_chunks_that_go_straight_into_shards_arrive_where_they_belong(tmp_path: str) -> None:
    # A megabyte and more: read without a buffer between where chunk and shard agree; and chunks,
    # rows and columns have the same number of bytes each.
    expected = numbers("float32", (2048, 2048))
    with checkpointer(tmp_path, chunk_nbytes=2 << 20) as ckpt:
        for step, saved in enumerate(("rows", "columns", "tiles", "replicated")):
            ckpt.save(step, jax.device_put(expected, sharding(saved)))
            for wanted in ("rows", "columns", "tiles", "rows, two replicas", "replicated"):
                like = jax.ShapeDtypeStruct((2048, 2048), "float32", sharding=sharding(wanted))
                check(ckpt.restore(step, like=like), like, expected)


@on_eight_devices
def test_eval_shape_under_a_set_mesh_is_restored_in_the_shardings_it_names(tmp_path: str) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def init(key: Any) -> dict[str, Any]:
        w = jax.random.normal(key, (16, 8))
        return {
            "w": jax.sharding.reshard(w, P("a", "b")),
            "b": jax.sharding.reshard(w, P("b")),
            "all": w,
        }

    with jax.set_mesh(mesh):
        state = jax.jit(init)(jax.random.key(0))
        blocking.save(f"{tmp_path}/x", state)
        like = jax.eval_shape(init, jax.random.key(0))
        restored = blocking.restore(f"{tmp_path}/x", like=like)
    for name, value in state.items():
        assert isinstance(like[name].sharding.mesh, AbstractMesh)
        check(restored[name], value, np.asarray(value))
    with pytest.raises(UnsupportedLeafError, match=r"jax\.set_mesh\(mesh\) with the mesh it was"):
        blocking.restore(f"{tmp_path}/x", like=like)


@on_eight_devices
def test_a_partition_spec_goes_onto_the_mesh_that_is_set(tmp_path: str) -> None:
    value = numbers("float32", (16, 4))
    like = {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=P("a"))}  # type: ignore[no-untyped-call]
    blocking.save(f"{tmp_path}/x", {"w": value})
    with jax.set_mesh(jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))):
        restored = blocking.restore(f"{tmp_path}/x", like=like)["w"]
        assert restored.sharding == like["w"].sharding
    np.testing.assert_array_equal(np.asarray(restored), value)
    fault = r"^w: this sharding is a PartitionSpec, and no mesh is set .* jax\.set_mesh\(mesh\)"
    with pytest.raises(UnsupportedLeafError, match=fault):
        blocking.restore(f"{tmp_path}/x", like=like)


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
@on_eight_devices
def test_a_transfer_guard_of_the_program_stops_neither_saves_nor_restores(
    guard: str, tmp_path: str
) -> None:
    kinds = ("device", "pinned_host", "unpinned_host")
    values = {name: np.arange(-8, 8).astype(DTYPES[name]) for name in ("float32", "int4")}
    places = [SingleDeviceSharding(jax.devices()[3])]
    places += [sharding(layout, kind) for layout in ("rows", "replicated") for kind in kinds]
    state: dict[str, Any] = {
        f"{name} {number}": jax.device_put(values[name], place)
        for number, place in enumerate(places)
        for name in values
        if name == "float32" or place.memory_kind == "device"
    }
    state["uncommitted"] = jax.numpy.ones(3)
    state["keys"] = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding("rows"))
    like = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # type: ignore[no-untyped-call]
        for name, leaf in state.items()
    }
    jax.config.update("jax_transfer_guard", guard)
    try:
        blocking.save(f"{tmp_path}/x", state)
        found = [blocking.restore(f"{tmp_path}/x", like=target) for target in (state, like)]
        there = blocking.restore(f"{tmp_path}/x", leaves="jax")
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    for restored in found:
        for name, leaf in state.items():
            assert restored[name].sharding == leaf.sharding, name
            assert (restored[name] == leaf).all(), name
    assert all(
        (there[name] == np.asarray(leaf)).all() for name, leaf in state.items() if name != "keys"
    )
