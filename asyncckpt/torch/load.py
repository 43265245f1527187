"""Items of a load plan as targets of a restore."""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from asyncckpt.adapters.arrays import Place, overlapping
from asyncckpt.adapters.tensor_boxes import BoxesAdapter, TensorBoxes
from asyncckpt.adapters.torch import TORCH_DTYPES, TorchAdapter
from asyncckpt.errors import AsyncCheckpointError, ShapeMismatchError, TreeMismatchError
from asyncckpt.planning.tiling import box_text
from asyncckpt.restore.request import Holder, Wanted
from asyncckpt.spec import Box
from asyncckpt.torch.catalog import Catalog, Stored, Value


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of a saved tensor, and the destination of its values."""

    stored: Stored
    box: Box
    tensor: torch.Tensor


Items = Sequence[tuple[ReadItem, Value | Part]]
"""The items of a plan, each with the value or the part of a tensor that it asks for."""


def resolve(plan: LoadPlan, planner: LoadPlanner, catalog: Catalog) -> Items:
    """Find the items of a plan in the checkpoint, then resolve each tensor once.

    Raises:
        TreeMismatchError: an item is not in the checkpoint; no tensor was resolved.
        ShapeMismatchError: a tensor does not have the shape of its item.
    """
    found = [_found(item, catalog) for item in plan.items]
    return [
        (item, one if isinstance(one, Value) else _resolved(item, *one, planner))
        for item, one in zip(plan.items, found, strict=True)
    ]


def targets(items: Items) -> tuple[list[Wanted], list[tuple[Part, Part]]]:
    """Return the targets of the restore, and pairs of parts to copy from and to after it.

    Targets that share memory with an earlier one, as tied weights do, are read into temporary
    tensors, then copied.
    """
    groups: defaultdict[tuple[str, torch.dtype], list[Part]] = defaultdict(list)
    wanted: list[Wanted] = []
    for item, one in items:
        if isinstance(one, Part):
            groups[item.storage_index.fqn, one.tensor.dtype].append(one)
        else:
            wanted += map(_wanted_in_value, one.stored())
    held = list(groups.values())
    copies: list[tuple[Part, Part]] = []
    for number in sharing([[one.tensor for one in group] for group in held]):
        copy = [
            dataclasses.replace(one, tensor=torch.empty_like(one.tensor, device="cpu"))
            for one in held[number]
        ]
        copies += zip(copy, held[number], strict=True)
        held[number] = copy
    return [*wanted, *map(_wanted, held)], copies


def commit(items: Items, planner: LoadPlanner, read: Mapping[str, Any]) -> None:
    """Pass all items to the planner; `read` contains the arrays of values by path."""
    for item, one in items:
        if isinstance(one, Part):
            planner.commit_tensor(item, one.tensor)
        else:
            value = one.filled(read)
            data = io.BytesIO(value if one.opaque else b"")
            if not one.opaque:  # planners expect an archive
                torch.save(value, data)
                data.seek(0)
            planner.load_bytes(item, data)


def _found(item: ReadItem, catalog: Catalog) -> Value | tuple[Stored, Box]:
    """Return the value, or the tensor and its wanted box."""
    index = item.storage_index
    entry = catalog.entries.get(index.fqn)
    if entry is None:
        raise _missing(item, catalog, "no such key", None)
    if isinstance(entry, Value):
        if item.type is not LoadItemType.BYTE_IO:
            raise _missing(item, catalog, "a value that is not a tensor", "value")
        return entry
    if item.type is LoadItemType.BYTE_IO:
        raise _missing(item, catalog, f"a tensor, {entry.stored.spec}", "tensor")
    offset = (0,) * len(entry.stored.spec.shape) if index.offset is None else tuple(index.offset)
    shard = entry.shards.get(offset)
    if shard is None:
        raise _missing(item, catalog, f"no shard at {list(offset)}", None)
    inner, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if not len(inner) == len(lengths) == len(offset):
        raise _missing(item, catalog, f"a tensor of rank {len(offset)}", len(offset))
    start = tuple([o + i for o, i in zip(offset, inner, strict=True)])
    box = Box(start, lengths)
    if box.size and box.intersect(shard) != box:
        raise _missing(item, catalog, f"a shard that holds {box_text(shard)}", shard)
    return entry.stored, box


def _missing(item: ReadItem, catalog: Catalog, there: str, found: object) -> AsyncCheckpointError:
    index = item.storage_index
    wanted = f"{item.type.name} item"
    if index.offset is not None:
        where = list(index.offset)
        wanted += f" at {list(item.storage_offsets)} of shard {where}, {list(item.lengths)} long"
    return TreeMismatchError(
        f"{index.fqn}: the planner asks for a {wanted}; {catalog.location} has {there}; nothing "
        "was read. Plan from the metadata that this reader returns",
        path=index.fqn,
        location=catalog.location,
        expected=wanted,
        found=found,
    )


def _resolved(item: ReadItem, stored: Stored, box: Box, planner: LoadPlanner) -> Part:
    tensor = planner.resolve_tensor(item).detach()
    if tuple(tensor.shape) != box.shape:
        key = item.dest_index.fqn
        raise ShapeMismatchError(
            f"{key}: the planner resolved an item of shape {list(box.shape)} to a tensor of "
            f"shape {list(tensor.shape)}; nothing was read",
            path=key,
            expected=box.shape,
            found=tuple(tensor.shape),
        )
    return Part(stored, box, tensor)


def _wanted(group: Sequence[Part]) -> Wanted:
    """Return one target for all parts of a key."""
    stored, adapter = group[0].stored, BoxesAdapter()
    boxes = tuple([one.box for one in group])
    leaf = TensorBoxes(stored.spec.shape, boxes, tuple([one.tensor for one in group]))
    return Wanted(stored.path, leaf, adapter, adapter.target(stored.path, leaf, in_place=True))


def _wanted_in_value(stored: Stored) -> Wanted:
    """Return the target for an array of a value: new `bytes`, or a new tensor on CPU."""
    holder = Holder({}, stored.path, False)
    if stored.is_bytes:
        return Wanted(stored.path, b"", holder=holder)
    like = torch.empty(stored.spec.shape, dtype=TORCH_DTYPES[stored.spec.dtype], device="meta")
    adapter = TorchAdapter()
    return Wanted(
        stored.path, like, adapter, adapter.target(stored.path, like, in_place=False), holder
    )


def sharing(groups: Sequence[Sequence[torch.Tensor]]) -> list[int]:
    """Return the indices of the groups that share memory with an earlier one.

    Interleaved tensors count as sharing memory, except different columns of one matrix.
    """
    places = [[(str(one.device), _place(one)) for one in group] for group in groups]
    same: dict[Hashable, int] = {}
    firsts = [same.setdefault(tuple(place), number) for number, place in enumerate(places)]
    on_device: defaultdict[str, list[tuple[Place, int]]] = defaultdict(list)
    for number in same.values():
        for device, place in places[number]:
            on_device[device].append((place, number))
    near: defaultdict[int, set[int]] = defaultdict(set)
    for held in on_device.values():
        for one, other in overlapping([place for place, _ in held]):
            near[held[one][1]].add(held[other][1])
            near[held[other][1]].add(held[one][1])
    own: set[int] = set()
    for number, first in enumerate(firsts):
        if number == first and own.isdisjoint(near[number]):
            own.add(number)
    return [number for number in range(len(groups)) if number not in own]


def _place(tensor: torch.Tensor) -> Place:
    strides = tuple([step * tensor.itemsize for step in tensor.stride()])
    return Place(tensor.data_ptr(), tuple(tensor.shape), strides, tensor.itemsize)
