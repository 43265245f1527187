"""JAX arrays on several devices: split into boxes, and assembled from boxes."""

# Rule 1: the global array is never assembled, neither on the host nor on a device, unless it is a
#   single box.
# Rule 2: a box is read from one replica; a restore passes its values to every device with a
#   replica. CPU devices may adopt the same host memory: JAX treats it as immutable, and copies it
#   when an array is donated.
# Rule 3: an array on several processes is divided by arithmetic on its mesh. JAX's device-to-index
#   maps would visit every device of every process for every leaf.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from asyncckpt.adapters import jax_memory, placements
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.spec import Box, Partition, Shard


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How a sharding divides arrays of one shape among the devices of this process.

    Attributes:
        boxes: the distinct boxes on these devices, in order of their offsets.
        shards: the same boxes with all their holders, for the planner.
        box_of: index of the box on each device of this process, in JAX's order of devices.
        on_cpu: whether all these devices are CPUs.
        partition: how all processes divide the array; None if only this process holds it.
    """

    boxes: tuple[Box, ...]
    shards: tuple[Shard, ...]
    box_of: Mapping[jax.Device, int]
    on_cpu: bool
    partition: Partition | None = None


def divide(
    path: str, sharding: jax.sharding.Sharding, shape: tuple[int, ...], tail: tuple[int, ...] = ()
) -> Division:
    """Return how the sharding divides `shape`; `tail` has further dimensions, not divided.

    Raises:
        UnsupportedLeafError: partial sums, a shape that the sharding does not divide, or a mesh
            without devices; names the path.
    """
    unreduced = getattr(getattr(sharding, "spec", None), "unreduced", None)
    if unreduced:
        raise UnsupportedLeafError(
            f"{path}: the devices hold partial sums of this array (unreduced over "
            f"{', '.join(map(str, sorted(unreduced)))}); reduce it first, for example with "
            "jax.sharding.reshard",
            path=path,
            expected="a sharding without unreduced axes",
            found=str(sharding),
        )
    try:
        return _divide(sharding, shape, tail)
    except ValueError as error:
        raise UnsupportedLeafError(
            f"{path}: this sharding does not divide shape {shape} among its devices: {error}",
            path=path,
            expected="a sharding over devices that divides the shape",
            found=str(sharding),
        ) from None


@lru_cache(maxsize=4096)
def _divide(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], tail: tuple[int, ...]
) -> Division:
    own_alone = sharding.is_fully_addressable
    part = sharding.shard_shape(shape) + tail  # raises where the shape is not divisible
    mesh = named_mesh(sharding)
    if mesh is None:
        devices, holding = _enumerate(sharding, shape, tail)
    else:
        places = _mesh(mesh)
        own = placements.coordinates_of(places, mesh.devices.flat[0].client.process_index())
        devices = [mesh.devices[place] for place in own]
        layout = layout_of(sharding, len(shape)) + ((),) * len(tail)
        holding = placements.hold(places, layout, shape + tail, own)
    boxes = tuple(shard.box for shard in holding.shards)
    numbers = [number[0] for number in holding.numbers if number]
    if devices and not boxes:  # an empty array has an empty box on every device
        boxes, numbers = (Box((0,) * len(part), part),), [0] * len(devices)
    return Division(
        boxes=boxes,
        shards=tuple(map(Shard, boxes)) if own_alone else holding.shards,
        box_of=dict(zip(devices, numbers, strict=True)),
        on_cpu=all(map(jax_memory.on_cpu, devices)),
        partition=None if own_alone else holding.partition,
    )


def named_mesh(sharding: jax.sharding.Sharding) -> jax.sharding.Mesh | None:
    """Return the mesh of a sharding that follows its mesh and spec, else None."""
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh) or not isinstance(
        sharding, jax.sharding.NamedSharding
    ):
        return None
    # Internal to JAX: set if XLA ordered the devices in a way that no spec can express.
    return mesh if getattr(sharding, "_logical_device_ids", None) is None else None


def layout_of(sharding: Any, rank: int) -> placements.Layout:
    """Return the cuts of each axis of an array of this rank by a `NamedSharding`."""
    names = {name: axis for axis, name in enumerate(sharding.mesh.axis_names)}
    layout: list[tuple[placements.Cut, ...]] = []
    for entry in getattr(sharding.spec, "partitions", sharding.spec):  # a tuple in older releases
        axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        layout.append(tuple(placements.Cut(names[name]) for name in axes))
    return tuple(layout) + ((),) * (rank - len(layout))


@lru_cache(maxsize=64)
def _mesh(mesh: jax.sharding.Mesh) -> placements.Mesh:
    devices: Any = mesh.devices
    processes = np.array([device.process_index for device in devices.flat], np.int64)
    return placements.Mesh(processes.reshape(devices.shape))


def _enumerate(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], tail: tuple[int, ...]
) -> tuple[list[jax.Device], placements.Holding]:
    """Return the devices of this process and their boxes, for a sharding without a mesh."""
    own: dict[jax.Device, Box] = {}
    processes: dict[Box, set[int]] = {}
    addressable = sharding.addressable_devices
    index_of: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in index_of.items():
        box = _box(index, shape, tail)
        processes.setdefault(box, set()).add(device.process_index)
        if device in addressable:
            own[device] = box
    return list(own), placements.enumerated(shape + tail, processes, own.values())


def _box(index: Any, shape: tuple[int, ...], tail: tuple[int, ...]) -> Box:
    ends = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    offset = tuple(start for start, _ in ends)
    return Box(
        offset + (0,) * len(tail), tuple(max(0, stop - start) for start, stop in ends) + tail
    )


def replicas(array: Any, division: Division, turn: int) -> list[Any]:
    """Return the single-device array of each box, on the device of replica `turn`."""
    found: list[list[Any]] = [[] for _ in division.boxes]
    # Not `addressable_data`: for a replicated array, it returns the first replica at every index.
    for shard in array.addressable_shards:
        found[division.box_of[shard.device]].append(shard.data)
    return [held[turn % len(held)] for held in found]


def assemble(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    division: Division,
    parts: Sequence[npt.NDArray[Any]],
    dtype: Any,
    *,
    prng_impl: Any = None,
) -> jax.Array:
    """Return the array with these values of its boxes; CPU devices adopt aligned memory.

    With `prng_impl`, the values are key data, and the result is an array of typed PRNG keys.
    """
    if division.partition is None and prng_impl is None and 0 not in shape:
        numbers = {box.offset: number for number, box in enumerate(division.boxes)}

        def values_at(index: Any) -> npt.NDArray[Any]:
            return parts[numbers[_box(index, shape, ()).offset]]

        return jax.make_array_from_callback(shape, sharding, values_at)
    kind = sharding.memory_kind
    places = [
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in division.box_of
    ]
    arrays: list[jax.Array] = jax.device_put(
        [parts[number] for number in division.box_of.values()], places
    )
    if prng_impl is not None:
        arrays = [jax.random.wrap_key_data(data, impl=prng_impl) for data in arrays]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
