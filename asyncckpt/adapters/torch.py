"""PyTorch tensors on CPU and on CUDA and other devices, and page-locked host memory."""

# Rule 1: nothing here depends on the grad or inference mode of the thread: tensors are detached
#   before they are read, and written under no_grad.
# Rule 2: workers wait for pending device work through an event that the caller's thread recorded on
#   its current stream; a worker has another current stream.

from __future__ import annotations

import contextlib
import math
import mmap
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncckpt.adapters.arrays import NUMPY_DTYPES, may_overlap_itself, unsupported_dtype
from asyncckpt.errors import (
    DtypeMismatchError,
    ShapeMismatchError,
    StagingError,
    UnsupportedLeafError,
)
from asyncckpt.ports import Run, Source, Target
from asyncckpt.spec import DTYPE_NAMES, DTYPES, ArraySpec, Box, array_spec

# PyTorch's int2 and int4 have no tensors.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in DTYPES
    if hasattr(torch, name) and name not in ("int2", "int4")
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_VIEWS: dict[torch.dtype, tuple[str, int, np.dtype[Any] | None]] = {
    dtype: (
        (DTYPES[name].str, dtype.itemsize, None)
        if name in NUMPY_DTYPES
        else ("<i2" if dtype.itemsize == 2 else "|u1", dtype.itemsize, DTYPES[name])
    )
    for dtype, name in _NAMES.items()
}
"""NumPy type code and item size of the memory, and the dtype to view it as, if another.

NumPy has no type codes for bfloat16 and float8, so their memory is read as integers."""

