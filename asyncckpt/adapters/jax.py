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
import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import LeafTarget, check_values, host_array, unsupported_dtype
from asyncckpt.errors import DtypeMismatchError, UnsupportedLeafError
from asyncckpt.ports import Source, Target
from asyncckpt.spec import DTYPE_NAMES, DTYPES, ArraySpec, Box

_64_BIT = frozenset(("int64", "uint64", "float64", "complex128"))
_BUFFER_PROTOCOL = frozenset(name for name, dtype in DTYPES.items() if dtype.kind in "biufc") - {
    "bfloat16"
}
"""Dtypes that Python's buffer protocol has a format for; numpy calls bfloat16 and float8 void."""

_PACKED = frozenset(("int4",))
"""Dtypes that JAX packs into fewer bytes than we store, so that no view of its memory is ours."""

_MAX_DYNAMIC_OFFSET = 2**31 - 1
"""`dynamic_slice` takes its offsets as int32 where x64 is off."""


@dataclass(slots=True, eq=False)
class JaxTarget(LeafTarget):
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
        source = Source(ArraySpec(leaf.shape, name), leaf, None, ("jax", id(leaf)), "jax")
        if on_cpu and leaf.is_ready():
            source.view = _host_view(leaf, name)
        return source

    def _unusual_source(self, path: str, leaf: Any) -> Source:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{path}: this is a tracer ({leaf.dtype}{list(leaf.shape)}), not an array; call "
                "save outside jit, grad and vmap",
                path=path,
            )
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
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
            view = source.view
            if view is None:
                leaf.block_until_ready()
                view = source.view = _host_view(leaf, source.spec.dtype)
            if view is not None:
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
            if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise unsupported_dtype(path, "jax", str(leaf.dtype))
            data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype))
            shape, name, impl = data.shape, DTYPE_NAMES[data.dtype], _key_impl(leaf.dtype)
        check_x64(path, name)
        target = JaxTarget(ArraySpec(shape, name), leaf, path=path, prng_impl=impl)
        if impl is not None:
            target.extra = {"prng_impl": impl}
        sharding = leaf.sharding
        if sharding is not None and _placement(sharding) is None:
            raise _sharded(path, sharding)
        if sharding is None:
            target.device = jax.config.jax_default_device
        elif impl is None and getattr(leaf, "committed", True):
            target.sharding = sharding
        else:
            (target.device,) = sharding.device_set
        return target

    def allocate(self, target: Target, spec: ArraySpec) -> npt.NDArray[Any]:
        return host_array(spec)

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

    def leaf(self, path: str, values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
        check_x64(path, DTYPE_NAMES[values.dtype])
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
    if name in _64_BIT and not jax.config.jax_enable_x64:
        raise DtypeMismatchError(
            f"{path}: {name} cannot be restored into JAX with 64-bit types disabled, it would be "
            'truncated; call jax.config.update("jax_enable_x64", True) first, or restore this '
            "leaf as a NumPy array",
            path=path,
            expected="jax_enable_x64 = True",
            found="jax_enable_x64 = False",
        )


def _key(entry: Any) -> Any:
    for attribute in ("key", "name", "idx"):  # DictKey and FlattenedIndexKey, GetAttrKey, Sequence…
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _key_impl(dtype: Any) -> str:
    # There is no public way from a key dtype to its implementation without an array of it.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return str(jax.random.key_impl(jax.numpy.empty((0,), dtype)))


@lru_cache(maxsize=256)
def _placement(sharding: jax.sharding.Sharding) -> bool | None:
    """Whether the one device is a CPU of this process; None for several devices or another process."""
    if len(sharding.device_set) != 1 or not sharding.is_fully_addressable:
        return None
    (device,) = sharding.device_set
    return bool(device.platform == "cpu")


def _host_view(leaf: Any, name: str) -> npt.NDArray[Any] | None:
    """The array's memory, or None where it is laid out so that only a copy can be had."""
    if name in _BUFFER_PROTOCOL:
        try:
            return np.asarray(memoryview(leaf))
        except BufferError:  # not in C order
            return None
    if name in _PACKED:
        return None
    view = np.asarray(leaf.addressable_data(0))
    return view if view.flags.c_contiguous else None


def _x64_for(name: str) -> contextlib.AbstractContextManager[Any]:
    """64-bit types stay as they are in this thread, whatever it is set to."""
    return _enable_x64(True) if name in _64_BIT else contextlib.nullcontext()


def _enable_x64(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    import jax.experimental  # where it was before JAX 0.8

    context: contextlib.AbstractContextManager[Any] = jax.experimental.enable_x64(enabled)
    return context


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
