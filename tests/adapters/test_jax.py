from __future__ import annotations

import dataclasses
import gc
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.layout import Format, Layout
from jax.extend.random import define_prng_impl
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from asyncckpt import errors
from asyncckpt.adapters import jax as jax_adapter
from asyncckpt.adapters import jax_memory
from asyncckpt.adapters.jax import JaxAdapter, JaxNodes
from asyncckpt.flow.arena import Arena
from asyncckpt.spec import DTYPES, ArraySpec, Box
from asyncckpt.tree import flatten, unflatten, unflatten_like
from tests import children
from tests.restore.opened import request

adapter = JaxAdapter()
SHAPES = [(), (0, 3), (1,), (3, 4), (2, 3, 5)]
WIDE = ("int64", "uint64", "float64", "complex128")


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    numbers = np.arange(count) % 7 + (name == "float8_e8m0fnu")  # which has no zero
    return np.array(numbers.reshape(shape).astype(DTYPES[name]))


def array(name: str, shape: tuple[int, ...]) -> jax.Array:
    with jax.enable_x64(True):
        return jnp.array(values(name, shape)).block_until_ready()


def pointer(leaf: jax.Array) -> int:
    return int(leaf.unsafe_buffer_pointer())


def read(source: Any, box: Box) -> np.ndarray[Any, Any]:
    out = np.empty(box.shape, DTYPES[source.spec.dtype])
    adapter.fetch(source, 0, box, out)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_round_trips(
    name: str, shape: tuple[int, ...], worker: ThreadPoolExecutor
) -> None:
    expected, leaf = values(name, shape), array(name, shape)
    source = adapter.source("p", leaf)
    assert source.spec == ArraySpec(shape, name)
    assert (source.view is None) == (name in jax_memory.PACKED), "packed in the memory of JAX"
    if source.view is not None:
        assert source.view.dtype == DTYPES[name]
        np.testing.assert_array_equal(source.view, expected)
        assert not leaf.size or source.view.ctypes.data == pointer(leaf)
    for view in {None: None, "view": source.view}.values():
        source.view = view
        part = Box(tuple(n // 3 for n in shape), tuple(n - n // 3 for n in shape))
        for box in (Box.whole(shape), part):
            out = worker.submit(read, source, box).result()
            np.testing.assert_array_equal(out, expected[box.slices()])
    assert leaf._npy_value is None, "no host copy stays on the caller's array"

    with jax.enable_x64(True):
        target = adapter.target("p", leaf, in_place=False)
    restored = np.empty(target.spec.shape, DTYPES[target.spec.dtype])
    restored[...] = expected
    placed = worker.submit(adapter.place, target, [restored]).result()
    assert (placed.dtype, placed.shape) == (leaf.dtype, shape)
    assert (placed.committed, placed.weak_type) == (leaf.committed, False)
    np.testing.assert_array_equal(np.asarray(placed), expected)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_views_without_the_internal_call_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Public:
        def __init__(self, leaf: Any) -> None:
            self.addressable_data = leaf.addressable_data

    leaf = array(name, (3, 4))
    view = jax_memory.host_view(Public(leaf), name)
    assert view.ctypes.data == pointer(leaf)
    np.testing.assert_array_equal(view, values(name, (3, 4)))
    assert leaf._npy_value is None


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_donation_after_the_view_is_gone_reuses_the_memory(name: str) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    leaf = array(name, (1 << 14,))
    before = pointer(leaf)
    source = adapter.source("p", leaf)
    view = source.view
    assert view is not None
    kept = view.copy()
    del view
    source.view = None
    after = step(leaf)
    assert pointer(after) == before
    np.testing.assert_array_equal(np.asarray(after), kept + 1)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_donation_or_deletion_under_a_view_leaves_its_values(name: str) -> None:
    leaf = array(name, (1 << 14,))
    expected = values(name, (1 << 14,))
    source = adapter.source("p", leaf)
    assert source.view is not None
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(leaf).block_until_ready()
    np.testing.assert_array_equal(source.view, expected)
    source = adapter.source("p", after)
    after.delete()
    assert source.view is not None
    np.testing.assert_array_equal(source.view, expected + 1)


class Pending:
    """An array that a step is still computing."""

    def __init__(self, leaf: jax.Array) -> None:
        self.dtype, self.shape, self.sharding = leaf.dtype, leaf.shape, leaf.sharding
        self.awaited_in: list[int] = []
        self._leaf = leaf

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        self.awaited_in.append(threading.get_ident())

    def addressable_data(self, index: int) -> Any:
        assert self.awaited_in
        return self._leaf.addressable_data(index)


def test_an_array_that_is_being_computed_is_awaited_in_fetch_not_in_source(
    worker: ThreadPoolExecutor,
) -> None:
    leaf = Pending(array("bfloat16", (3,)))
    source = adapter.source("p", leaf)
    assert source.view is None
    assert leaf.awaited_in == []
    out = worker.submit(read, source, Box((1,), (2,))).result()
    np.testing.assert_array_equal(out, values("bfloat16", (3,))[1:])
    assert threading.get_ident() not in leaf.awaited_in


def test_an_array_that_is_donated_while_it_is_looked_at_is_no_longer_being_computed() -> None:
    class Donated(Pending):
        looks = 0

        def is_ready(self) -> bool:
            self.looks += 1
            if self.looks > 1:
                raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Array has been deleted.")
            return False

    source = adapter.source("p", Donated(array("float32", (3,))))
    assert source.pending is not None
    assert not source.pending(source)
    assert adapter.source("p", array("float32", (3,))).pending is None


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_another_layout_is_viewed_in_its_strides(name: str) -> None:
    # Major-to-minor (1, 0) is column-major: the layout that `.T` of a row-major array has.
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.device_put(array(name, (3, 4)), Format(Layout((1, 0)), sharding))
    source = adapter.source("p", leaf)
    assert source.view is not None
    np.testing.assert_array_equal(source.view, values(name, (3, 4)))
    np.testing.assert_array_equal(read(source, Box((1, 1), (2, 2))), values(name, (3, 4))[1:, 1:3])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_typed_keys_are_stored_as_their_data(
    impl: str, shape: tuple[int, ...], worker: ThreadPoolExecutor
) -> None:
    keys = jax.random.key(3, impl=impl)
    if shape:
        keys = jax.random.split(keys, shape)
    source = adapter.source("p", keys)
    data = jax.random.key_data(keys)
    assert source.spec == ArraySpec(data.shape, "uint32")
    assert source.extra == {"prng_impl": impl}
    assert source.leaf is keys
    source.view = None
    out = worker.submit(read, source, Box.whole(data.shape)).result()
    np.testing.assert_array_equal(out, np.asarray(data))
    for like in (keys, jax.ShapeDtypeStruct(keys.shape, keys.dtype)):
        target = adapter.target("p", like, in_place=False)
        assert (target.spec, target.extra) == (source.spec, source.extra)
        restored = worker.submit(adapter.place, target, [out.copy()]).result()
        assert restored.dtype == keys.dtype
        assert restored.shape == keys.shape
        np.testing.assert_array_equal(jax.random.key_data(restored), data)
    restored = adapter.leaf("p", out, source.extra)
    assert jax.random.uniform(restored if not shape else restored[0]) == jax.random.uniform(
        keys if not shape else keys[0]
    )


def test_keys_of_an_implementation_of_the_user_are_restored_like_keys_of_it() -> None:
    def halves(seed: Any) -> Any:
        return jnp.stack([seed, seed]).astype("uint32")

    impl = define_prng_impl(
        key_shape=(2,),
        seed=halves,
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
        random_bits=lambda key, width, shape: jnp.zeros(shape, f"uint{width}"),
        fold_in=lambda key, data: key,
        tag="mine",
    )
    keys = jax.random.split(jax.random.wrap_key_data(halves(jnp.int32(7)), impl=impl), 3)
    data = np.asarray(jax.random.key_data(keys))
    target = adapter.target("p", keys, in_place=False)
    assert target.extra == adapter.source("p", keys).extra == {"prng_impl": "mine"}
    restored = adapter.place(target, [data.copy()])
    assert restored.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(restored), data)


def test_keys_are_restored_while_transfers_are_refused(worker: ThreadPoolExecutor) -> None:
    keys = jax.random.key(3)
    jax_adapter._key_facts.cache_clear()
    with jax.transfer_guard("disallow_explicit"):
        target = adapter.target("p", keys, in_place=False)
    assert target.extra == {"prng_impl": "threefry2x32"}


WITHOUT_CPU = """
import os
os.environ["JAX_PLATFORMS"] = "cuda"  # also where there is none: no backend is needed
import jax
from asyncckpt.adapters.jax import JaxAdapter

keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="rbg"), 3))
target = JaxAdapter().target("p", keys, in_place=False)
print(target.spec, target.extra)
"""


def test_keys_are_described_where_jax_has_no_cpu() -> None:
    assert children.output(WITHOUT_CPU).strip() == "uint32[3,4] {'prng_impl': 'rbg'}"


def test_describing_a_key_again_keeps_nothing() -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    adapter.target("p", keys, in_place=False)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        adapter.target("p", keys, in_place=False)
    gc.collect()
    assert len(gc.get_objects()) < before + 50


def test_keys_are_saved_while_something_is_traced() -> None:
    keys, seen = jax.random.key(3), []

    def step(x: Any) -> Any:
        seen.append(adapter.source("p", keys))
        return x

    jax.jit(step)(1.0)
    assert seen[0].extra == {"prng_impl": "threefry2x32"}


@pytest.mark.parametrize("value", [0.1, 3, True, 1j], ids=str)
def test_scalars_of_weak_types_stay_weak(value: Any, worker: ThreadPoolExecutor) -> None:
    leaf = jnp.asarray(value)
    data = np.asarray(leaf)
    for like in (leaf, jax.eval_shape(lambda: leaf)):
        target = adapter.target("p", like, in_place=False)
        restored = worker.submit(adapter.place, target, [data.copy()]).result()
        assert (restored.weak_type, restored.dtype) == (leaf.weak_type, leaf.dtype)
        assert restored == leaf
    strong = adapter.target("p", jnp.asarray(value, leaf.dtype), in_place=False)
    assert not adapter.place(strong, [data.copy()]).weak_type


@pytest.mark.parametrize("shape", [(), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("place", ["default", "device", "sharding"])
def test_arrays_of_weak_types_stay_weak_with_all_their_bits(
    shape: tuple[int, ...], place: str, worker: ThreadPoolExecutor
) -> None:
    leaf = jnp.full(shape, 0.1)
    if place == "device":
        leaf = jax.device_put(leaf, jax.devices()[-1])
    elif place == "sharding":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("x",))
        leaf = jax.device_put(leaf, NamedSharding(mesh, P()))
    assert leaf.weak_type
    size = int(np.prod(shape))
    data = np.resize(np.array([0xFF812345, 0x80000000, 1], np.uint32), size).reshape(shape)
    target = adapter.target("p", leaf, in_place=False)
    restored = worker.submit(adapter.place, target, [data.view(np.float32)]).result()
    assert restored.weak_type and restored.dtype == np.float32
    assert (restored.sharding, restored.committed) == (leaf.sharding, leaf.committed)
    np.testing.assert_array_equal(np.asarray(restored).view(np.uint32), data)


def test_values_that_jax_is_told_to_report_are_restored_all_the_same() -> None:
    leaf = jnp.full((3,), jnp.nan)
    target = adapter.target("p", leaf, in_place=False)
    with jax.debug_nans(True), jax.debug_infs(True):
        restored = adapter.place(target, [np.array([np.nan, np.inf, 1], np.float32)])
    assert restored.weak_type
    np.testing.assert_array_equal(restored, [np.nan, np.inf, 1])


def test_a_weak_type_that_no_python_number_has_is_not_kept() -> None:
    leaf = jax.ShapeDtypeStruct((2,), jnp.bfloat16, weak_type=True)
    target = adapter.target("p", leaf, in_place=False)
    restored = adapter.place(target, [np.ones(2, jnp.bfloat16)])
    assert (restored.weak_type, restored.dtype) == (False, jnp.bfloat16)


@pytest.mark.parametrize("name", WIDE)
def test_64_bit_leaves_need_x64_in_the_calling_thread(
    name: str, worker: ThreadPoolExecutor
) -> None:
    leaf = array(name, (3,))
    for call in (
        lambda: adapter.target("a/b", leaf, in_place=False),
        lambda: adapter.leaf("a/b", values(name, (3,)), {}),
    ):
        with pytest.raises(errors.DtypeMismatchError, match=f"^a/b: {name} cannot") as e:
            call()
        assert 'jax.config.update("jax_enable_x64", True)' in str(e.value)
    with jax.enable_x64(True):
        target = adapter.target("a/b", jax.ShapeDtypeStruct((3,), name), in_place=False)
        own = JaxAdapter()
    assert worker.submit(own.leaf, "a/b", values(name, (3,)), {}).result().dtype == name
    placed = worker.submit(adapter.place, target, [values(name, (3,))]).result()
    assert placed.dtype == name, "x64 is replayed in the worker"


def test_a_donated_array_is_named_when_saved_and_welcome_as_like() -> None:
    for leaf in (array("float32", (3,)), jax.random.split(jax.random.key(0), 3)):
        leaf.delete()
        with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: .*deleted or donated"):
            adapter.source("a/b", leaf)
        target = adapter.target("a/b", leaf, in_place=False)
        data = np.zeros(target.spec.shape, DTYPES[target.spec.dtype])
        assert adapter.place(target, [data]).shape == (3,)


def test_uncommitted_likes_give_uncommitted_leaves() -> None:
    data = np.zeros(3, np.float32)
    committed = jax.device_put(data, jax.devices()[0])
    for like, expected in (
        (committed, True),
        (jnp.zeros(3), False),
        (jax.ShapeDtypeStruct((3,), "float32"), False),
        (jax.ShapeDtypeStruct((3,), "float32", sharding=committed.sharding), True),
    ):
        target = adapter.target("p", like, in_place=False)
        assert adapter.place(target, [data.copy()]).committed is expected


def test_named_shardings_of_one_device_are_kept() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    leaf = jax.device_put(np.arange(4.0, dtype=np.float32), sharding)
    source = adapter.source("p", leaf)
    assert source.view is not None
    np.testing.assert_array_equal(source.view, [0, 1, 2, 3])
    assert leaf._npy_value is None
    target = adapter.target("p", leaf, in_place=False)
    assert adapter.place(target, [np.zeros(4, np.float32)]).sharding == sharding


def test_a_like_over_the_abstract_twin_of_the_mesh_that_is_set_goes_to_its_devices() -> None:
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    other = jax.make_mesh((1,), ("c",), axis_types=(AxisType.Explicit,))

    def init(key: Any) -> dict[str, Any]:
        return {"w": jax.sharding.reshard(jax.random.normal(key, (8, 4)), P("a", "b")), "key": key}

    with jax.set_mesh(mesh):
        like = jax.eval_shape(init, jax.random.key(0))
        assert isinstance(like["w"].sharding.mesh, AbstractMesh)
        target = adapter.target("net/w", like["w"], in_place=False)
        restored = adapter.place(target, [np.ones((8, 4), np.float32)])
        key = adapter.place(
            adapter.target("net/key", like["key"], in_place=False), [np.array([0, 7], np.uint32)]
        )
    assert restored.sharding == NamedSharding(mesh, P("a", "b"))
    assert (restored == 1).all()
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(7))).all()
    # Without the mesh nobody knows the devices.
    with pytest.raises(
        errors.UnsupportedLeafError,
        match=r"^net/w: this sharding is over AbstractMesh\(.* no mesh is set .*jax\.set_mesh\(",
    ) as caught:
        adapter.target("net/w", like["w"], in_place=False)
    assert caught.value.path == "net/w"
    with (
        jax.set_mesh(other),
        pytest.raises(errors.UnsupportedLeafError, match=r"the mesh that is set .*'c': 1"),
    ):
        adapter.target("net/w", like["w"], in_place=False)