PAGE_LOCK_NBYTES = 1 << 16
"""Smallest tensor whose memory is page-locked for a copy; that of smaller ones is not aligned."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def of_kind(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a parameter or buffer if `like` is one, with its `requires_grad`."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    if isinstance(like, torch.nn.Buffer):
        return torch.nn.Buffer(tensor, persistent=like.persistent)
    return tensor.requires_grad_(like.requires_grad)


class TorchAdapter:
    """`torch.Tensor` and `Parameter`; `requires_grad` comes from the target and is not saved.

    Filling a tensor in place increments its version counter, so that autograd detects a backward
    pass through overwritten values. A `like` tensor on device meta is restored on CPU.
    """

    name = "torch"

    def __init__(self) -> None:
        # By device, an event after all work that the caller had queued when the first leaf came.
        self.events: dict[torch.device, torch.cuda.Event] = {}
        self._queueing = threading.Lock()

    def owns(self, kind: type) -> bool:
        return issubclass(kind, torch.Tensor)

    def opens_anywhere(self, leaf: Any) -> bool:
        # Others need the caller's current stream, or are subclasses that may run any code.
        return type(leaf) in _PLAIN and leaf.is_cpu

    def source(self, path: str, leaf: Any) -> Source:
        leaf = waited(leaf)
        name = _dtype_name(path, leaf)
        shape = tuple(leaf.shape)
        if leaf.is_meta:
            raise UnsupportedLeafError(
                f"{path}: a tensor on device meta has no values to save; materialise it first",
                path=path,
            )
        spec = array_spec(shape, name)
        source = Source(spec, leaf, None, None, "torch")
        conj, neg, on_cpu = leaf.is_conj(), leaf.is_neg(), leaf.is_cpu
        device = None if on_cpu else leaf.device
        # The garbage collector looks at each object made here, so none is made without need.
        strides = None if leaf.is_contiguous() else leaf.stride()
        if pointer := _address(path, leaf):
            source.identity = ("torch", device, pointer, spec.shape, strides, name, conj, neg)
        if on_cpu and not (conj or neg):
            source.view = _view(leaf, pointer, spec.shape, strides)
        elif leaf.is_cuda:
            source.captured = self._queued(leaf.device)
            if strides is None and not (conj or neg):
                source.begin_runs = self.begin_runs
        return source

    def _queued(self, device: torch.device) -> torch.cuda.Event:
        """Return an event after all work that the caller has queued, the same for each leaf."""
        event = self.events.get(device)
        if event is None:
            event = self.events[device] = torch.cuda.current_stream(device).record_event()
        return event

    def begin_runs(self, runs: Sequence[Run]) -> Callable[[], None]:
        by_device: dict[torch.device, list[Run]] = {}
        for run in runs:
            by_device.setdefault(run.source.leaf.device, []).append(run)
        with contextlib.ExitStack() as waits:
            for device, some in by_device.items():
                stream = _new_stream(device)
                waits.callback(stream.synchronize)
                # Threads that queue at the same time slow each other down tenfold.
                with self._queueing, torch.no_grad(), torch.cuda.stream(stream):
                    stream.wait_event(self.events[device])
                    for source, _, start, out in some:
                        flat = source.leaf.view(-1).view(torch.uint8)
                        if out.size < flat.nbytes:
                            flat = flat[start : start + out.size]
                        torch.from_numpy(out).copy_(flat, non_blocking=True)
            return waits.pop_all().close

    def fetch(self, source: Source, shard: int, box: Box, out: npt.NDArray[Any]) -> None:
        part = source.leaf.detach()[(*box.slices(), ...)]
        if source.captured is None:
            np.copyto(out, numpy_view(part.resolve_conj().resolve_neg().cpu()), casting="no")
            return
        host = tensor_view(out)
        with _after(source.captured, part.device):
            host.copy_(part.resolve_conj().resolve_neg(), non_blocking=True)

    def target(self, path: str, leaf: Any, *, in_place: bool) -> Target:
        leaf = waited(leaf)
        name = _dtype_name(path, leaf)
        target = Target(array_spec(tuple(leaf.shape), name), leaf, path=path)
        if leaf.is_cuda:
            target.place_all = self.place_all
        if not in_place:
            return target
        if leaf.is_meta:
            raise UnsupportedLeafError(
                f"{path}: a tensor on device meta has no memory to fill; allocate it with "
                'module.to_empty(device="cpu") first, or use restore(like=...)',
                path=path,
            )
        # Hot for small tensors: read each attribute once.
        pointer = _address(path, leaf)
        if not leaf.is_contiguous():
            stride, itemsize = leaf.stride(), leaf.itemsize
            if may_overlap_itself(leaf.shape, [step * itemsize for step in stride], itemsize):
                raise UnsupportedLeafError(
                    f"{path}: elements of this tensor share memory (stride {stride}), so it cannot "
                    "be filled; pass a clone",
                    path=path,
                )
        if leaf.is_cpu and not leaf.is_conj() and not leaf.is_neg():
            target.buffers = (numpy_view(leaf),)
        else:
            target.fill = True
            if leaf.is_cuda:
                target.captured = self._queued(leaf.device)
            if pointer:
                place = (pointer, target.spec.shape, leaf.stride(), name)
                target.identity = (str(leaf.device), *place, leaf.is_conj(), leaf.is_neg())
        return target

    def place(self, target: Target, parts: Sequence[npt.NDArray[Any]]) -> Any:
        (values,) = parts
        like: torch.Tensor = target.leaf
        if target.buffers:
            torch.autograd.graph.increment_version(like)
            return like
        tensor = tensor_view(values)
        if target.fill:
            copy_into(like, tensor, target.captured)
            return like
        if not like.is_cpu and not like.is_meta:
            tensor = tensor.to(like.device)
        return of_kind(tensor, like)

    def place_all(
        self, targets: Sequence[Target], values: Sequence[npt.NDArray[Any]]
    ) -> Sequence[Any]:
        tensors = [tensor_view(array) for array in values]
        made: list[torch.Tensor] = []
        for target, tensor in zip(targets, tensors, strict=True):
            like = target.leaf
            # Of the current stream, not the copy's, so that the caller's tensors can reuse it.
            made.append(like if target.fill else torch.empty_like(tensor, device=like.device))
        copy_all([*zip(made, tensors, [target.captured for target in targets], strict=True)])
        return [
            tensor if target.fill else of_kind(tensor, target.leaf)
            for target, tensor in zip(targets, made, strict=True)
        ]

    def refuses(self, path: str, dtype: str) -> DtypeMismatchError | None:
        if dtype in TORCH_DTYPES:
            return None
        return DtypeMismatchError(
            f"{path}: the checkpoint holds {dtype}, which PyTorch does not have; restore it with "
            'leaves="numpy" or "jax"',
            path=path,
            expected=tuple(TORCH_DTYPES),
            found=dtype,
        )

    def leaf(self, path: str, values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
        if fault := self.refuses(path, DTYPE_NAMES[values.dtype]):
            raise fault
        return tensor_view(values)


def copy_into(
    tensor: torch.Tensor, values: torch.Tensor, event: torch.cuda.Event | None = None
) -> None:
    """Write to a tensor, invisible to autograd and, with an event, after the work before that."""
    if event is not None:
        copy_all([(tensor, values, event)])
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values)


Copy = tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]
"""A tensor, its values, and an event after the work that they wait for."""


def copy_all(copies: Sequence[Copy]) -> None:
    """Write to each tensor of a CUDA device the values of one on the CPU, invisible to autograd.

    After its event or, without one, after the work queued on the current stream of its device, in
    whose order the memory of new tensors is reused.
    """
    groups: dict[tuple[torch.device, torch.cuda.Event | None], list[Copy]] = {}
    for copy in copies:
        groups.setdefault((copy[0].device, copy[2]), []).append(copy)
    with _page_locked([values for _, values, _ in copies]):
        for (device, event), some in groups.items():
            with _after(event or torch.cuda.current_stream(device).record_event(), device):
                for tensor, values, _ in some:
                    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                        tensor.copy_(values, non_blocking=True)


@contextlib.contextmanager
def _after(event: torch.cuda.Event, device: torch.device) -> Iterator[None]:
    """Run the block's kernels after the event, and wait for them: their memory may be reused then.

    They run on a new stream, so that copies of several threads overlap and the caller's stream is
    not delayed.
    """
    stream = _new_stream(device)
    try:
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            yield
    finally:  # after an error, too
        stream.synchronize()


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Memory:
    """A tensor's memory as an `__array_interface__`; keeps the tensor alive."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, interface: dict[str, Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = interface


