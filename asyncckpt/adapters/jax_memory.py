"""Reads of a JAX array on one device: views of host memory, copies of device memory by box."""

# Rule 1: no host copy stays cached on the caller's array, nor on the handles that JAX keeps on it
#   (`addressable_data`, `addressable_shards`): `np.asarray` is applied only to a new array or to a
#   new handle of the same buffer.

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import NUMPY_DTYPES, selection
from asyncckpt.options import MIB
from asyncckpt.spec import Box

WIDE = frozenset(("int64", "uint64", "float64", "complex128"))
"""Dtypes that JAX truncates when 64-bit types are disabled."""

PACKED = frozenset(("int2", "int4", "float4_e2m1fn"))
"""Dtypes that JAX packs more densely than zarr stores them, so its memory cannot be viewed."""

_PINNED = "pinned_host"

HOST_MEMORY_KINDS = frozenset((_PINNED, "unpinned_host"))
"""Memory kinds of an accelerator that are host memory; device computations cannot slice them."""

_GUARDS = tuple(
    f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device", "device_to_host")
)

config: Any = jax.config
"""JAX's settings, as seen by the reading thread; JAX does not declare their types."""

MAX_DYNAMIC_OFFSET = 2**31 - 1
"""`dynamic_slice` takes int32 offsets when x64 is disabled."""

BLOCK_NBYTES = 8 * MIB
"""Arrays that are copied whole for any part of them, and the shortest part of longer ones."""


def on_cpu(device: jax.Device) -> bool:
    """Return whether all memory of the device is host memory."""
    return bool(device.platform == "cpu")


def x64_for(*names: str) -> contextlib.AbstractContextManager[Any]:
    """Enable 64-bit types in this thread if a dtype needs them."""
    if WIDE.isdisjoint(names):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = jax.enable_x64(True)
    return context


def transfers() -> contextlib.AbstractContextManager[Any]:
    """Allow transfers in this thread, and NaNs and infinities in what is copied.

    Settings of the caller's thread do not reach this library's threads, but global ones do.
    """
    guards = ["disallow" in (getattr(config, name) or "") for name in _GUARDS]
    if not any(guards) and not config.jax_debug_nans and not config.jax_debug_infs:
        return contextlib.nullcontext()  # the contexts take 8 µs, significant for a small leaf
    stack = contextlib.ExitStack()
    for context in (jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False)):
        stack.enter_context(context)
    return stack


def host_view(array: Any, name: str) -> npt.NDArray[Any]:
    """Return a read-only view of an array on CPU, with the strides of its layout.

    On other devices, and for packed dtypes, returns a copy of the whole array.
    """
    if name in NUMPY_DTYPES:  # the buffer protocol has no format for other dtypes
        try:
            return np.asarray(memoryview(array))
        except BufferError:
            pass  # not in C order, or not on a CPU
    # Internal to JAX; 4 µs per leaf faster than the public calls.
    without_cache = getattr(array, "_single_device_array_to_np_array_did_copy", None)
    if without_cache is not None:
        view: npt.NDArray[Any] = without_cache()[0]
        return view
    return np.asarray(array.addressable_data(0))


def read(array: Any, name: str, box: Box) -> npt.NDArray[Any]:
    """Return the values of a box: a view of host memory, or a copy from the device."""
    if in_host_memory(array.sharding, name):
        array.block_until_ready()
        view: npt.NDArray[Any] = host_view(array, name)[selection(box)]
        return view
    part: Any
    with x64_for(name):
        if box.shape == array.shape:  # another array with the same buffer
            part = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
        elif max(box.offset, default=0) <= MAX_DYNAMIC_OFFSET:
            part = jax.lax.dynamic_slice(array, box.offset, box.shape)
        else:
            part = jax.lax.slice(array, box.offset, box.stop)
    return np.asarray(part)


def offloaded(arrays: Sequence[Any]) -> list[Any]:
    """Begin to copy arrays, each on one device, to pinned host memory; return the copies.

    One call for all: its own time, not that of the copies, is most of it for small arrays.
    """
    devices = [next(iter(array.sharding.device_set)) for array in arrays]
    copies: list[Any] = jax.device_put(arrays, [_pinned(device) for device in devices])
    return copies


def block(array: Any, itemsize: int, start: int, nbytes: int) -> tuple[Any, int]:
    """Return an array on the same device with some bytes of a larger one, and where they begin.

    The bytes are those of a C-contiguous array, `nbytes` from byte `start` on. XLA compiles a slice
    once for each shape of array and each length, so blocks have few lengths.
    """
    if array.size * itemsize <= BLOCK_NBYTES:
        return array, start
    count = BLOCK_NBYTES // itemsize
    while count * itemsize < nbytes + itemsize:  # an element may be cut on either side
        count *= 2
    count = min(count, array.size)
    first = min(start // itemsize, array.size - count)
    return _flat_slice(array, first, count), start - first * itemsize


@partial(jax.jit, static_argnums=2)
def _flat_slice(array: Any, first: int, count: int) -> Any:
    return jax.lax.dynamic_slice(array.reshape(-1), (first,), (count,))


@lru_cache(maxsize=1024)
def offloads(sharding: jax.sharding.Sharding, name: str) -> bool:
    """Return whether an array is in device memory that can be copied to pinned host memory."""
    devices: Any = sharding.addressable_devices
    if name in PACKED or sharding.memory_kind in HOST_MEMORY_KINDS or any(map(on_cpu, devices)):
        return False
    kinds = [{memory.kind for memory in device.addressable_memories()} for device in devices]
    return all([_PINNED in found for found in kinds])


@lru_cache(maxsize=1024)
def _pinned(device: jax.Device) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED)


@lru_cache(maxsize=1024)
def in_host_memory(sharding: jax.sharding.Sharding, name: str) -> bool:
    """Return whether a single-device array is read through a view of its memory."""
    (device,) = sharding.device_set
    return name not in PACKED if on_cpu(device) else sharding.memory_kind in HOST_MEMORY_KINDS
