"""The memory of a JAX array on one device: viewed where it is host memory, else copied by box."""

# Rule 1: nothing here leaves a host copy on the array it is given, nor on the handle of a shard
#   that JAX keeps on its array (`addressable_data`, `addressable_shards`): `np.asarray` and
#   `copy_to_host_async` see only a new array or a second handle of the same buffer.

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import jax
import jax.experimental
import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import NUMPY_DTYPES, selection
from asyncckpt.spec import Box

WIDE = frozenset(("int64", "uint64", "float64", "complex128"))
"""Dtypes that JAX truncates where 64-bit types are off."""

PACKED = frozenset(("int2", "int4", "float4_e2m1fn"))
"""Dtypes that JAX packs into fewer bytes than are stored, so that its memory cannot be viewed."""

HOST_MEMORY_KINDS = frozenset(("pinned_host", "unpinned_host"))
"""Memories of an accelerator that lie on the host; computations on the device cannot slice them."""

_GUARDS = tuple(
    f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device", "device_to_host")
)

_MAX_DYNAMIC_OFFSET = 2**31 - 1
"""`dynamic_slice` takes its offsets as int32 where x64 is off."""


def on_cpu(device: jax.Device) -> bool:
    """Return whether all memory of the device is host memory."""
    return bool(device.platform == "cpu")


def config(name: str) -> Any:
    """Return a setting of JAX as it is in this thread."""
    return getattr(jax.config, name)


def x64_for(name: str) -> contextlib.AbstractContextManager[Any]:
    """Keep 64-bit types as they are in this thread, whatever its setting."""
    if name not in WIDE:
        return contextlib.nullcontext()
    enable: Any = getattr(jax, "enable_x64", None)
    if enable is None:  # before JAX 0.8
        enable = getattr(jax.experimental, "enable_x64", None)
    context: contextlib.AbstractContextManager[Any] = enable(True)
    return context


def transfers() -> contextlib.AbstractContextManager[Any]:
    """Allow transfers in this thread: the call to save or restore has asked for them.

    The guard of the caller's thread does not reach the threads of this library.
    """
    if not any("disallow" in (config(name) or "") for name in _GUARDS):
        return contextlib.nullcontext()  # the guard takes 8 µs, which is much for a small leaf
    return jax.transfer_guard("allow")


def host_view(array: Any, name: str) -> npt.NDArray[Any]:
    """Return the memory of an array on CPU, read-only, in the strides of its layout.

    Elsewhere, and for packed dtypes, a copy of all of it.
    """
    if name in NUMPY_DTYPES:  # Python's buffer protocol has no format for others
        try:
            return np.asarray(memoryview(array))
        except BufferError:
            pass  # not in C order, or not on a CPU
    # Internal to JAX, and 4 µs per leaf faster than the same by public calls.
    without_cache = getattr(array, "_single_device_array_to_np_array_did_copy", None)
    if without_cache is not None:
        view: npt.NDArray[Any] = without_cache()[0]
        return view
    return np.asarray(array.addressable_data(0))


def begin_read(array: Any, name: str, box: Box) -> Any:
    """Begin to copy a box to the host; return what `np.asarray` turns into its values.

    Waits for an array that is still being computed only where its memory is viewed.
    """
    if in_host_memory(array.sharding, name):
        array.block_until_ready()
        return host_view(array, name)[selection(box)]
    with x64_for(name):
        if box.shape == array.shape:
            part = array.addressable_data(0)
        elif max(box.offset, default=0) <= _MAX_DYNAMIC_OFFSET:
            part = jax.lax.dynamic_slice(array, box.offset, box.shape)
        else:
            part = jax.lax.slice(array, box.offset, box.stop)
    part.copy_to_host_async()
    return part


@lru_cache(maxsize=1024)
def in_host_memory(sharding: jax.sharding.Sharding, name: str) -> bool:
    """Return whether an array on one device is read through a view of its memory."""
    (device,) = sharding.device_set
    return name not in PACKED if on_cpu(device) else sharding.memory_kind in HOST_MEMORY_KINDS
