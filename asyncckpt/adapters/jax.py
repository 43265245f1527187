"""JAX arrays on one device, typed PRNG keys, abstract arrays, and registered containers."""

# Rule 1: never `np.asarray(leaf)` nor `leaf._value` on the caller's array: both leave a host copy
#   cached on it. Views come from the buffer protocol or from a second handle of the same buffer.
# Rule 2: a view holds the buffer. While one lives, donating the array makes XLA copy it, and
#   deleting it is safe; so the pipeline drops `Source.view` as soon as the leaf is staged.
# Rule 3: a deleted array is asked for nothing but shape, dtype and sharding (`is_ready` on one ends
#   the process, seen with jaxlib 0.10).

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.experimental
import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import (
    NUMPY_DTYPES,
    check_values,
    unsupported_dtype,
)
from asyncckpt.errors import DtypeMismatchError, UnsupportedLeafError
from asyncckpt.ports import Source, Target
from asyncckpt.spec import DTYPE_NAMES, Box, array_spec

_64_BIT = frozenset(("int64", "uint64", "float64", "complex128"))
_PACKED = frozenset(("int4",))
"""Dtypes that JAX packs into fewer bytes than we store, so that no view of its memory is ours."""

_MAX_DYNAMIC_OFFSET = 2**31 - 1
"""`dynamic_slice` takes its offsets as int32 where x64 is off."""


@dataclass(slots=True, eq=False)
class JaxTarget(Target):
    """A `Target` with what `place` replays in its thread.

    Attributes:
        sharding: where the leaf goes; with `device`, None.
        device: device of an uncommitted leaf; None for JAX's default.
        prng_impl: name of the PRNG implementation of a typed key array, or None.
    """

    sharding: jax.sharding.Sharding | None = None
    device: jax.Device | None = None
    prng_impl: str | None = None


