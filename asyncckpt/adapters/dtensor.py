"""`DTensor`: each process reads and restores the boxes in its own local tensor."""

# Rule 1: nothing here communicates: no `full_tensor`, no `redistribute`. PyTorch's functions that
#   compute offsets are not used either: they are wrong for some uneven shards.
# Rule 2: placements are trusted only if the local tensor has the shape they imply.

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from asyncckpt.adapters import placements as arithmetic
from asyncckpt.adapters.arrays import selection
from asyncckpt.adapters.placements import Layout, Mesh, coordinates_of
from asyncckpt.adapters.torch import TorchAdapter, copy_all, copy_into, of_kind, tensor_view, waited
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.planning.tiling import grid_boxes
from asyncckpt.ports import Run, Source, Target
from asyncckpt.spec import Box, Partition, array_spec
from asyncckpt.spec import Shard as HeldBox


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The boxes of a tensor that this process holds.

    Attributes:
        shape: shape of the local tensor; None for a process outside the mesh.
        shards: the boxes, in coordinates of the global tensor.
        local: the same boxes, in coordinates of the local tensor.
        partition: how all processes divide the tensor; None if only this process holds it.
    """

    shape: tuple[int, ...] | None
    shards: tuple[HeldBox, ...]
    local: tuple[Box, ...]
    partition: Partition | None


@dataclass(slots=True, eq=False, kw_only=True)
class DTensorTarget(Target):
    """A `Target` with the state that `place` needs in a worker thread.

    Attributes:
        division: the boxes that the process holds.
        shape: shape of its local tensor.
        device: device of a new local tensor.
        memory: the local tensor to fill; None for a new one.
    """

    division: Division
    shape: tuple[int, ...]
    device: torch.device
    memory: torch.Tensor | None


class DTensorAdapter:
    """`torch.distributed.tensor.DTensor`, including the parameters of `fully_shard`.

    Supports any combination of `Shard`, `Replicate` and the private `_StridedShard`, with uneven
    and empty shards. A process outside the mesh has no shards and reads nothing.
    """

    def __init__(self) -> None:
        self._local = TorchAdapter()

    def owns(self, kind: type) -> bool:
        return issubclass(kind, DTensor)

    def source(self, path: str, leaf: Any) -> Source:
        division, tensor = _open(path, leaf)
        local = self._local.source(path, tensor)
        spec, view = array_spec(tuple(leaf.shape), local.spec.dtype), local.view
        source = Source(
            spec, leaf, view, _identity(leaf, tensor), "torch", captured=(division, local)
        )
        if division.partition is not None:
            source.partition, source.shards, source.view = division.partition, division.shards, None
            source.views = tuple(
                [None if view is None else view[selection(box)] for box in division.local]
            )
        if local.begin_runs and all(box.shape == local.spec.shape for box in division.local):
            source.begin_runs = self.begin_runs
        return source

    def begin_runs(self, runs: Sequence[Run]) -> Callable[[], None]:
        return self._local.begin_runs([run._replace(source=run.source.captured[1]) for run in runs])

    def fetch(self, source: Source, shard: int, box: Box, out: npt.NDArray[Any]) -> None:
        division, local = source.captured
        offset = tuple(map(operator.add, division.local[shard].offset, box.offset))
        self._local.fetch(local, 0, Box(offset, box.shape), out)

    def target(self, path: str, leaf: Any, *, in_place: bool) -> Target:
        division, tensor = _open(path, leaf)
        local = self._local.target(path, tensor, in_place=in_place)
        target = DTensorTarget(
            array_spec(tuple(leaf.shape), local.spec.dtype),
            leaf,
            boxes=tuple([shard.box for shard in division.shards]),
            path=path,
            fill=local.fill or not division.shards,
            captured=local.captured,
            division=division,
            shape=tuple(tensor.shape),
            device=_device(leaf.device_mesh) if tensor.is_meta else tensor.device,
            memory=tensor if in_place else None,
        )
        if in_place:
            if local.identity is not None:
                target.identity = ("dtensor", target.boxes, local.identity)
            if local.buffers:
                (memory,) = local.buffers
                target.buffers = tuple([memory[selection(box)] for box in division.local])
            if local.place_all is not None and len(division.local) == 1:
                target.place_all = self.place_all
        return target

    def place_all(
        self, targets: Sequence[DTensorTarget], values: Sequence[npt.NDArray[Any]]
    ) -> Sequence[Any]:
        copies = []
        for target, array in zip(targets, values, strict=True):
            (box,) = target.division.local
            assert target.memory is not None
            part = target.memory.detach()[selection(box)]
            copies.append((part, tensor_view(array), target.captured))
        copy_all(copies)
        for target in targets:
            torch.autograd.graph.increment_version(target.leaf)
        return [target.leaf for target in targets]

    def place(self, target: Target, parts: Sequence[npt.NDArray[Any]]) -> Any:
        assert isinstance(target, DTensorTarget)
        like: DTensor = target.leaf
        if target.memory is None:
            return _made(target, parts)
        if target.fill:
            _fill(target.memory, target.division, parts, target.captured)
        else:
            torch.autograd.graph.increment_version(target.memory)
        torch.autograd.graph.increment_version(like)
        return like


def layout_of(placements: Sequence[Placement], mesh_shape: Sequence[int], rank: int) -> Layout:
    """Return the cuts of each axis of a tensor of this rank."""
    factors: list[dict[int, int]] = [{} for _ in range(rank)]
    for mesh_axis, placement in enumerate(placements):
        if not placement.is_replicate():
            found: Any = placement
            factors[found.dim][mesh_axis] = int(getattr(placement, "split_factor", 1))
    return tuple(arithmetic.strided_cuts(axis, mesh_shape) for axis in factors)


def _open(path: str, leaf: DTensor) -> tuple[Division, torch.Tensor]:
    """Return a tensor's division and its local tensor; raise if it cannot be stored."""
    fault = _fault(leaf.device_mesh, tuple(map(type, leaf.placements)))
    if fault is not None:
        text = _text(leaf.placements)
        raise UnsupportedLeafError(f"{path}: this DTensor ({text}) {fault}", path=path, found=text)
    mesh = leaf.device_mesh
    division = _divide(mesh, _coordinate(mesh), tuple(leaf.placements), tuple(leaf.shape))
    with torch.no_grad():
        tensor: Any = leaf.to_local()
    tensor = waited(tensor)
    _check_local(path, leaf, tensor, division)
    return division, tensor