def numpy_view(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a view of a CPU tensor with the same strides, invisible to autograd.

    `Tensor.numpy()` is not used: it makes the storage permanently unresizable, and FSDP, for
    example, resizes storages.
    """
    strides = None if tensor.is_contiguous() else tensor.stride()
    return _view(tensor, tensor.data_ptr(), tuple(tensor.shape), strides)


def _view(
    tensor: torch.Tensor, pointer: int, shape: tuple[int, ...], strides: Sequence[int] | None
) -> npt.NDArray[Any]:
    """Return the view, given facts of the tensor; `strides` is None if it is contiguous."""
    type_code, itemsize, dtype = _VIEWS[tensor.dtype]
    if 0 in shape:
        return np.empty(shape, dtype or type_code)
    interface: dict[str, Any] = {
        "version": 3,
        "shape": shape,
        "typestr": type_code,
        "data": (pointer, False),
    }
    if strides is not None:
        interface["strides"] = tuple([step * itemsize for step in strides])
    view = np.asarray(_Memory(tensor, interface))
    return view if dtype is None else view.view(dtype)


def tensor_view(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a CPU tensor that shares the array's memory."""
    dtype = TORCH_DTYPES[DTYPE_NAMES[array.dtype]]
    type_code, _, own_dtype = _VIEWS[dtype]
    if own_dtype is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(type_code)).view(dtype)


def page_lock(address: int, nbytes: int) -> None:
    """Page-lock whole pages, so that CUDA copies to and from them directly. Blocking.

    Raises:
        StagingError: the CUDA runtime refused.
    """
    code = _cudart("cudaHostRegister", address, nbytes, 0)
    if code != 0:
        raise StagingError(
            f"page-locking {nbytes} bytes failed with CUDA error {code}; raise the limit of locked "
            "memory (ulimit -l), or lower host_memory_nbytes",
            stage="stage",
            found=code,
        )


def page_unlock(address: int) -> None:
    """Undo `page_lock`.

    The code is ignored: it may be that of earlier work, which reports it, or of a runtime that has
    ended, and memory that stays locked can still be read and unmapped.
    """
    _cudart("cudaHostUnregister", address)


