"""Contents of a checkpoint for DCP's planners: sharded tensors and values by key."""

# Rule: a checkpoint that was not written through DCP gets the keys that DefaultSavePlanner would
#   give its tree, so that DCP can load the same state dicts from it.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncckpt.adapters.torch import TORCH_DTYPES, TorchAdapter
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format.scalars import decode_scalar
from asyncckpt.spec import ArraySpec, Box
from asyncckpt.torch.dcp_metadata import Layout, damaged, decode_layout
from asyncckpt.tree import Structure, escape, flatten, unflatten

DCP_VERSION = "1.0.0"
"""Version in the `Metadata` for planners; absent in early releases of PyTorch."""


class Stored:
    """Placeholder for an array of the checkpoint, which may hold Python's `bytes`."""

    # Not a dataclass: in a tree, that would be a container.
    __slots__ = ("is_bytes", "path", "spec")

    def __init__(self, path: str, spec: ArraySpec, *, is_bytes: bool) -> None:
        self.path = path
        self.spec = spec
        self.is_bytes = is_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor, and its saved boxes by offset."""

    stored: Stored
    shards: Mapping[tuple[int, ...], Box]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value other than a tensor.

    Attributes:
        structure: its containers.
        leaves: Python scalars, and `Stored` for arrays: long `bytes`, and tensors in tuples.
        opaque: the value is the bytes of a pickle.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    opaque: bool = False

    def stored(self) -> Iterator[Stored]:
        """Return the arrays to read."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Stored))

    def filled(self, read: Mapping[str, Any]) -> Any:
        """Return the value; `read` contains the `bytes` and tensors of `stored()` by path."""
        leaves = [read[leaf.path] if isinstance(leaf, Stored) else leaf for leaf in self.leaves]
        return unflatten(self.structure, leaves)


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """Contents of a checkpoint by DCP's keys.

    Attributes:
        location: path or URL of the checkpoint.
        entries: tensors and values by key.
        paths: path of every key in the nested state dict; None if nothing was flattened.
    """

    location: str
    save_id: str
    entries: Mapping[str, Tensor | Value]
    paths: Mapping[str, tuple[str | int, ...]] | None

    def metadata(self) -> Metadata:
        """Return the metadata for DCP."""
        described = {
            key: _described(entry) if isinstance(entry, Tensor) else BytesStorageMetadata()
            for key, entry in self.entries.items()
        }
        paths = None if self.paths is None else dict(self.paths)
        metadata = Metadata(described, planner_data=paths)
        metadata.version = DCP_VERSION
        return metadata


def catalog_of(opened: OpenCheckpoint) -> Catalog:
    """Return the contents of an asyncckpt checkpoint.

    Raises:
        UnsupportedFormatError: another library wrote it, or DCP has no keys for its tree; says how
            to read it.
        CorruptCheckpointError: its metadata is damaged.
        DtypeMismatchError: PyTorch has no such dtype.
    """
    if opened.record is None:
        advice = "convert it first with asyncckpt.convert"
        if opened.format == "dcp":
            advice = f"read it with FileSystemReader or FsspecReader, or {advice}"
        raise UnsupportedFormatError(
            f"{opened.location}: this checkpoint has the format {opened.format!r}; StorageReader "
            f"reads only asyncckpt checkpoints: {advice}",
            location=opened.location,
            expected="asyncckpt",
            found=opened.format,
        )
    layout = decode_layout(opened.metadata, opened.location)
    leaves = _leaves(opened)
    if layout is not None:
        entries = _entries_of_dcp(opened, layout, leaves)
        known = layout.paths
        paths = None if known is None else {key: known.get(key, (key,)) for key in entries}
        return Catalog(opened.location, opened.save_id, entries, paths)
    tree = unflatten(opened.structure(), [_stand_in(leaf) for leaf in leaves])
    if not isinstance(tree, dict):
        raise UnsupportedFormatError(
            f"{opened.location}: this checkpoint holds a {type(tree).__name__}, but DCP can load "
            "only a dict; restore it with asyncckpt.restore",
            location=opened.location,
            expected="a dict",
            found=type(tree).__name__,
        )
    try:
        keys, paths = flatten_state_dict(tree)
    except ValueError as error:  # two paths give the same key
        raise UnsupportedFormatError(
            f"{opened.location}: DCP cannot load this tree ({error}); restore it with "
            "asyncckpt.restore",
            location=opened.location,
            expected="paths with different keys",
            found=str(error),
        ) from None
    found = {key: _entry(value) for key, value in keys.items()}
    return Catalog(opened.location, opened.save_id, found, paths)


def _leaves(opened: OpenCheckpoint) -> list[Any]:
    """Return a Python scalar or `Stored` for every leaf."""
    adapter = TorchAdapter()
    leaves: list[Any] = []
    table = opened.leaves
    paths = opened.structure().paths()
    for leaf, (path, pieces) in enumerate(zip(paths, opened.leaf_pieces(), strict=True)):
        if not pieces:
            leaves.append(decode_scalar(table.kind[leaf], table.value[leaf]))
            continue
        spec = opened.leaf_spec(pieces)
        if fault := adapter.refuses(path, spec.dtype):
            raise fault
        is_bytes = table.extra.get(leaf, {}).get("python") == "bytes"
        leaves.append(Stored(path, spec, is_bytes=is_bytes))
    return leaves


def _entries_of_dcp(
    opened: OpenCheckpoint, layout: Layout, leaves: list[Any]
) -> dict[str, Tensor | Value]:
    """Return the entries of a checkpoint written through DCP, whose tree is a flat dict."""
    structure = opened.structure()
    if not structure.nodes or structure.nodes[0].kind != "dict":
        raise damaged(opened.location, "the tree is not a dict")
    keys = [str(key) for key in structure.nodes[0].keys]
    if len(set(keys)) != len(keys):
        raise damaged(opened.location, "two keys of the tree have the same text")
    parts = structure.subtrees([escape(key) for key in keys])
    entries: dict[str, Tensor | Value] = {}
    for key, (inner, numbers) in zip(keys, parts.values(), strict=True):
        own = tuple(leaves[numbers.start : numbers.stop])
        if not inner.nodes and isinstance(own[0], Stored) and not own[0].is_bytes:
            boxes = layout.shards(key, own[0].spec.shape)
            entries[key] = Tensor(own[0], {box.offset: box for box in boxes})
        else:
            entries[key] = Value(inner, own, key in layout.opaque)
    return entries


class _Tensor(torch.Tensor):
    """Placeholder for a stored tensor while DCP flattens a tree."""

    stored: Stored


def _stand_in(leaf: Any) -> Any:
    if not isinstance(leaf, Stored) or leaf.is_bytes:
        return leaf
    tensor = torch.empty(0, device="meta").as_subclass(_Tensor)
    tensor.stored = leaf
    return tensor


def _entry(value: Any) -> Tensor | Value:
    if isinstance(value, _Tensor):
        whole = Box.whole(value.stored.spec.shape)
        return Tensor(value.stored, {whole.offset: whole})
    flat = flatten(value)  # DCP does not look into tuples, so they may hold tensors
    leaves = [leaf.stored if isinstance(leaf, _Tensor) else leaf for leaf in flat.leaves]
    return Value(flat.structure, tuple(leaves))


def _described(tensor: Tensor) -> TensorStorageMetadata:
    spec = tensor.stored.spec
    return TensorStorageMetadata(
        TensorProperties(dtype=TORCH_DTYPES[spec.dtype]),
        torch.Size(spec.shape),
        [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            for box in tensor.shards.values()
        ],
    )
