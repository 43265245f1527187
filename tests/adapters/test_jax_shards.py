"""Arrays over the eight devices of one process, through the adapter alone."""

from __future__ import annotations

import contextlib
import itertools
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from asyncckpt import SaveOptions, blocking, errors
from asyncckpt.adapters import jax as jax_adapter
from asyncckpt.adapters import jax_memory, jax_shards, placements
from asyncckpt.adapters.jax import JaxAdapter
from asyncckpt.flow.arena import Arena
from asyncckpt.ports import Run
from asyncckpt.spec import DTYPES, ArraySpec, Box
from tests.adapters.fetching import fetch_box
from tests.eight_devices import eight_devices as eight_devices
from tests.eight_devices import on_eight_devices

adapter = JaxAdapter()

SHAPE = (16, 24, 8)
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((8,), ("a",)),
    "columns": ((8,), (None, "a")),
    "tiles": ((4, 2), ("a", "b")),
    "tiles turned": ((4, 2), ("b", "a")),
    "two axes on one": ((4, 2), (("a", "b"),)),
    "two axes, the other way": ((2, 4), (("b", "a"),)),
    "rows, two replicas": ((4, 2), ("a",)),
    "rows, four replicas": ((2, 4), ("a",)),
    "last dimension": ((2, 4), (None, None, "b")),
    "bricks": ((2, 2, 2), ("c", "a", "b")),
    "bricks, two replicas": ((2, 2, 2), ("a", None, "c")),
    "replicated": ((2, 2, 2), ()),
}
NAMES = ["a", "b", "c"]
worker = ThreadPoolExecutor(1)
"""Where `fetch` and `place` run, as in the pipeline; used in the child only."""


def sharding(layout: str, kind: str | None = None) -> NamedSharding:
    mesh_shape, spec = LAYOUTS[layout]
    devices = np.array(jax.devices()).reshape(mesh_shape)
    return NamedSharding(Mesh(devices, NAMES[: devices.ndim]), P(*spec), memory_kind=kind)