def _cudart(call: str, *arguments: int) -> int:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(getattr(runtime, call)(*arguments))


@contextlib.contextmanager
def _page_locked(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Page-lock the memory of large tensors during the block, if they begin on a page of their own.

    CUDA copies other memory through a buffer of its own, at an eighth of the rate.
    """
    locked: list[int] = []
    try:
        with contextlib.suppress(StagingError):  # copies are right without it, too
            for start, stop in _page_runs(tensors):
                page_lock(start, stop - start)
                locked.append(start)
        yield
    finally:
        for start in locked:
            page_unlock(start)


def _page_runs(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return first and last address of runs of pages that contiguous tensors fill together.

    Locking takes a few calls for the tensors of a restore, whose memory comes from common mappings.
    """
    runs: list[list[int]] = []
    page = mmap.PAGESIZE
    for start, nbytes in sorted((one.data_ptr(), one.nbytes) for one in tensors if one.nbytes):
        if nbytes < PAGE_LOCK_NBYTES or start % page:
            continue
        stop = start + -(-nbytes // page) * page
        if runs and runs[-1][1] == start:
            runs[-1][1] = stop
        else:
            runs.append([start, stop])
    return runs


def waited(tensor: Any) -> Any:
    """Return the tensor; wait first if it is the result of an asynchronous collective."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


def _address(path: str, leaf: torch.Tensor) -> int:
    """Return the address of the first element, 0 if there is none; raise if it was freed."""
    if not leaf.numel():
        return 0
    pointer = leaf.data_ptr()
    if not pointer:
        raise UnsupportedLeafError(
            f"{path}: the memory of this tensor was freed (its storage has 0 bytes), as FSDP frees "
            "whole parameters while it does not use them; pass the module, or its state_dict()",
            path=path,
        )
    return pointer


def _dtype_name(path: str, leaf: Any) -> str:
    """Return the name of the dtype; raise if the tensor cannot be stored, and say why."""
    kind = type(leaf)
    if kind in _PLAIN and leaf.layout is torch.strided and not leaf.is_nested:
        name = _NAMES.get(leaf.dtype)
        if name is not None:
            return name
    reason = cast = ""
    is_wrapper = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    # Check for wrappers first: some, like ShardedTensor, raise on any attribute.
    if is_wrapper and not kind.__module__.startswith("torch.nested."):
        reason = f"is a {kind.__module__}.{kind.__qualname__}"
        cast = "wrapper tensors hold no bytes of their own: store the plain tensors inside"
        if kind.__name__ == "ShardedTensor":
            cast = "pass device_mesh= to FullyShardedDataParallel, or save with StorageWriter"
    elif torch.nn.parameter.is_lazy(leaf):
        reason, cast = "is not initialised yet", "run one forward pass of the lazy module first"
    elif leaf.is_nested:
        reason, cast = "is nested", "store x.unbind(), a list of tensors"
    elif leaf.layout is not torch.strided:
        reason, cast = f"has layout {leaf.layout}", "store x.to_dense(), or its indices and values"
    elif leaf.is_quantized:
        reason = f"is quantized ({leaf.dtype})"
        cast = "store x.int_repr() with x.q_scale() and x.q_zero_point(), or x.dequantize()"
    if reason:
        raise UnsupportedLeafError(
            f"{path}: this tensor {reason} and can be neither saved nor restored; {cast}",
            path=path,
            found=reason,
        )
    name = _NAMES.get(leaf.dtype)
    if name is None:
        found = str(leaf.dtype).removeprefix("torch.")
        cast = "store x.view(torch.uint8), which keeps its bits" if found.endswith("_x2") else ""
        raise unsupported_dtype(path, "torch", found, cast or None)
    return name


_HARMLESS = (
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.",
    "torch.distributed.algorithms._checkpoint.",
)
"""Modules whose hooks (`fully_shard`, activation checkpointing) change no keys or values."""


def required_keys(owner: Any) -> Callable[[str], str | None] | None:
    """Return a function that maps a state-dict path to its required key, or to None.

    The current and the saved state must both have a required key. Returns None if user-defined
    hooks or methods take part in loading: they may rename, add, drop and merge keys.
    """
    load = getattr(owner.load_state_dict, "__func__", None)
    if isinstance(owner, torch.optim.Optimizer):
        plain = load is torch.optim.Optimizer.load_state_dict
        return None if not plain or owner._optimizer_load_state_dict_pre_hooks else _parameter_key
    if not isinstance(owner, torch.nn.Module) or load is not torch.nn.Module.load_state_dict:
        return None
    for module in owner.modules():
        kind: Any = type(module)
        hooks = [
            *module._load_state_dict_pre_hooks.values(),
            *module._load_state_dict_post_hooks.values(),
        ]
        if not all(getattr(hook, "__module__", "").startswith(_HARMLESS) for hook in hooks):
            return None
        if not kind._load_from_state_dict.__module__.startswith("torch.nn.modules."):
            return None
    return _module_key


_PARAMETER = re.compile(r"param_groups/\d+/params/\d+")


def _parameter_key(path: str) -> str | None:
    # Every group must have the same number of parameters; its other options may differ.
    return path if _PARAMETER.fullmatch(path) else None


def _module_key(path: str) -> str | None:
    # Batch norm tolerates a missing `num_batches_tracked`; extra state may be empty.
    key = path.partition("/")[0]
    return None if key.endswith(("num_batches_tracked", "_extra_state")) else key


_MOMENT = re.compile(r"(?:.*/)?state/(0|[1-9][0-9]*)/[^/]+")


def state_like_parameters(owner: object) -> Callable[[str, str, ArraySpec], Any] | None:
    """Return a function that makes state tensors that a fresh optimizer does not have yet.

    The function maps a path, the path in the state dict and the saved spec to a new tensor, with
    the sharding or strides of its parameter if it has the parameter's shape, as moments do; else,
    and if any contiguous tensor will do, to None. It raises `ShapeMismatchError` for a moment of
    another shape, which PyTorch takes, so that a fused optimizer writes behind its memory. Returns
    None for an object without `param_groups`, of its own or of an optimizer among its attributes.
    """
    attributes = [*getattr(owner, "__dict__", {}).values()]  # a copy: other threads may set some
    wrapped = [one for one in attributes if isinstance(one, torch.optim.Optimizer)]
    lists = [_parameters(one) for one in (owner, *wrapped)]
    if not any(lists):
        return None
    own = type(owner).__module__.startswith("torch.optim.")
    alike_only = own and type(owner).__name__ not in ("Adafactor", "LBFGS")

    def make(path: str, key: str, spec: ArraySpec) -> Any:
        found, dtype = _MOMENT.fullmatch(key), TORCH_DTYPES.get(spec.dtype)
        if found is None or dtype is None:
            return None
        number = int(found[1])
        tensors = [one[number] for one in lists if number < len(one)]
        tensors = [one for one in tensors if isinstance(one, torch.Tensor)]
        alike = [one for one in tensors if one.shape == spec.shape]
        if alike_only and tensors and not alike and math.prod(spec.shape) > 1:
            have, want = spec.shape, tuple(tensors[0].shape)
            fault = f"{path}: the checkpoint holds shape {have}, its parameter has shape {want}"
            raise ShapeMismatchError(fault, path=path, expected=want, found=have)
        layouts = set(map(_layout, alike))
        # The path does not say which of several optimizers it belongs to.
        if len(layouts) != 1 or None in layouts:
            return None
        return torch.empty_like(alike[0].detach(), dtype=dtype)

    return make


def _parameters(owner: object) -> list[Any]:
    """Return the parameters of an optimizer or another object with `param_groups`."""
    groups = getattr(owner, "param_groups", None)
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        return []
    return [parameter for group in groups for parameter in group.get("params", ())]


def _layout(parameter: Any) -> Hashable | None:
    """Return the sharding of a `DTensor`, else the strides unless they are those of a new tensor.

    Fused optimizers compute element by element in memory: with other strides, a moment would be
    that of another element.
    """
    if hasattr(parameter, "placements"):
        return parameter.device_mesh, tuple(parameter.placements)
    strides: tuple[int, ...] = parameter.stride()
    return None if strides == torch.empty(parameter.shape, device="meta").stride() else strides
