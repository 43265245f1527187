"""JAX arrays, typed PRNG keys, abstract arrays, and registered containers."""

# Rule 1: never call `np.asarray(leaf)` or `leaf._value` on the caller's array: both cache a host
#   copy on it. Views come from the buffer protocol or from a second handle of the same buffer.
# Rule 2: a view holds the buffer: deleting the array is safe, but donating it makes XLA copy. So
#   the pipeline drops `Source.view` and `Source.views` as soon as the leaf is staged.
# Rule 3: read only shape, dtype and sharding of a deleted array (`is_ready` on one aborts the
#   process with jaxlib 0.10).
# Rule 4: views are made in the caller's thread: one that is made while another thread deletes the
#   array ends the process.

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import methodcaller
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from asyncckpt.adapters import jax_memory
from asyncckpt.adapters.arrays import check_values, selection, unsupported_dtype
from asyncckpt.adapters.jax_shards import Division, assemble, divide, replicas
from asyncckpt.errors import DtypeMismatchError, UnsupportedLeafError
from asyncckpt.ports import Run, Source, Target
from asyncckpt.spec import DTYPE_NAMES, DTYPES, ArraySpec, Box, array_spec

_NO_MESH = "no mesh is set in this thread"


@dataclass(slots=True, eq=False)
class JaxTarget(Target):
    """A `Target` with settings of the caller's thread, which `place` applies in its own.

    Attributes:
        sharding: sharding of the leaf; None for an uncommitted leaf.
        device: device of an uncommitted leaf; None for JAX's default.
        division: the boxes on each device of `sharding`; None for one device.
    """

    sharding: jax.sharding.Sharding | None = None
    device: jax.Device | None = None
    division: Division | None = None


