"""Items of DCP's save plans as leaves of a tree."""

# Rule: values are decoded by the allow-list unpickler of `format.foreign.torch`, which executes no
#   code from a planner. (test_a_value_that_would_execute_something_is_refused)

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.adapters.tensor_boxes import TensorBoxes
from asyncckpt.errors import (
    CorruptCheckpointError,
    ShapeMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
)
from asyncckpt.format.foreign.torch.plain_values import load_value
from asyncckpt.format.foreign.torch.torch_zip import Archive
from asyncckpt.format.foreign.torch.unpickle import Allowance
from asyncckpt.spec import Box
from asyncckpt.torch.dcp_metadata import box_of

OWN_NBYTES = 1 << 62
"""Memory allowance for a value; practically unlimited, because it is in memory already."""


def resolve(
    plan: SavePlan, planner: SavePlanner, *, opaque: bool
) -> tuple[dict[str, Any], list[WriteResult]]:
    """Return this rank's part of the tree by key, and the results for the coordinator.

    Resolves every item once, in the calling thread.

    Args:
        plan: the final plan of this rank.
        planner: provides the values.
        opaque: store values that are not plain as the bytes of their pickle.

    Raises:
        UnsupportedLeafError: a value cannot be stored; names the key.
        ShapeMismatchError: a tensor does not have the planned shape.
    """
    tree: dict[str, Any] = {}
    shards: defaultdict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    results: list[WriteResult] = []
    for item in plan.items:
        key, data = item.index.fqn, planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            tree[key], is_opaque, nbytes = _value(key, data, opaque=opaque)
            results.append(WriteResult(item.index, nbytes, is_opaque))
            continue
        box, tensor = _shard(item, data)
        nbytes = tensor.numel() * tensor.element_size()  # sparse tensors have no `nbytes`
        results.append(WriteResult(item.index, nbytes, False))
        assert item.tensor_data is not None
        shape = tuple(item.tensor_data.size)
        if box.size or 0 in shape:
            tree[key] = None  # keeps the order of the keys
            shards[key].append((box, tensor))
            shapes[key] = shape
    for key, held in shards.items():
        boxes, tensors = zip(*held, strict=True)
        if 0 in shapes[key]:
            boxes, tensors = (Box.whole(shapes[key]),), (tensors[0].new_empty(shapes[key]),)
        tree[key] = TensorBoxes(shapes[key], boxes, tensors)
    return tree, results


def _value(key: str, data: object, *, opaque: bool) -> tuple[Any, bool, int]:
    """Return a value, whether it is the bytes of a pickle, and its size in bytes.

    Mappings of any class become dicts.
    """
    if not isinstance(data, io.BytesIO):
        raise UnsupportedLeafError(
            f"{key}: the planner resolved this item to a {type(data).__name__}; resolve_data must "
            "return an io.BytesIO for an item of type BYTE_IO",
            path=key,
            expected="io.BytesIO",
            found=type(data).__name__,
        )
    saved = data.getvalue()
    try:
        archive = Archive(saved, len(saved), "its archive", f"the value of {key!r:.200}", 0)
        return load_value(archive.pickle(), Allowance(OWN_NBYTES)), False, len(saved)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        if opaque:
            return saved, True, len(saved)
        found = error.found if isinstance(error, UnsupportedFormatError) else "other bytes"
        raise UnsupportedLeafError(
            f"{key}: this value holds {found}, which cannot be stored: None, bool, int, float, "
            "complex, str, bytes, and tuples, lists and dicts of these can. Convert it, leave it "
            'out, or pass StorageWriter(..., opaque="allow") to store the bytes of its pickle, '
            "which only DCP's planners can read",
            path=key,
            expected="a plain value",
            found=found,
        ) from None


def _shard(item: WriteItem, data: object) -> tuple[Box, torch.Tensor]:
    """Return a shard and its box."""
    key = item.index.fqn
    if not isinstance(data, torch.Tensor) or item.tensor_data is None:
        raise UnsupportedLeafError(
            f"{key}: the planner resolved this item to a {type(data).__name__}; resolve_data must "
            f"return a tensor for an item of type {item.type.name}",
            path=key,
            expected="torch.Tensor",
            found=type(data).__name__,
        )
    box = box_of(item.tensor_data.chunk)
    if tuple(data.shape) != box.shape:
        raise ShapeMismatchError(
            f"{key}: the planner resolved the shard at {list(box.offset)} to a tensor of shape "
            f"{list(data.shape)}, its item says {list(box.shape)}; resolve_data must return only "
            "the values of the item",
            path=key,
            expected=box.shape,
            found=tuple(data.shape),
        )
    return box, data.detach()