def test_restored_arrays_adopt_large_memory() -> None:
    leaf = array("float32", (1 << 18,))
    target = adapter.target("p", leaf, in_place=True)
    assert target.buffers == (), "JAX arrays are immutable"
    taken = Arena(target.spec.nbytes).take(target.spec.nbytes)
    memory = taken.view(DTYPES[target.spec.dtype]).reshape(target.spec.shape)
    memory[...] = 2
    placed = adapter.place(target, [memory])
    assert pointer(placed) == memory.ctypes.data


def test_place_checks_shape_and_dtype() -> None:
    target = adapter.target("a/b", jnp.zeros((2, 3)), in_place=False)
    with pytest.raises(errors.ShapeMismatchError, match=r"^a/b: "):
        adapter.place(target, [np.zeros((3, 2), np.float32)])
    with pytest.raises(errors.DtypeMismatchError, match=r"^a/b: "):
        adapter.place(target, [np.zeros((2, 3), np.int32)])


def test_what_cannot_be_saved_is_named() -> None:
    for leaf, text in (
        (jnp.zeros(3, "uint4"), "cast it to uint8"),
        (jnp.zeros(3, "float8_e4m3"), "cast it to bfloat16"),
        (jax.ShapeDtypeStruct((3,), "float32"), "has no values to save"),
        (jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype), "has no values to save"),
        (
            jax.ShapeDtypeStruct((3,), "float32", sharding=jnp.zeros(3).sharding),
            "has no values to save",
        ),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: ") as e:
            adapter.source("a/b", leaf)
        assert text in str(e.value)
    with pytest.raises(errors.UnsupportedLeafError, match="cast it to uint8"):
        adapter.target("a/b", jax.ShapeDtypeStruct((3,), "uint2"), in_place=False)
    gradient = jax.ShapeDtypeStruct((3,), jax.dtypes.float0)
    with pytest.raises(
        errors.UnsupportedLeafError, match=r"dtype float0 .* holds no data, so leave"
    ):
        adapter.target("a/b", gradient, in_place=False)