def values(name: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    numbers = np.arange(count) % 7 + (name == "float8_e8m0fnu")  # which has no zero
    return np.array(numbers.reshape(shape).astype(DTYPES[name]))


def put(data: np.ndarray[Any, Any], where: jax.sharding.Sharding) -> jax.Array:
    with jax.enable_x64(True):
        return jax.device_put(data, where).block_until_ready()


def handles(leaf: jax.Array) -> dict[jax.Device, jax.Array]:
    return {shard.device: shard.data for shard in leaf.addressable_shards}


def pointers(leaf: jax.Array) -> list[int]:
    return [int(shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards]


def check_nothing_cached(leaf: Any) -> None:
    """No attribute of the array nor of its shards holds a copy on the host."""
    base = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    for array in (base, *handles(base).values()):
        assert array._npy_value is None
        kept = [v for k, v in vars(array).items() if k != "addressable_shards"]
        assert not any(isinstance(value, np.ndarray) for value in kept)


@contextlib.contextmanager
def on_accelerators() -> Iterator[None]:
    """Devices are taken for accelerators, whose memory cannot be viewed, inside the block."""
    caches = (
        jax_memory.in_host_memory,
        jax_memory.offloads,
        jax_shards._divide,
        jax_adapter._single_device,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_memory, "on_cpu", lambda device: False)
        for cache in caches:
            cache.cache_clear()
        try:
            yield
        finally:
            for cache in caches:
                cache.cache_clear()


def read(source: Any, box: Box) -> np.ndarray[Any, Any]:
    out = np.empty(box.shape, DTYPES[source.spec.dtype])
    worker.submit(fetch_box, adapter, source, box, out).result()
    return out


def boxes(source: Any) -> list[Box]:
    whole = Box.whole(source.spec.shape)
    return [whole] if source.shards is None else [shard.box for shard in source.shards]


def views(source: Any) -> list[Any]:
    return [source.view] if source.shards is None else list(source.views)


def check_source(leaf: jax.Array, expected: np.ndarray[Any, Any]) -> Any:
    """Shards tile the array, views and fetches have its values, nothing stays on it."""
    source = adapter.source("p", leaf)
    name = source.spec.dtype
    covered = np.zeros(leaf.shape, int)
    for box, view in zip(boxes(source), views(source), strict=True):
        covered[(*box.slices(), ...)] += 1
        assert (view is None) == (name in jax_memory.PACKED), "packed in the memory of JAX"
        if view is not None:
            assert view.dtype == DTYPES[name]
            assert view.shape == box.shape
            assert not view.flags.writeable
            np.testing.assert_array_equal(view, expected[(*box.slices(), ...)])
    assert (covered == 1).all()
    part = Box(tuple(n // 3 for n in leaf.shape), tuple(n - n // 2 for n in leaf.shape))
    for box in (Box.whole(leaf.shape), part, *boxes(source)):
        np.testing.assert_array_equal(read(source, box), expected[(*box.slices(), ...)])
    check_nothing_cached(leaf)
    return source


def place(target: Any, expected: np.ndarray[Any, Any]) -> Any:
    """The leaf, made from host memory of the values of each box, aligned as the pipeline's is."""
    wanted = [Box.whole(target.spec.shape)] if target.boxes is None else target.boxes
    parts = []
    for box in wanted:
        data = expected[(*box.slices(), ...)]
        memory = Arena(max(1, data.nbytes)).take(data.nbytes).view(data.dtype).reshape(box.shape)
        memory[...] = data
        parts.append(memory)
    return worker.submit(adapter.place, target, parts).result()


def check_placed(like: Any, expected: np.ndarray[Any, Any]) -> jax.Array:
    with jax.enable_x64(True):
        target = adapter.target("p", like, in_place=True)
    assert target.buffers == (), "JAX arrays are immutable"
    placed: jax.Array = place(target, expected)
    assert placed.sharding == like.sharding
    assert (placed.dtype, placed.shape) == (like.dtype, like.shape)
    assert placed.committed
    assert not placed.weak_type
    for shard in placed.addressable_shards:
        assert shard.data.sharding.memory_kind == like.sharding.memory_kind
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    return placed


@on_eight_devices
def test_there_are_eight_devices() -> None:
    assert len(jax.devices()) == 8


@pytest.mark.parametrize("name", DTYPES)
@on_eight_devices
def test_every_dtype_round_trips(name: str) -> None:
    expected = values(name)
    for layout in ("tiles", "bricks, two replicas", "replicated"):
        leaf = put(expected, sharding(layout))
        assert check_source(leaf, expected).spec == ArraySpec(SHAPE, name)
        check_placed(leaf, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_eight_devices
def test_every_layout_has_each_box_once(layout: str) -> None:
    expected = values("float32")
    leaf = put(expected, sharding(layout))
    source = check_source(leaf, expected)
    distinct = {tuple(map(str, shard.index)) for shard in leaf.addressable_shards}
    assert len(boxes(source)) == len(distinct)
    assert source.view is None or layout == "replicated"
    for view in views(source):
        assert view.ctypes.data in pointers(leaf), "a view of a shard, no copy"
    target = adapter.target("p", leaf, in_place=False)
    assert target.boxes == (None if layout == "replicated" else tuple(boxes(source)))
    assert boxes(source) == sorted(boxes(source), key=lambda box: box.offset)
    check_placed(leaf, expected)


@on_eight_devices
def test_leaves_of_one_layout_share_their_shards() -> None:
    # The key of the layout cache then compares equal by identity, for any number of leaves.
    first, second = (
        adapter.source("p", put(values("float32"), sharding("tiles"))) for _ in range(2)
    )
    assert first.shards is second.shards


@on_eight_devices
def test_other_kinds_of_shardings_round_trip() -> None:
    from jax._src.lib import xla_client
    from jax._src.sharding_impls import GSPMDSharding  # what some compiled functions return

    devices = jax.devices()
    expected = values("float32")
    tiles = xla_client.HloSharding.iota_tile((2, 4, 1))
    explicit = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    scattered = Mesh(np.array([devices[i] for i in (6, 1, 4, 3)]).reshape(2, 2), ("a", "b"))
    for where in (
        GSPMDSharding(devices, tiles),
        NamedSharding(explicit, P("b", "a")),
        NamedSharding(scattered, P("a", "b")),
        NamedSharding(scattered, P(None, "b")),
        SingleDeviceSharding(devices[5]),
        NamedSharding(Mesh(np.array(devices[3:4]), ("a",)), P("a")),
    ):
        leaf = put(expected, where)
        check_source(leaf, expected)
        assert check_placed(leaf, expected).devices() == leaf.devices()


@on_eight_devices
def test_reduced_axes_hold_replicas() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    expected = values("float32")
    for spec in (P("a", reduced={"b"}), P(None, "b", reduced={"a"}), P(reduced={"a", "b"})):  # type: ignore[no-untyped-call]
        leaf = put(expected, NamedSharding(mesh, spec))
        check_source(leaf, expected)
        check_placed(leaf, expected)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4"])
@on_eight_devices
def test_memory_kinds_are_kept(name: str) -> None:
    expected = values(name)
    for kind in ("device", "pinned_host", "unpinned_host"):
        for layout in ("tiles", "rows, two replicas", "replicated"):
            leaf = put(expected, sharding(layout, kind))
            check_source(leaf, expected)
            check_placed(leaf, expected)
        leaf = put(expected, SingleDeviceSharding(jax.devices()[2], memory_kind=kind))
        check_source(leaf, expected)
        check_placed(leaf, expected)


def disagreeing(layout: str) -> jax.Array:
    """An array whose replicas differ, so that it shows which one was read."""
    where = sharding(layout)
    parts = [
        jax.device_put(np.full(where.shard_shape((16, 8)), number, np.int32), device)
        for number, device in enumerate(where.addressable_devices_indices_map((16, 8)))
    ]
    return jax.make_array_from_single_device_arrays((16, 8), where, parts)


@on_eight_devices
def test_a_box_is_read_from_one_replica_and_boxes_from_all_devices_by_turns() -> None:
    for layout, replicas in (("rows, two replicas", 2), ("rows, four replicas", 4)):
        leaf = disagreeing(layout)
        seen: dict[str, list[set[int]]] = {"view": [], "fetch": []}
        for _ in range(replicas):
            source = adapter.source("p", leaf)
            assert all(len(np.unique(view)) == 1 for view in source.views)
            seen["view"].append({int(view.flat[0]) for view in source.views})
            out = read(source, Box.whole((16, 8)))
            per_box = [np.unique(out[box.slices()]) for box in boxes(source)]
            assert all(len(found) == 1 for found in per_box)
            seen["fetch"].append({int(found[0]) for found in per_box})
        for found in seen.values():
            assert all(len(turn) == 8 // replicas for turn in found), "each box from one device"
    leaf = disagreeing("replicated")
    sources = [adapter.source("p", leaf) for _ in range(8)]
    assert {int(source.view[0, 0]) for source in sources} == set(range(8))
    parts = [read(sources[0], Box((i, 0), (1, 8))) for i in range(16)]
    assert {int(part[0, 0]) for part in parts} == set(range(8)), "one leaf from all its devices"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4", "bool", "int64", "complex64"])
@on_eight_devices
def test_memory_that_cannot_be_viewed_is_read_by_slices(name: str) -> None:
    expected = values(name)
    leaves = [put(expected, sharding(x)) for x in ("bricks, two replicas", "replicated")]
    with on_accelerators():
        for leaf in leaves:
            source = adapter.source("p", leaf)
            assert views(source) == [None] * len(boxes(source))
            part = Box((3, 0, 2), (11, 13, 5))
            for box in (Box.whole(SHAPE), part, *boxes(source)):
                np.testing.assert_array_equal(read(source, box), expected[box.slices()])
            check_nothing_cached(leaf)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "int64", "complex64"])
@on_eight_devices
def test_arrays_are_moved_to_pinned_host_memory_in_one_call(name: str) -> None:
    expected = values(name)
    layouts = ("bricks, two replicas", "replicated", "rows")
    leaves = [put(expected, sharding(layout)) for layout in layouts]
    leaves.append(put(expected, SingleDeviceSharding(jax.devices()[2])))
    key = jax.random.key(3)
    with on_accelerators():
        sources = [adapter.source("p", leaf) for leaf in (*leaves, key)]
        assert {source.offload for source in sources} == {adapter.offload}
        worker.submit(adapter.offload, sources).result()
    key_data = np.asarray(jax.random.key_data(key))
    for leaf in leaves:
        check_nothing_cached(leaf)
        leaf.delete()
    for source, wanted in zip(sources, [expected] * len(leaves) + [key_data], strict=True):
        assert source.leaf is None and source.captured is None
        for box, view in zip(boxes(source), views(source), strict=True):
            np.testing.assert_array_equal(view, wanted[box.slices()])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "int64", "complex64"])
@pytest.mark.parametrize("block_nbytes", [1 << 8, 1 << 20])
@on_eight_devices
def test_runs_of_bytes_of_accelerators_are_copied_together(name: str, block_nbytes: int) -> None:
    expected = values(name)
    rng = np.random.default_rng(0)
    layouts = ("bricks, two replicas", "replicated", "rows")
    leaves = [put(expected, sharding(layout)) for layout in layouts]
    leaves.append(put(expected, SingleDeviceSharding(jax.devices()[2])))
    with on_accelerators(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_memory, "BLOCK_NBYTES", block_nbytes)
        sources = [adapter.source("p", leaf) for leaf in leaves]
        runs, wanted = [], []
        for source in sources:
            for shard, box in enumerate(boxes(source)):
                flat = np.frombuffer(np.ascontiguousarray(expected[box.slices()]), np.uint8)
                cuts = sorted({0, flat.size, *rng.integers(0, flat.size, 5).tolist()})
                for start, stop in itertools.pairwise(cuts):
                    runs.append(Run(source, shard, start, np.zeros(stop - start, np.uint8)))
                    wanted.append(flat[start:stop])
        assert {source.begin_runs for source in sources} == {adapter.begin_runs}
        wait = worker.submit(adapter.begin_runs, runs).result()
        worker.submit(wait).result()
    for run, values_of_run in zip(runs, wanted, strict=True):
        np.testing.assert_array_equal(run.out, values_of_run)
    for leaf in leaves:
        check_nothing_cached(leaf)


@pytest.mark.parametrize("snapshot", ["copy", "reference"])
@on_eight_devices
def test_a_state_on_accelerators_that_is_larger_than_the_budget_streams_through_it(
    tmp_path: Path, snapshot: Any
) -> None:
    data = np.random.default_rng(0).standard_normal((3, 2_000_001)).astype(np.float32)
    state = {
        "large": put(data, SingleDeviceSharding(jax.devices()[1])),
        "rows": put(data.T[:1_000_000].copy(), sharding("rows")),
        "small": jnp.arange(5.0),
        "half": jnp.asarray(data[:, :1001], jnp.bfloat16),
    }
    wanted = {name: np.array(leaf) for name, leaf in state.items()}
    options = SaveOptions(host_memory_nbytes=64 << 20, snapshot=snapshot)
    calls = 0
    begin_runs = JaxAdapter.begin_runs

    def counted(adapter: JaxAdapter, runs: Any) -> Any:
        nonlocal calls
        calls += 1
        return begin_runs(adapter, runs)

    with on_accelerators(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JaxAdapter, "begin_runs", counted)
        patch.setattr(JaxAdapter, "fetch", None)
        with blocking.Checkpointer(tmp_path, save_options=options) as checkpointer:
            checkpointer.start_save(1, state).result()
    assert calls  # how many depends on how fast windows are written
    restored = blocking.restore(Path(tmp_path) / "1")
    for name, leaf in restored.items():
        np.testing.assert_array_equal(leaf, wanted[name])


@on_eight_devices
def test_a_state_on_accelerators_may_be_deleted_once_start_save_returns(tmp_path: Path) -> None:
    wide = values("float32", (512, 3000))
    state = {
        "rows": put(wide, sharding("rows")),
        "replicated": put(values("bfloat16"), sharding("replicated")),
        "packed": put(values("int4"), sharding("bricks, two replicas")),
        "single": put(wide + 1, SingleDeviceSharding(jax.devices()[5])),
        "key": jax.random.split(jax.random.key(7), 3),
        "small": jnp.arange(3.0),
        "host": np.arange(5.0),
    }
    state["tied"] = state["single"]
    wanted = jax.tree.map(np.asarray, {**state, "key": jax.random.key_data(state["key"])})
    offload, moved = JaxAdapter.offload, []
    with on_accelerators(), pytest.MonkeyPatch.context() as patch:

        def counted(adapter: JaxAdapter, sources: Any) -> None:
            moved.extend(sources)
            offload(adapter, sources)

        patch.setattr(JaxAdapter, "offload", counted)
        with blocking.Checkpointer(tmp_path) as checkpointer:
            pending = checkpointer.start_save(1, state)
            for leaf in jax.tree.leaves(state):
                if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                    leaf.delete()
            pending.result()
            restored = checkpointer.restore(like=state)  # deleted arrays have shapes, too
    assert len(moved) == 5  # neither packed nor tied ones
    for name, leaf in restored.items():
        found = jax.random.key_data(leaf) if name == "key" else leaf
        np.testing.assert_array_equal(np.asarray(found), wanted[name])
        assert name == "host" or leaf.sharding == state[name].sharding


@on_eight_devices
def test_packed_arrays_and_those_in_host_memory_are_not_moved() -> None:
    far = SingleDeviceSharding(jax.devices()[2])
    near = SingleDeviceSharding(jax.devices()[2], memory_kind="pinned_host")
    with on_accelerators():
        assert adapter.source("p", put(values("int4"), far)).offload is None
        assert adapter.source("p", put(values("int8"), near)).offload is None
        assert adapter.source("p", put(values("int8"), far)).offload is not None
    assert adapter.source("p", put(values("int8"), far)).offload is None  # on a CPU


@on_eight_devices
def test_slices_of_values_that_jax_is_told_to_report_are_read() -> None:
    expected = np.full(SHAPE, np.nan, np.float32)
    expected[3:] = np.inf
    with on_accelerators():
        try:
            for flag in ("jax_debug_nans", "jax_debug_infs"):
                jax.config.update(flag, True)
            source = adapter.source("p", put(expected, sharding("rows")))
            for box in (Box((0, 0, 0), (1, 3, 2)), Box((5, 0, 0), (1, 3, 2))):
                np.testing.assert_array_equal(read(source, box), expected[box.slices()])
        finally:
            for flag in ("jax_debug_nans", "jax_debug_infs"):
                jax.config.update(flag, False)


@on_eight_devices
def test_views_and_placing_take_no_memory() -> None:
    expected = values("float32", (1024, 1024))
    leaf = put(expected, sharding("rows, two replicas"))
    tracemalloc.start()
    try:
        source = adapter.source("p", leaf)
        assert len(source.views) == 4
        target = adapter.target("p", leaf, in_place=False)
        assert target.boxes is not None
        arenas = [Arena(box.size * 4) for box in target.boxes]
        parts = [
            arena.take(box.size * 4).view(np.float32).reshape(box.shape)
            for arena, box in zip(arenas, target.boxes, strict=True)
        ]
        for box, part in zip(target.boxes, parts, strict=True):
            part[...] = expected[box.slices()]
        placed = adapter.place(target, parts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 19, "the smallest copy of a shard is 1 MiB"
    adopted = {part.ctypes.data for part in parts}
    assert set(pointers(placed)) == adopted, "all replicas share the restored memory"
    np.testing.assert_array_equal(np.asarray(placed), expected)


@partial(jax.jit, donate_argnums=0)
def step(x: Any) -> Any:
    return x + 1


@pytest.mark.parametrize("layout", ["rows", "rows, two replicas", "replicated"])
@on_eight_devices
def test_a_donation_after_the_views_are_gone_reuses_the_memory(layout: str) -> None:
    leaf = step(put(np.zeros((64, 1024), np.float32), sharding(layout))).block_until_ready()
    before = pointers(leaf)
    source = adapter.source("p", leaf)
    assert all(view is not None for view in views(source))
    source.views, source.view = (), None
    after = step(leaf)
    assert leaf.is_deleted()
    assert pointers(after) == before
    assert (np.asarray(after) == 2).all()


@pytest.mark.parametrize("layout", ["rows", "rows, two replicas", "replicated"])
@on_eight_devices
def test_a_donation_or_deletion_under_views_leaves_their_values(layout: str) -> None:
    leaf = step(put(np.zeros((64, 1024), np.float32), sharding(layout))).block_until_ready()
    source = adapter.source("p", leaf)
    after = step(leaf).block_until_ready()
    assert all((view == 1).all() for view in views(source))
    source = adapter.source("p", after)
    after.delete()
    assert all((view == 2).all() for view in views(source))


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@on_eight_devices
def test_donating_one_of_the_devices_that_share_restored_memory_changes_no_other(
    kind: str,
) -> None:
    shape = (64, 1024)
    for layout in ("rows, four replicas", "replicated"):
        where = sharding(layout, kind)
        target = adapter.target("p", put(np.zeros(shape, np.float32), where), in_place=False)
        shared = place(target, np.full(shape, 3, np.float32))
        assert len(set(pointers(shared))) < 8, "devices share memory"
        parts = handles(shared)
        step(parts.pop(jax.devices()[3])).block_until_ready()
        assert all((np.asarray(part) == 3).all() for part in parts.values())

        # Every device writes something else into what it was given.
        @partial(jax.jit, donate_argnums=0, out_shardings=sharding("rows"))
        @partial(
            jax.shard_map,
            mesh=where.mesh,
            in_specs=where.spec,
            out_specs=P(where.mesh.axis_names),
            check_vma=False,
        )
        def differ(x: Any, axes: Any = where.mesh.axis_names) -> Any:
            return x + jax.lax.axis_index(axes)

        shared = place(target, np.full(shape, 3, np.float32))
        given = jax.device_put(shared, sharding(layout))  # computations take device memory
        result = differ(given)
        assert given.is_deleted()
        found = [float(np.unique(np.asarray(s.data))[0]) for s in result.addressable_shards]
        assert found == [3.0 + i for i in range(8)]


@on_eight_devices
def test_a_deleted_or_donated_array_is_named_when_saved_and_welcome_as_like() -> None:
    expected = values("float32")
    for layout in ("tiles", "replicated"):
        deleted = put(expected, sharding(layout))
        deleted.delete()
        donated = put(expected, sharding(layout))
        step(donated)
        for leaf in (deleted, donated):
            with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: .*deleted or donated"):
                adapter.source("a/b", leaf)
            check_placed(leaf, expected)


@on_eight_devices
def test_an_abstract_array_is_restored_onto_its_sharding() -> None:
    expected = values("bfloat16")
    for layout in LAYOUTS:
        for kind in ("device", "pinned_host"):
            like = jax.ShapeDtypeStruct(SHAPE, "bfloat16", sharding=sharding(layout, kind))
            check_placed(like, expected)


def key_array(impl: str, where: jax.sharding.Sharding, shape: tuple[int, ...]) -> Any:
    keys = jax.random.split(jax.random.key(3, impl=impl), shape)
    return jax.device_put(keys, where).block_until_ready()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@on_eight_devices
def test_typed_keys_round_trip_onto_another_sharding(impl: str) -> None:
    shape = (8, 4)
    for saved, wanted in (
        ("rows", "tiles"),
        ("tiles turned", "replicated"),
        ("replicated", "rows, two replicas"),
        ("rows, four replicas", "rows"),
    ):
        keys = key_array(impl, sharding(saved), shape)
        data = np.asarray(jax.random.key_data(key_array(impl, jax.devices()[0], shape)))
        source = adapter.source("p", keys)
        assert source.spec == ArraySpec(data.shape, "uint32")
        assert source.extra == {"prng_impl": impl}
        assert source.leaf is keys
        for box, view in zip(boxes(source), views(source), strict=True):
            np.testing.assert_array_equal(view, data[box.slices()])
        for box in (Box.whole(data.shape), Box((3, 1, 0), (5, 2, 2))):
            np.testing.assert_array_equal(read(source, box), data[box.slices()])
        check_nothing_cached(keys)
        deleted = key_array(impl, sharding(wanted), shape)
        deleted.delete()
        for like in (
            key_array(impl, sharding(wanted), shape),
            deleted,
            jax.ShapeDtypeStruct(shape, keys.dtype, sharding=sharding(wanted)),
        ):
            target = adapter.target("p", like, in_place=False)
            assert (target.spec, target.extra) == (source.spec, source.extra)
            restored = place(target, data)
            assert (restored.dtype, restored.shape) == (keys.dtype, shape)
            assert restored.sharding == key_array(impl, sharding(wanted), shape).sharding
            assert restored.committed
            np.testing.assert_array_equal(np.asarray(jax.random.key_data(restored)), data)
            jax.random.uniform(restored[0, 0])


@on_eight_devices
def test_keys_of_one_box_go_to_every_device_and_every_memory() -> None:
    one = Mesh(np.array(jax.devices()[4:5]), ("a",))
    for where, shape in (
        (sharding("replicated"), ()),
        (sharding("replicated", "pinned_host"), ()),
        (sharding("replicated"), (3,)),
        (SingleDeviceSharding(jax.devices()[3]), ()),
        (SingleDeviceSharding(jax.devices()[3], memory_kind="unpinned_host"), (3,)),
        (NamedSharding(one, P("a")), (3,)),
        (NamedSharding(one, P(None, "a")), (3, 2)),
    ):
        keys = key_array("threefry2x32", where, shape)
        data = np.asarray(jax.random.key_data(key_array("threefry2x32", jax.devices()[0], shape)))
        source = adapter.source("p", keys)
        assert source.shards is None
        np.testing.assert_array_equal(source.view, data)
        restored = place(adapter.target("p", keys, in_place=False), data)
        assert restored.sharding == keys.sharding
        assert restored.sharding.memory_kind == where.memory_kind
        assert (restored.committed, restored.shape) == (True, shape)
        np.testing.assert_array_equal(np.asarray(jax.random.key_data(restored)), data)


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
@on_eight_devices
def test_64_bit_leaves_need_x64_in_the_calling_thread(name: str) -> None:
    expected = values(name)
    leaf = put(expected, sharding("tiles"))
    with pytest.raises(errors.DtypeMismatchError, match=f"^a/b: {name} cannot"):
        adapter.target("a/b", leaf, in_place=False)
    with jax.enable_x64(True):
        target = adapter.target("a/b", leaf, in_place=False)
    placed = place(target, expected)
    assert placed.dtype == name, "x64 is replayed in the worker"
    np.testing.assert_array_equal(np.asarray(placed), expected)


@on_eight_devices
def test_arrays_of_rank_0_and_without_elements_are_one_box() -> None:
    for shape, layout in (
        ((), "replicated"),
        ((0, 24), "columns"),
        ((16, 0), "rows"),
        ((0, 24, 8), "bricks, two replicas"),
        ((0, 24, 8), "replicated"),
    ):
        expected = values("bfloat16", shape)
        leaf = put(expected, sharding(layout))
        source = adapter.source("p", leaf)
        assert source.shards is None
        assert source.view.shape == shape
        assert source.view.dtype == expected.dtype
        if expected.size:  # nothing is fetched of an empty array
            np.testing.assert_array_equal(read(source, Box.whole(shape)), expected)
        assert adapter.target("p", leaf, in_place=False).boxes is None
        check_placed(leaf, expected)
    none = key_array("threefry2x32", sharding("rows"), (0,))
    data = np.empty((0, 2), np.uint32)
    assert adapter.source("p", none).view.shape == (0, 2)
    assert place(adapter.target("p", none, in_place=False), data).sharding == none.sharding


@on_eight_devices
def test_another_layout_is_viewed_in_its_strides() -> None:
    expected = values("float32", (16, 8))
    leaf = put(expected, sharding("tiles"))
    leaf = jax.device_put(leaf, Format(Layout((1, 0)), sharding("tiles"))).block_until_ready()
    source = check_source(leaf, expected)
    assert not source.views[0].flags.c_contiguous


@on_eight_devices
def test_an_array_that_is_being_computed_is_awaited_in_fetch_not_in_source() -> None:
    go = threading.Event()

    def late(x: Any) -> Any:
        assert go.wait(60)
        return np.asarray(x)

    where = sharding("rows, two replicas")

    @jax.jit
    @partial(
        jax.shard_map, mesh=where.mesh, in_specs=where.spec, out_specs=where.spec, check_vma=False
    )
    def wait(x: Any) -> Any:
        return jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    try:
        leaf = wait(put(np.full((16, 8), 2, np.float32), where))
        source = adapter.source("p", leaf)
        assert source.shards is not None
        assert source.views == (None,) * 4
        out = np.zeros((16, 8), np.float32)
        running = worker.submit(fetch_box, adapter, source, Box.whole((16, 8)), out)
    finally:
        go.set()
    running.result()
    assert (out == 2).all()


@on_eight_devices
def test_shardings_without_boxes_of_this_process_are_refused_by_name() -> None:
    explicit = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(explicit, P(None, "a")))
    y = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(explicit, P("a", None)))
    sums = NamedSharding(explicit, P(None, None, unreduced={"a"}))
    with jax.set_mesh(explicit):
        partial_sums = jax.jit(partial(jnp.einsum, "ij,jk->ik", out_sharding=sums))(x, y)
    for call in (
        lambda: adapter.source("a/b", partial_sums),
        lambda: adapter.target("a/b", partial_sums, in_place=False),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: .*partial sums") as e:
            call()
        assert "unreduced over a" in str(e.value)
    for where, shape, text in (
        (sharding("rows"), (7,), "8 times, but the dimension size is 7"),
        (NamedSharding(AbstractMesh((8,), ("a",)), P("a")), (8,), "AbstractMesh"),
    ):
        like = jax.ShapeDtypeStruct(shape, np.float32, sharding=where)
        with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: this sharding") as e:
            adapter.target("a/b", like, in_place=False)
        assert text in str(e.value)
        with pytest.raises(errors.UnsupportedLeafError, match="has no values to save"):
            adapter.source("a/b", like)


# ------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("per_process", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_eight_devices
def test_arithmetic_gives_each_process_what_jax_gives_its_devices(
    layout: str, per_process: int
) -> None:
    """As if each process had so many of the eight devices, which only one process sees."""
    where = sharding(layout)
    devices = where.mesh.devices
    for order in (1, 3):  # in the order of the processes, and mixed
        process = {d: n * order % 8 // per_process for n, d in enumerate(devices.flat)}
        owners = np.array([process[d] for d in devices.flat]).reshape(devices.shape)
        mesh = placements.Mesh(owners)
        expected: dict[Box, set[int]] = {}
        held: dict[int, set[Box]] = {}
        for device, index in where.devices_indices_map(SHAPE).items():
            box = jax_shards._box(index, SHAPE, ())
            expected.setdefault(box, set()).add(process[device])
            held.setdefault(process[device], set()).add(box)
        for own in mesh.members:
            places = placements.coordinates_of(mesh, own)
            holding = placements.hold(mesh, jax_shards.layout_of(where, 3), SHAPE, places)
            assert {shard.box for shard in holding.shards} == held[own]
            for shard in holding.shards:
                assert shard.holders == tuple(sorted(expected[shard.box]))
            for place, numbers in zip(places, holding.numbers, strict=True):
                index = where.devices_indices_map(SHAPE)[devices[place]]
                assert [holding.shards[n].box for n in numbers] == [
                    jax_shards._box(index, SHAPE, ())
                ]