class JaxAdapter:
    """`jax.Array` on one device, as committed and as strongly typed as it may be.

    Typed PRNG keys are stored as their uint32 key data, with the name of their implementation in
    `extra`. Restored arrays on CPU adopt the restored memory; they are strongly typed, committed
    where the `like` leaf is. A donated or deleted array is a fine `like`: its shape, dtype and
    sharding are still known.
    """

    name = "jax"

    def __init__(self) -> None:
        # As they are in the thread of the caller; `leaf` runs in another one.
        self._x64 = bool(_config("jax_enable_x64"))
        self._device = _config("jax_default_device")

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (jax.Array, jax.ShapeDtypeStruct)) or issubclass(
            kind, jax.core.Tracer
        )

    def source(self, path: str, leaf: Any) -> Source:
        name = DTYPE_NAMES.get(leaf.dtype)
        if name is None or isinstance(leaf, jax.core.Tracer):
            return self._unusual_source(path, leaf)
        try:
            on_cpu = _placement(leaf.sharding)
        except AttributeError:
            raise _abstract(path, leaf) from None
        if on_cpu is None:
            raise _sharded(path, leaf.sharding)
        if leaf.is_deleted():
            raise _deleted(path)
        source = Source(array_spec(leaf.shape, name), leaf, None, ("jax", id(leaf)), "jax")
        if on_cpu and name not in _PACKED and leaf.is_ready():
            source.view = _host_view(leaf, name)
        return source

    def _unusual_source(self, path: str, leaf: Any) -> Source:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{path}: this is a tracer ({leaf.dtype}{list(leaf.shape)}), not an array; call "
                "save outside jit, grad and vmap",
                path=path,
            )
        if not _is_key(leaf.dtype):
            raise unsupported_dtype(path, "jax", str(leaf.dtype))
        if not isinstance(leaf, jax.Array):
            raise _abstract(path, leaf)
        if _placement(leaf.sharding) is None:
            raise _sharded(path, leaf.sharding)
        if leaf.is_deleted():
            raise _deleted(path)
        source = self.source(path, jax.random.key_data(leaf))
        source.extra = {"prng_impl": str(jax.random.key_impl(leaf))}
        source.identity = ("jax", id(leaf))
        # The key data is an array of its own, which `fetch` reads; the caller's is kept alive too.
        source.stream, source.leaf = source.leaf, leaf
        return source

    def fetch(self, source: Source, box: Box, out: npt.NDArray[Any]) -> None:
        leaf = source.leaf if source.stream is None else source.stream
        index: Any = (*box.slices(), ...)
        if _placement(leaf.sharding) and source.spec.dtype not in _PACKED:
            leaf.block_until_ready()
            view = _host_view(leaf, source.spec.dtype)
            np.copyto(out, view[index], casting="no")
            return
        with _x64_for(source.spec.dtype):
            if box.shape == leaf.shape:
                part = leaf.addressable_data(0)
            elif max(box.offset, default=0) <= _MAX_DYNAMIC_OFFSET:
                part = jax.lax.dynamic_slice(leaf, box.offset, box.shape)
            else:
                part = jax.lax.slice(leaf, box.offset, box.stop)
            np.copyto(out, np.asarray(part), casting="no")

    def target(self, path: str, leaf: Any, *, in_place: bool) -> Target:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{path}: this is a tracer, not an array; call restore outside jit, grad and vmap",
                path=path,
            )
        shape, impl = leaf.shape, None
        name = DTYPE_NAMES.get(leaf.dtype)
        if name is None:
            if not _is_key(leaf.dtype):
                raise unsupported_dtype(path, "jax", str(leaf.dtype))
            data = jax.eval_shape(jax.random.key_data, _abstract_array(shape, leaf.dtype))
            shape, name, impl = data.shape, DTYPE_NAMES[data.dtype], _key_impl(leaf.dtype)
        check_x64(path, name)
        target = JaxTarget(array_spec(shape, name), leaf, path=path, prng_impl=impl)
        if impl is not None:
            target.extra = {"prng_impl": impl}
        sharding = leaf.sharding
        if sharding is not None and _placement(sharding) is None:
            raise _sharded(path, sharding)
        if sharding is None:
            target.device = _config("jax_default_device")
        elif impl is None and getattr(leaf, "committed", True):
            target.sharding = sharding
        else:
            (target.device,) = sharding.device_set
        return target

    def place(self, target: Target, values: npt.NDArray[Any]) -> Any:
        assert isinstance(target, JaxTarget)
        name = target.spec.dtype
        check_values(target.path, target.spec, values.shape, values.dtype)
        with _x64_for(name):
            if target.sharding is not None:
                array = jax.device_put(values, target.sharding)
            elif target.device is not None:
                with jax.default_device(target.device):
                    array = jax.device_put(values)
            else:
                array = jax.device_put(values)
        check_values(target.path, target.spec, array.shape, array.dtype)
        if target.prng_impl is not None:
            return jax.random.wrap_key_data(array, impl=target.prng_impl)
        return array.block_until_ready()

    def refuses(self, path: str, dtype: str) -> DtypeMismatchError | None:
        if dtype not in _64_BIT or self._x64:
            return None
        return _truncated(path, dtype)

    def leaf(self, path: str, values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
        name = DTYPE_NAMES[values.dtype]
        fault = self.refuses(path, name)
        if fault is not None:
            raise fault
        with _x64_for(name), jax.default_device(self._device):
            array = jax.device_put(values)
        if "prng_impl" in extra:
            return jax.random.wrap_key_data(array, impl=extra["prng_impl"])
        return array


class JaxNodes:
    """Containers registered with `jax.tree_util`, one level at a time."""

    def flatten(self, node: Any) -> tuple[Sequence[str | int], Sequence[Any]] | None:
        """Keys and children of a registered node, or None when the type is not registered."""
        entries, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if len(entries) == 1 and not entries[0][0]:
            return None
        return [_key(path[0]) for path, _ in entries], [child for _, child in entries]

    def unflatten(self, node: Any, children: Sequence[Any]) -> Any:
        """A node like `node` with these children."""
        treedef = jax.tree_util.tree_structure(node, is_leaf=lambda x: x is not node)
        return jax.tree_util.tree_unflatten(treedef, children)


def check_x64(path: str, name: str) -> None:
    """JAX, as it is set in this thread, can hold the dtype.

    Raises:
        DtypeMismatchError: it would truncate it to 32 bits.
    """
    if name in _64_BIT and not _config("jax_enable_x64"):
        raise _truncated(path, name)


def _truncated(path: str, name: str) -> DtypeMismatchError:
    return DtypeMismatchError(
        f"{path}: {name} cannot be restored into JAX with 64-bit types disabled, it would be "
        'truncated; call jax.config.update("jax_enable_x64", True) first, or restore this '
        "leaf as a NumPy array",
        path=path,
        expected="jax_enable_x64 = True",
        found="jax_enable_x64 = False",
    )


def _config(name: str) -> Any:
    """A setting as it is in this thread."""
    return getattr(jax.config, name)


def _key(entry: Any) -> Any:
    for attribute in ("key", "name", "idx"):  # DictKey and FlattenedIndexKey, GetAttrKey, Sequence…
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _is_key(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def _key_impl(dtype: Any) -> str:
    # There is no public way from a key dtype to its implementation without an array of it.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return str(jax.random.key_impl(jax.numpy.empty((0,), dtype)))


@lru_cache(maxsize=256)
def _placement(sharding: jax.sharding.Sharding) -> bool | None:
    """Whether the one device is a CPU; None for several devices, or one of another process."""
    if len(sharding.device_set) != 1 or not sharding.is_fully_addressable:
        return None
    device: Any
    (device,) = sharding.device_set
    return bool(device.platform == "cpu")


def _host_view(leaf: Any, name: str) -> npt.NDArray[Any]:
    """The memory of an array on CPU, read-only, in the strides of its layout."""
    if name in NUMPY_DTYPES:  # Python's buffer protocol has no format for others
        try:
            return np.asarray(memoryview(leaf))
        except BufferError:
            pass  # not in C order
    # Internal to JAX, and 4 µs per leaf faster than the same by public calls.
    without_cache = getattr(leaf, "_single_device_array_to_np_array_did_copy", None)
    if without_cache is not None:
        view: npt.NDArray[Any] = without_cache()[0]
        return view
    return np.asarray(leaf.addressable_data(0))


def _x64_for(name: str) -> contextlib.AbstractContextManager[Any]:
    """64-bit types stay as they are in this thread, whatever it is set to."""
    if name not in _64_BIT:
        return contextlib.nullcontext()
    enable: Any = getattr(jax, "enable_x64", None)
    if enable is None:  # before JAX 0.8
        enable = getattr(jax.experimental, "enable_x64", None)
    context: contextlib.AbstractContextManager[Any] = enable(True)
    return context


def _abstract_array(shape: tuple[int, ...], dtype: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


def _abstract(path: str, leaf: Any) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{path}: a {type(leaf).__name__} has no values to save; pass the array",
        path=path,
    )


def _deleted(path: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{path}: this array was deleted or donated; save the state before the step that donates "
        "it, or the state that the step returned",
        path=path,
    )


def _sharded(path: str, sharding: jax.sharding.Sharding) -> UnsupportedLeafError:
    count = len(sharding.device_set)
    found = f"sharded over {count} devices" if count > 1 else "on a device of another process"
    return UnsupportedLeafError(
        f"{path}: this array is {found}; this release saves and restores arrays on one device: "
        "gather it first, for example with jax.device_put(x, jax.local_devices()[0])",
        path=path,
        expected="one device of this process",
        found=str(sharding),
    )
