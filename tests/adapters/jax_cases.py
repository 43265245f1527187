"""What `test_jax_processes.py` runs in two processes with two devices each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from asyncckpt.adapters import jax_shards
from asyncckpt.adapters.jax import JaxAdapter
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.spec import DTYPES, Box
from tests.adapters.fetching import fetch_box

SPECS: dict[str, Any] = {
    "rows": P("x"),
    "rows of each process": P("y"),
    "rows of devices": P(("x", "y")),
    "rows of devices, turned": P(("y", "x")),
    "columns": P(None, "x"),
    "tiles": P("x", "y"),
    "tiles, turned": P("y", "x"),
    "replicated": P(),
}
DATA = np.arange(48, dtype=np.float32).reshape(8, 6)
MISSING = np.zeros((0, 6), np.float32)


def join(index: int, count: int, address: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(address, count, index)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))


def mesh_of(process: int) -> Mesh:
    return Mesh(np.array([d for d in jax.devices() if d.process_index == process]), ("x",))


def put(data: Any, where: Any) -> jax.Array:
    """The global array; each process puts its own shards on its devices."""
    return jax.make_array_from_callback(
        data.shape, where, lambda index: data[index], dtype=data.dtype
    )


def opened(leaf: Any, data: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The leaf as a source, with right values in all of its shards."""
    adapter = JaxAdapter()
    source = adapter.source("p", leaf)
    if source.partition is None:
        return {"partition": None}
    assert source.shards is not None
    assert source.view is None
    assert not source.partial
    for shard, view in zip(source.shards, source.views, strict=True):
        expected = data[(*shard.box.slices(), ...)]
        out = np.empty(shard.box.shape, DTYPES[source.spec.dtype])
        fetch_box(adapter, source, shard.box, out)
        np.testing.assert_array_equal(out, expected)
        if view is not None:
            np.testing.assert_array_equal(view, expected)
            assert not view.flags.writeable
    return {
        "shape": source.spec.shape,
        "partition": [source.partition.cuts, source.partition.holders, source.partition.processes],
        "shards": [[s.box.offset, s.box.shape, s.holders] for s in source.shards],
        "views": [view is not None for view in source.views],
        "extra": source.extra,
    }


def restored(like: Any, data: np.ndarray[Any, Any]) -> Any:
    """A leaf as `like`, made from the boxes that the target wants."""
    adapter = JaxAdapter()
    target = adapter.target("p", like, in_place=False)
    assert target.buffers == ()
    boxes = [Box.whole(data.shape)] if target.boxes is None else target.boxes
    leaf = adapter.place(target, [data[box.slices()].copy() for box in boxes])
    assert leaf.sharding == like.sharding
    assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
    return leaf


def check(leaf: Any, data: np.ndarray[Any, Any]) -> None:
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, data[shard.index])


def both_ways(spec: str, dtype: str = "float32") -> dict[str, Any]:
    data = DATA.astype(DTYPES[dtype])
    where = NamedSharding(mesh(), SPECS[spec])
    leaf = put(data, where)
    check(restored(leaf, data), data)
    abstract: Any = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=where)
    check(restored(abstract, data), data)
    return opened(leaf, data)


def computed() -> dict[str, Any]:
    """What a jitted function returns, before anything waits for it."""
    leaf = put(DATA, NamedSharding(mesh(), SPECS["tiles"]))
    return opened(jax.jit(lambda x: x * 2)(leaf), DATA * 2)


def on_one_process(process: int) -> dict[str, Any]:
    where = NamedSharding(mesh_of(process), P("x"))
    leaf = put(DATA, where)
    check(restored(leaf, DATA), DATA)
    found = opened(leaf, DATA)
    target = JaxAdapter().target("p", leaf, in_place=False)
    return found | {"wanted": len(target.boxes or ())}


def without_mesh() -> dict[str, Any]:
    """A sharding that is enumerated: the last device of the last process."""
    where = SingleDeviceSharding(jax.devices()[-1])
    leaf = put(DATA, where)
    check(restored(leaf, DATA), DATA)
    return opened(leaf, DATA)


def enumerated_as_with_mesh() -> None:
    """Shardings without a mesh are divided as JAX's own indices say; all of them without one."""
    for spec in SPECS.values():
        where = NamedSharding(mesh(), spec)
        expected = jax_shards.divide("p", where, DATA.shape)
        devices, found = jax_shards._enumerate(where, DATA.shape, ())
        assert found.shards == expected.shards
        assert expected.partition is not None
        assert found.partition.cuts == expected.partition.cuts
        assert found.partition.processes == expected.partition.processes
        numbers = [number for (number,) in found.numbers]
        assert dict(zip(devices, numbers, strict=True)) == expected.box_of


def keys(spec: str) -> dict[str, Any]:
    data = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 8)))
    where = NamedSharding(mesh(), SPECS[spec])
    leaf = jax.random.wrap_key_data(put(data, where))
    found = restored(leaf, data)
    for one, other in zip(
        jax.random.key_data(found).addressable_shards,
        jax.random.key_data(leaf).addressable_shards,
        strict=True,
    ):
        np.testing.assert_array_equal(one.data, other.data)
    # Where this process holds none of them, JAX cannot see their implementation in an array.
    elsewhere = NamedSharding(mesh_of(0), P("x"))
    restored(jax.random.wrap_key_data(put(data, elsewhere)), data)
    return opened(leaf, data)


def empty() -> dict[str, Any]:
    leaf = put(MISSING, NamedSharding(mesh(), P(None, "x")))
    made = restored(leaf, MISSING)
    assert [shard.data.shape for shard in made.addressable_shards] == [(0, 3)] * 2
    return opened(leaf, MISSING)


def nothing_enumerates_devices() -> None:
    """Neither opening a leaf nor describing a target asks for the indices of all devices."""
    kinds = [NamedSharding, jax.sharding.Sharding]
    saved = [(kind, name) for kind in kinds for name in vars(kind) if "indices_map" in name]

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("visits every device")

    leaf = put(DATA, NamedSharding(mesh(), P("y", "x")))
    before = [(kind, name, vars(kind)[name]) for kind, name in saved]
    assert before
    try:
        for kind, name in saved:
            setattr(kind, name, refused)
        opened(leaf, DATA)
        leaf = restored(leaf, DATA)
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)
    check(leaf, DATA)


def undivided() -> str:
    where = NamedSharding(mesh(), P("x"))
    like: Any = jax.ShapeDtypeStruct
    try:
        JaxAdapter().target("a/b", like((7, 6), np.float32, sharding=where), in_place=False)
    except UnsupportedLeafError as error:
        return str(error)
    raise AssertionError("7 rows were divided by two")


def local() -> dict[str, Any]:
    return opened(jnp.arange(3.0), np.arange(3.0))


CASES: dict[str, Callable[[], Any]] = {
    **{
        f"{name}, {dtype}": (lambda n=name, d=dtype: both_ways(n, d))  # type: ignore[misc]
        for name in SPECS
        for dtype in ("float32", "int4", "float64")
    },
    **{
        f"keys, {name}": (lambda n=name: keys(n))  # type: ignore[misc]
        for name in ("rows", "rows of devices", "replicated")
    },
    "computed": computed,
    "on process 0": lambda: on_one_process(0),
    "on process 1": lambda: on_one_process(1),
    "without a mesh": without_mesh,
    "enumerated as with a mesh": enumerated_as_with_mesh,
    "empty": empty,
    "nothing enumerates devices": nothing_enumerates_devices,
    "undivided": undivided,
    "local": local,
}