def test_tracers_are_named() -> None:
    seen: list[errors.UnsupportedLeafError] = []

    def step(x: Any) -> Any:
        assert adapter.owns(type(x))
        for call in (
            lambda: adapter.source("a/b", x),
            lambda: adapter.target("a/b", x, in_place=False),
        ):
            with pytest.raises(errors.UnsupportedLeafError) as e:
                call()
            seen.append(e.value)
        return x

    jax.jit(step)(1.0)
    assert all("outside jit" in str(e) and e.path == "a/b" for e in seen)
    assert len(seen) == 2


def test_one_array_in_two_places_is_tied() -> None:
    leaf = array("float32", (3,))
    assert adapter.source("a", leaf).identity == adapter.source("b", leaf).identity
    assert adapter.source("a", leaf).identity != adapter.source("b", leaf + 0).identity


# ------------------------------------------------------------------------------- containers

nodes = JaxNodes()


class Pair(NamedTuple):
    a: Any
    b: Any


@flax.struct.dataclass
class Flax:
    params: Any
    step: Any
    apply: Any = flax.struct.field(pytree_node=False, default=None)


def test_plain_containers_have_the_same_paths_with_and_without_jax() -> None:
    state = {
        "pair": Pair(1, [2]),
        "flax": Flax({"w": 3}, 4, apply=print),
        "opt": optax.adam(1e-3).init({"w": np.zeros(2)}),
        "none": None,
    }
    with_jax, without = flatten(state, [nodes]), flatten(state)
    assert with_jax.paths == without.paths
    assert with_jax.structure == without.structure
    assert "flax/apply" not in with_jax.paths
    again = unflatten_like(with_jax, with_jax.leaves, [nodes])
    assert again["flax"] == state["flax"]
    assert jax.tree_util.tree_structure(again) == jax.tree_util.tree_structure(state)


