"""JAX arrays over several devices of this process: taken apart by box, put together from boxes."""

# Rule 1: the global array is never assembled, neither on the host nor on a device, unless one
#   box is all of it.
# Rule 2: a box is read from one replica of it, and its values are given to every device that
#   holds one. Devices may then adopt the same host memory: it is theirs as immutable, so JAX
#   copies when one of them is donated.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from asyncckpt.adapters import jax_memory
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.spec import Box, Shard


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How a sharding divides arrays of one shape.

    Attributes:
        boxes: the distinct boxes in order of their offsets; one, if the array is replicated.
        shards: the same, as the planner takes them.
        holders: per box the devices that hold a replica of it.
        box_of: number of the box that a device holds, in JAX's order of the devices.
        on_cpu: whether all the devices are CPUs.
    """

    boxes: tuple[Box, ...]
    shards: tuple[Shard, ...]
    holders: tuple[tuple[jax.Device, ...], ...]
    box_of: Mapping[jax.Device, int]
    on_cpu: bool


def divide(
    path: str, sharding: jax.sharding.Sharding, shape: tuple[int, ...], tail: tuple[int, ...] = ()
) -> Division:
    """Return how the sharding divides `shape`; `tail` are further dimensions, not divided.

    Raises:
        UnsupportedLeafError: devices of other processes, partial sums, a shape that the sharding
            does not divide, or a mesh without devices; names the path.
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
        if sharding.is_fully_addressable:
            return _divide(sharding, shape, tail)
    except ValueError as error:
        raise UnsupportedLeafError(
            f"{path}: this sharding does not divide shape {shape} among its devices: {error}",
            path=path,
            expected="a sharding over devices that divides the shape",
            found=str(sharding),
        ) from None
    raise UnsupportedLeafError(
        f"{path}: this array is on devices of other processes too; this release saves and "
        "restores arrays on devices of one process: gather it first, for example with "
        "jax.experimental.multihost_utils.process_allgather",
        path=path,
        expected="devices of this process",
        found=str(sharding),
    )


@lru_cache(maxsize=4096)
def _divide(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], tail: tuple[int, ...]
) -> Division:
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape, tail), []).append(device)
    boxes = tuple(sorted(holders, key=lambda box: box.offset))
    return Division(
        boxes=boxes,
        shards=tuple(map(Shard, boxes)),
        holders=tuple(tuple(holders[box]) for box in boxes),
        box_of={device: n for n, box in enumerate(boxes) for device in holders[box]},
        on_cpu=all(map(jax_memory.on_cpu, sharding.device_set)),
    )


def _box(index: Any, shape: tuple[int, ...], tail: tuple[int, ...]) -> Box:
    ends = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    offset = tuple(start for start, _ in ends)
    return Box(
        offset + (0,) * len(tail), tuple(max(0, stop - start) for start, stop in ends) + tail
    )


def shard_views(
    array: Any, name: str, division: Division, turn: int
) -> tuple[npt.NDArray[Any], ...]:
    """Return per box its values in the memory of replica `turn`. For CPUs."""
    handles = _handles(array)
    return tuple(
        jax_memory.host_view(handles[devices[turn % len(devices)]], name)
        for devices in division.holders
    )


def read_box(
    array: Any, name: str, division: Division, box: Box, out: npt.NDArray[Any], turn: int
) -> None:
    """Copy the values of the box to `out`, each from replica `turn`. Blocking.

    The copies from all devices concerned begin before any is waited for.
    """
    handles = _handles(array)
    running = []
    for held, devices in zip(division.boxes, division.holders, strict=True):
        common = held.intersect(box)
        if common is None:
            continue
        handle = handles[devices[turn % len(devices)]]
        part = jax_memory.begin_read(handle, name, common.relative_to(held.offset))
        running.append((common.relative_to(box.offset), part))
    for where, part in running:
        index: Any = (*where.slices(), ...)
        np.copyto(out[index], np.asarray(part), casting="no")


def _handles(array: Any) -> dict[jax.Device, Any]:
    # Not `addressable_data`, which gives the first replica of a replicated array for every index.
    return {shard.device: shard.data for shard in array.addressable_shards}


def assemble(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    division: Division,
    parts: Sequence[npt.NDArray[Any]],
) -> jax.Array:
    """Return the array whose boxes have these values; CPUs adopt memory aligned for them."""
    numbers = {box.offset: number for number, box in enumerate(division.boxes)}

    def values_at(index: Any) -> npt.NDArray[Any]:
        return parts[numbers[_box(index, shape, ()).offset]]

    return jax.make_array_from_callback(shape, sharding, values_at)


def assemble_keys(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    division: Division,
    parts: Sequence[npt.NDArray[Any]],
    impl: str,
) -> jax.Array:
    """Return the typed PRNG keys, of this shape, whose boxes have these key data."""
    kind = sharding.memory_kind
    keys = []
    for device, number in division.box_of.items():
        place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        data = jax.device_put(parts[number], place)
        keys.append(jax.random.wrap_key_data(data, impl=impl))
    return jax.make_array_from_single_device_arrays(shape, sharding, keys)