def _check_local(path: str, leaf: DTensor, tensor: torch.Tensor, division: Division) -> None:
    """Raise if the local tensor does not have the shape that the placements imply."""
    found, expected = tuple(tensor.shape), division.shape
    # `fully_shard` turns an empty (1, 0) into (0, 0), so empty tensors may have any empty shape.
    empty = expected is not None and 0 == tensor.numel() == math.prod(expected)
    if expected not in (None, found) and not empty:
        mesh = leaf.device_mesh
        raise UnsupportedLeafError(
            f"{path}: the local tensor of this DTensor has shape {found}; its placements, "
            f"{_text(leaf.placements)} on a mesh of shape {tuple(mesh.shape)}, give coordinate "
            f"{_coordinate(mesh)} the shape {expected} of a tensor of shape "
            f"{tuple(leaf.shape)}; make a DTensor whose placements describe its shards, for "
            "example with distribute_tensor and Shard alone",
            path=path,
            expected=expected,
            found=found,
        )


@lru_cache(maxsize=1024)
def _fault(mesh: DeviceMesh, kinds: tuple[type[Placement], ...]) -> str | None:
    """Return why tensors with placements of these types cannot be stored, None if they can."""
    for axis, kind in enumerate(kinds):
        if issubclass(kind, Partial):
            return (
                "is a partial sum on each process; reduce it first, for example with "
                "x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)"
            )
        if kind not in (Shard, Replicate) and kind.__name__ != "_StridedShard":
            return (
                f"has a placement of type {kind.__module__}.{kind.__qualname__}, which cannot be "
                "stored; redistribute it to Shard and Replicate"
            )
        ranks = _ranks(mesh).processes
        if kind is not Replicate and np.any(np.diff(ranks, axis=axis) < 0):
            return (
                f"is divided over a mesh with the ranks {ranks.tolist()}, not ascending along axis "
                f"{axis}: PyTorch takes its parts by rank in some places and by coordinate in "
                "others; make the mesh with ascending ranks"
            )
    return None


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Return the coordinate of this process in the mesh, None if it is outside.

    PyTorch caches meshes with the coordinate at their creation, which is stale once
    torch.distributed has been initialised again with other ranks.
    """
    if not dist.is_initialized():
        found = mesh.get_coordinate()
        return None if found is None else tuple(found)
    places = coordinates_of(_ranks(mesh), dist.get_rank())
    return places[0] if places else None


@lru_cache(maxsize=4096)
def _divide(
    mesh: DeviceMesh,
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> Division:
    ranks = _ranks(mesh)
    layout = layout_of(placements, ranks.shape, len(shape))
    if coordinate is None:
        return Division(None, (), (), arithmetic.partition(ranks, layout, shape))
    holding = arithmetic.hold(ranks, layout, shape, [coordinate])
    runs = [
        arithmetic.without_gaps(held)
        for held in arithmetic.runs_of(ranks.shape, layout, shape, coordinate)
    ]
    return Division(
        shape=tuple(held[-1][1] if held else 0 for held in runs),
        shards=holding.shards,
        local=tuple(grid_boxes(runs)),
        partition=None if len(ranks.members) == 1 else holding.partition,
    )


@lru_cache(maxsize=64)
def _ranks(mesh: DeviceMesh) -> Mesh:
    return Mesh(mesh.mesh.cpu().numpy())


def _device(mesh: DeviceMesh) -> torch.device:
    """Return the device of local tensors of the mesh in the caller's thread."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def _identity(leaf: DTensor, tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that is equal for tensors of the same layout and memory.

    It contains the storage instead of the address, which empty local tensors lack: all processes
    must agree on which leaves are tied.
    """
    layout = (leaf.device_mesh, tuple(leaf.placements), tuple(leaf.shape))
    place = (id(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride(), tensor.dtype)
    return ("dtensor", layout, place, tensor.is_conj(), tensor.is_neg())


def _made(target: DTensorTarget, parts: Sequence[npt.NDArray[Any]]) -> Any:
    """Return a new tensor with these values of its boxes; adopt the memory of a single box."""
    like: DTensor = target.leaf
    if len(parts) == 1:
        local = tensor_view(parts[0])
    else:
        local = torch.empty(target.shape, dtype=like.dtype)
        _fill(local, target.division, parts)
    local = local.to(target.device)
    mesh = like.device_mesh
    made: Any
    if local.device.type == mesh.device_type:
        shape = like.shape
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            local, mesh, like.placements, run_check=False, shape=shape, stride=stride
        )
    else:  # `from_local` would move it to a device of the mesh
        with torch.no_grad():
            made = torch.empty_like(like)
            made.to_local().copy_(local)
    return of_kind(made, like)


def _fill(
    tensor: torch.Tensor,
    division: Division,
    parts: Sequence[npt.NDArray[Any]],
    event: torch.cuda.Event | None = None,
) -> None:
    for box, values in zip(division.local, parts, strict=True):
        copy_into(tensor.detach()[selection(box)], tensor_view(values), event)


def _text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(repr, placements))}]"