class JaxAdapter:
    """`jax.Array` with any sharding, on devices of one or several processes.

    Typed PRNG keys are stored as their uint32 key data, with the name of their implementation in
    `extra`. Restored arrays on CPU adopt the restored memory. They are committed if the `like` leaf
    is; on one device, they also have its weak type. A donated or deleted array can be a `like`
    leaf: its shape, dtype and sharding are still known.

    An array on several devices has one box per distinct shard. Each process reads and restores the
    boxes on its own devices: successive reads rotate among replicas, to spread over the devices,
    and a restore reads each box once for all its replicas.
    """

    name = "jax"

    def __init__(self) -> None:
        # Settings of the caller's thread; `leaf` runs in another one.
        self._x64 = bool(jax_memory.config.jax_enable_x64)
        self._device = jax_memory.config.jax_default_device
        self._turns = itertools.count()

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (jax.Array, jax.ShapeDtypeStruct, jax.core.Tracer))

    def opens_anywhere(self, leaf: Any) -> bool:
        return False  # rule 4

    def source(self, path: str, leaf: Any) -> Source:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{path}: this is a tracer ({leaf.dtype}{list(leaf.shape)}), not an array; call "
                "save outside jit, grad and vmap",
                path=path,
            )
        name = DTYPE_NAMES.get(leaf.dtype)
        if name is None and not _is_key(leaf.dtype):
            raise unsupported_dtype(path, "jax", leaf.dtype)
        try:
            deleted = leaf.is_deleted()
        except AttributeError:
            raise UnsupportedLeafError(
                f"{path}: a {type(leaf).__name__} has no values to save; pass the array", path=path
            ) from None
        if deleted:
            raise UnsupportedLeafError(
                f"{path}: this array was deleted or donated; save the state before the step that "
                "donates it, or the state that the step returned",
                path=path,
            )
        if name is None:
            return self._key_source(path, leaf)
        single = _single_device(leaf.sharding)
        source = Source(array_spec(leaf.shape, name), leaf, None, ("jax", id(leaf)), "jax")
        source.captured, source.pending = leaf, None if leaf.is_ready() else _pending
        if not single and jax_memory.offloads(leaf.sharding, name):
            source.offload = self.offload
            if leaf.size <= jax_memory.MAX_DYNAMIC_OFFSET:
                source.begin_runs = self.begin_runs
        if single is None:
            self._divide(path, source)
        elif single and name not in jax_memory.PACKED and not source.pending:
            source.view = jax_memory.host_view(leaf, name)
        return source

    def _divide(self, path: str, source: Source) -> None:
        """Set the shards of the source, or its view if this process alone holds one box."""
        leaf, spec = source.leaf, source.spec
        division = divide(path, leaf.sharding, spec.shape)
        source.partition = division.partition
        if not spec.size:
            if division.partition is None:
                source.view = np.empty(spec.shape, DTYPES[spec.dtype])
            else:
                source.shards = ()
            return
        views: tuple[npt.NDArray[Any] | None, ...] = (None,) * len(division.shards)
        if division.on_cpu and spec.dtype not in jax_memory.PACKED and not source.pending:
            arrays = replicas(leaf, division, next(self._turns))
            views = tuple([jax_memory.host_view(array, spec.dtype) for array in arrays])
        if division.partition is not None or len(division.boxes) > 1:
            source.shards, source.views = division.shards, views
        else:
            (source.view,) = views

    def _key_source(self, path: str, leaf: Any) -> Source:
        with jax.ensure_compile_time_eval():  # inside jit, `key_data` would return a tracer
            data = jax.random.key_data(leaf)
        source = self.source(path, data)
        source.extra = {"prng_impl": str(jax.random.key_impl(leaf))}
        source.identity = ("jax", id(leaf))
        source.leaf = leaf  # kept alive too; `captured` is the key data, a separate array
        return source

    def offload(self, sources: Sequence[Source]) -> None:
        counts = [1 if source.shards is None else len(source.shards) for source in sources]
        pairs = zip(sources, counts, strict=True)
        arrays = [self._array(source, shard) for source, count in pairs for shard in range(count)]
        with jax_memory.transfers(), jax_memory.x64_for(*[one.spec.dtype for one in sources]):
            copies = iter(jax_memory.offloaded(arrays))
        for source, count in zip(sources, counts, strict=True):
            views = tuple([_host_view(source, copy) for copy in itertools.islice(copies, count)])
            if source.shards is None:
                (source.view,) = views
            else:
                source.views = views
            source.leaf = source.captured = None

    def begin_runs(self, runs: Sequence[Run]) -> Callable[[], None]:
        starts: list[int] = []
        blocks: list[Any] = []
        with jax_memory.transfers(), jax_memory.x64_for(*[run.source.spec.dtype for run in runs]):
            for source, shard, start, out in runs:
                array, itemsize = self._array(source, shard), source.spec.itemsize
                found, at = jax_memory.block(array, itemsize, start, out.size)
                blocks.append(found)
                starts.append(at)
            copies = jax_memory.offloaded(blocks)

        def wait() -> None:
            for run, copy, at in zip(runs, copies, starts, strict=True):
                values = np.ascontiguousarray(_host_view(run.source, copy))
                np.copyto(run.out, np.frombuffer(values, np.uint8)[at : at + run.out.size])

        return wait

    def fetch(self, source: Source, shard: int, box: Box, out: npt.NDArray[Any]) -> None:
        leaf = self._array(source, shard)
        with jax_memory.transfers():
            values = jax_memory.read(leaf, source.spec.dtype, box)
        np.copyto(out, values, casting="no")

    def _array(self, source: Source, shard: int) -> Any:
        """Return the array of a shard on one of its devices."""
        leaf = source.captured
        if _single_device(leaf.sharding) is not None:
            return leaf
        division = divide("", leaf.sharding, source.spec.shape)
        return replicas(leaf, division, next(self._turns))[shard]

    def target(self, path: str, leaf: Any, *, in_place: bool) -> Target:
        if isinstance(leaf, jax.core.Tracer):
            raise UnsupportedLeafError(
                f"{path}: this is a tracer, not an array; call restore outside jit, grad and vmap",
                path=path,
            )
        shape, extra = leaf.shape, None
        name = DTYPE_NAMES.get(leaf.dtype)
        if name is None:
            if not _is_key(leaf.dtype):
                raise unsupported_dtype(path, "jax", leaf.dtype)
            impl, data = _key_facts(leaf.dtype)
            shape, name, extra = shape + data.shape, data.dtype, {"prng_impl": str(impl)}
        if name in jax_memory.WIDE and not jax_memory.config.jax_enable_x64:
            raise _truncated(path, name)
        target = JaxTarget(array_spec(shape, name), leaf, extra=extra, path=path)
        try:
            sharding = leaf.sharding
        except TypeError:  # a ShapeDtypeStruct with a PartitionSpec
            raise _without_mesh(path, "this sharding is a PartitionSpec", _NO_MESH) from None
        if sharding is None:
            target.device = jax_memory.config.jax_default_device
        else:
            sharding = _with_devices(path, sharding)
            if _single_device(sharding) is None:
                target.sharding = sharding
                tail = target.spec.shape[len(leaf.shape) :]  # extra dimensions of key data
                target.division = divide(path, sharding, leaf.shape, tail)
                boxes = target.division.boxes
                if target.spec.size and boxes != (Box.whole(target.spec.shape),):
                    target.boxes = boxes
            elif getattr(leaf, "committed", True):
                target.sharding = sharding
            else:
                (target.device,) = sharding.device_set
        special = extra is not None or getattr(leaf, "weak_type", False)
        if not special and target.division is None:
            target.place_all = self.place_all
        return target

    def place_all(
        self, targets: Sequence[JaxTarget], values: Sequence[npt.NDArray[Any]]
    ) -> Sequence[Any]:
        # One call of JAX for many arrays takes half as long as one for each, and copies them to a
        # device in several threads of its own.
        made: list[Any] = [None] * len(targets)
        groups: dict[tuple[jax.Device | None, bool], list[int]] = {}
        for number, target in enumerate(targets):
            groups.setdefault((target.device, target.sharding is None), []).append(number)
        names = [target.spec.dtype for target in targets]
        with jax_memory.transfers(), jax_memory.x64_for(*names):
            for (device, uncommitted), numbers in groups.items():
                places = None if uncommitted else [targets[n].sharding for n in numbers]
                with jax.default_device(device):
                    arrays = jax.device_put([values[n] for n in numbers], places)
                for number, array in zip(numbers, arrays, strict=True):
                    target = targets[number]
                    check_values(target.path, target.spec, array.shape, array.dtype)
                    made[number] = array.block_until_ready()
        return made

    def place(self, target: Target, parts: Sequence[npt.NDArray[Any]]) -> Any:
        assert isinstance(target, JaxTarget)
        with jax_memory.transfers():
            return self._place(target, parts)

    def _place(self, target: JaxTarget, parts: Sequence[npt.NDArray[Any]]) -> Any:
        impl = None if target.extra is None else _key_facts(target.leaf.dtype)[0]
        division, sharding = target.division, target.sharding
        name, shape = target.spec.dtype, target.leaf.shape
        if division is None:
            array = _put(parts[0], name, target.device, sharding)
            if getattr(target.leaf, "weak_type", False):
                values = _weakly_typed(parts[0], name, target.device)
                weak = _put(values, name, target.device, sharding)
                if weak.dtype == array.dtype:
                    array = weak
        else:
            assert sharding is not None
            if target.boxes is None:
                parts = [parts[0][selection(box)] for box in division.boxes]
            if impl is not None:
                return assemble(shape, sharding, division, parts, target.leaf.dtype, prng_impl=impl)
            with jax_memory.x64_for(name):
                array = assemble(shape, sharding, division, parts, DTYPES[name])
        check_values(target.path, target.spec, array.shape, array.dtype)
        if impl is not None:
            return jax.random.wrap_key_data(array, impl=impl)
        return array.block_until_ready()

    def refuses(self, path: str, dtype: str) -> DtypeMismatchError | None:
        if dtype not in jax_memory.WIDE or self._x64:
            return None
        return _truncated(path, dtype)

    def leaf(self, path: str, values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
        name = DTYPE_NAMES[values.dtype]
        if fault := self.refuses(path, name):
            raise fault
        with jax_memory.transfers():
            array = _put(values, name, self._device)
            if "prng_impl" in extra:
                return jax.random.wrap_key_data(array, impl=extra["prng_impl"])
            return array


class JaxNodes:
    """Containers registered with `jax.tree_util`, one level at a time."""

    def flatten(self, node: Any) -> tuple[Sequence[str | int], Sequence[Any]] | None:
        """Return the keys and children of a node, None if its type is not registered."""
        if isinstance(node, dict):
            return None  # the tree has dicts of its own, in any order: JAX sorts their keys
        level = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
        if level is None:
            return None
        return [_key(key) for key, _ in level[0]], [child for _, child in level[0]]

    def unflatten(self, node: Any, children: Sequence[Any]) -> Any:
        """Return a node like `node` with these children."""
        treedef = jax.tree_util.tree_structure(node, is_leaf=lambda x: x is not node)
        return jax.tree_util.tree_unflatten(treedef, children)


def _pending(source: Source) -> bool:
    # One call of C code holds the GIL, so no thread can delete the array in between (rule 3).
    alive = itertools.filterfalse(methodcaller("is_deleted"), [source.captured])
    try:
        return not all(map(methodcaller("is_ready"), alive))
    except RuntimeError:  # a thread without the GIL has donated it in between
        return False


def _put(
    values: Any, name: str, device: jax.Device | None, sharding: jax.sharding.Sharding | None = None
) -> Any:
    """Return an array with this sharding, or an uncommitted one on `device` (None: default)."""
    with jax_memory.x64_for(name):
        if device is None:
            return jax.device_put(values, sharding)
        with jax.default_device(device):  # doubles the time for a small array
            return jax.device_put(values)


def _host_view(source: Source, copy: Any) -> npt.NDArray[Any]:
    return jax_memory.host_view(copy.block_until_ready(), source.spec.dtype)


def _weakly_typed(values: npt.NDArray[Any], name: str, device: jax.Device | None) -> Any:
    """Return a weakly typed value with the same bits: a Python number or a JAX array.

    Returns `values` itself if no Python number has this dtype.
    """
    if values.shape == () and not np.isnan(values):  # `item` does not preserve the bits of a NaN
        return values.item()
    with jax_memory.x64_for(name), jax.default_device(device):
        zeros = jax.numpy.full(values.shape, np.zeros((), values.dtype).item())
        return zeros.at[...].set(values) if zeros.dtype == values.dtype else values


def _truncated(path: str, name: str) -> DtypeMismatchError:
    return DtypeMismatchError(
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


def _is_key(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


@lru_cache(maxsize=64)
def _key_facts(dtype: Any) -> tuple[Any, ArraySpec]:
    """Return the implementation of keys, and the spec of the data of one key."""
    # JAX has no public function from a key dtype to these: trace a key, which needs no device.
    impls: list[Any] = []  # names, or implementations that have no name in JAX

    def data(key: Any) -> Any:
        impls.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    key = jax.ShapeDtypeStruct((), dtype)  # type: ignore[no-untyped-call]
    found = jax.eval_shape(data, key)
    return impls[0], array_spec(found.shape, DTYPE_NAMES[found.dtype])


@lru_cache(maxsize=256)
def _single_device(sharding: jax.sharding.Sharding) -> bool | None:
    """Return whether the only device is a CPU; None for several devices or an abstract mesh."""
    try:
        if len(sharding.device_set) != 1 or not sharding.is_fully_addressable:
            return None
    except ValueError:  # an abstract mesh
        return None
    (device,) = sharding.device_set
    return jax_memory.on_cpu(device)


def _with_devices(path: str, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Return the sharding with an abstract mesh replaced by this thread's mesh.

    Under `jax.set_mesh`, `jax.eval_shape` returns shardings over the abstract mesh.
    """
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return sharding
    found, current = _NO_MESH, jax.sharding.get_mesh()
    if isinstance(current, jax.sharding.Mesh) and not current.empty:
        if current.abstract_mesh == mesh:
            named: Any = sharding
            return jax.sharding.NamedSharding(current, named.spec, memory_kind=named.memory_kind)
        found = f"the mesh that is set in this thread is {current}"
    raise _without_mesh(path, f"this sharding is over {mesh}, which has no devices", found)


def _without_mesh(path: str, what: str, why: str) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{path}: {what}, and {why}; call restore under jax.set_mesh(mesh) with the mesh it was "
        "made for, or pass "
        "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))",
        path=path,
        expected="a sharding over devices",
        found=what,
    )