def test_registered_nodes_have_keys_and_come_back() -> None:
    frozen = flax.core.freeze({"a": {"b": 1}, "c": [2, None]})
    flat = flatten({"f": frozen}, [nodes])
    assert flat.paths == ["f/a/b", "f/c/0"]
    assert unflatten(flat.structure, [3, 4]) == {"f": {"a": {"b": 3}, "c": [4, None]}}
    again = unflatten_like(flat, [3, 4], [nodes])["f"]
    assert type(again) is type(frozen)
    assert again == flax.core.freeze({"a": {"b": 3}, "c": [4, None]})


def test_partial_and_nodes_without_keys_are_taken_by_index() -> None:
    @jax.tree_util.register_pytree_node_class
    class Box2:
        def __init__(self, *items: Any) -> None:
            self.items = items

        def tree_flatten(self) -> Any:
            return self.items, None

        @classmethod
        def tree_unflatten(cls, _: Any, items: Any) -> Any:
            return cls(*items)

    flat = flatten({"x": Box2(1, Box2()), "p": jax.tree_util.Partial(print, 5)}, [nodes])
    assert flat.leaves[0] == 1
    assert flat.paths[0] == "x/0"
    again = unflatten_like(flat, flat.leaves, [nodes])
    assert again["x"].items[0] == 1
    assert again["p"].args == (5,)


def test_dicts_that_jax_could_not_sort_keep_their_order() -> None:
    state = {"d": defaultdict(int, {"b": 1, 0: 2, "a": 3})}
    flat = flatten(state, [nodes])
    assert flat.paths == flatten(state).paths == ["d/b", "d/0", "d/a"]
    assert unflatten_like(flat, [1, 2, 3], [nodes]) == state


def test_leaves_and_unregistered_types_are_no_nodes() -> None:
    for leaf in (np.zeros(2), jnp.zeros(2), jax.random.key(0), object(), "a"):
        assert nodes.flatten(leaf) is None


def test_meta_fields_of_a_registered_dataclass_are_static() -> None:
    @partial(jax.tree_util.register_dataclass, data_fields=["y", "x"], meta_fields=["fn"])
    @dataclasses.dataclass
    class Registered:
        x: Any
        y: Any
        fn: Any

    flat = flatten(Registered(1, 2, print), [nodes])
    assert flat.paths == ["x", "y"]
    assert unflatten_like(flat, [3, 4], [nodes]) == Registered(3, 4, print)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("name", DTYPES)
def test_gpu_arrays_are_fetched_by_box(name: str) -> None:
    leaf = array(name, (30, 40))
    source = adapter.source("p", leaf)
    assert source.view is None
    for box in (Box.whole((30, 40)), Box((3, 4), (5, 6))):
        np.testing.assert_array_equal(read(source, box), values(name, (30, 40))[box.slices()])
    assert leaf._npy_value is None


def test_a_sharding_as_a_target_is_refused_with_what_to_pass() -> None:
    like = {"w": NamedSharding(jax.make_mesh((1,), ("a",)), P())}
    text = r"^w: .*NamedSharding cannot be restored; pass jax.ShapeDtypeStruct\(shape, dtype, shar"
    with pytest.raises(errors.UnsupportedLeafError, match=text):
        request("like", like)
