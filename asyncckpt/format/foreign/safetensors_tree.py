"""Tree of a checkpoint, stored in the metadata of a safetensors file.

A safetensors file has tensors and strings by name. The rest of a checkpoint is one JSON object
under the metadata key ``asyncckpt``; text beyond `PART_CHARS` characters continues under
``asyncckpt.1``, ``asyncckpt.2``, …:

``version``    1
``nodes``      the containers, as in a commit record: ``kind``, ``type``, ``keys``, ``children``
``leaves``     in tree order; an array is the name of its tensor, or an object with ``tensor``,
               ``kind`` (framework) and ``extra`` where these are not ``numpy`` and empty; a scalar
               is an object with ``kind`` and ``value``, as in a commit record
``metadata``   the user's metadata
``metrics``    the user's metrics, each as a scalar of kind ``float``

If the tree does not name exactly the tensors of the file, another program has changed the file, and
readers ignore the tree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from asyncckpt.errors import UsageError
from asyncckpt.format.damage import corrupt, unsupported
from asyncckpt.format.fields import check_form, excess, parse_object
from asyncckpt.format.foreign.safetensors import MAX_HEADER_NBYTES
from asyncckpt.format.record_values import LeafTable
from asyncckpt.format.scalars import SCALAR_KINDS, JsonValue, decode_scalar, encode_scalar
from asyncckpt.tree import Structure

TREE_KEY = "asyncckpt"
PART_CHARS = 1 << 20

DEFAULT_KIND = "numpy"

MAX_USER_NBYTES = 1 << 20
"""Largest user metadata: readers limit the values in untrusted files."""

SPARE_LEAVES = 100_000
"""Leaves and containers that a tree may each have in addition to two per tensor of the file."""

_VERSION = 1
_WHAT = "the tree in the safetensors metadata"
_MEMBERS = {"version": int, "nodes": list, "leaves": list, "metadata": dict, "metrics": dict}


@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """Tree that the metadata of a safetensors file describes.

    Attributes:
        leaves: kinds, scalar values and extra facts, without pieces.
        tensors: per leaf the name of its tensor, None for scalars; tied leaves share one.
    """

    structure: Structure
    leaves: LeafTable
    tensors: Sequence[str | None]
    metadata: Mapping[str, JsonValue]
    metrics: Mapping[str, float]


def encode_tree(tree: SavedTree) -> dict[str, str]:
    """Encode a tree as metadata entries.

    Raises:
        UsageError: the tree, a scalar or the user's metadata is too large, or has too many values.
    """
    leaves: list[JsonValue] = []
    nodes = tree.structure.to_json()["nodes"]
    most = 2 * len({*tree.tensors} - {None}) + SPARE_LEAVES
    if (count := max(len(nodes), len(tree.tensors))) > most:
        raise UsageError(
            f"the tree has {count} leaves or containers, and the metadata of a safetensors file "
            f"with its tensors takes at most {most}; store long lists of numbers as one array",
            expected=most,
            found=count,
        )
    for leaf, (kind, name) in enumerate(zip(tree.leaves.kind, tree.tensors, strict=True)):
        extra = tree.leaves.extra.get(leaf, {})
        if name is None:
            value = tree.leaves.value[leaf]
            if isinstance(value, str) and len(value) > MAX_USER_NBYTES // 8:
                path = tree.structure.paths()[leaf]
                raise UsageError(
                    f"{path}: a {kind} of {len(value)} characters is too large for the metadata of "
                    "a safetensors file; store it as an array",
                    path=path,
                )
            leaves.append({"kind": kind, "value": value})
        elif kind == DEFAULT_KIND and not extra:
            leaves.append(name)
        else:
            leaves.append({"tensor": name, "kind": kind, "extra": dict(extra)})
    metadata = json.dumps(dict(tree.metadata))
    if len(metadata) > MAX_USER_NBYTES:
        raise UsageError(
            f"the metadata takes {len(metadata)} bytes, a safetensors file takes at most "
            f"{MAX_USER_NBYTES}; store it elsewhere",
            expected=MAX_USER_NBYTES,
            found=len(metadata),
        )
    document = {
        "version": _VERSION,
        "nodes": nodes,
        "leaves": leaves,
        "metadata": dict(tree.metadata),
        "metrics": {name: encode_scalar(value)[1] for name, value in tree.metrics.items()},
    }
    text = json.dumps(document, separators=(",", ":"))
    if reason := excess(text.encode(), MAX_HEADER_NBYTES):
        raise UsageError(
            f"readers would refuse {_WHAT}: {reason}; store long lists and texts as arrays",
            found=reason,
        )
    return {
        TREE_KEY if number == 0 else f"{TREE_KEY}.{number}": text[start : start + PART_CHARS]
        for number, start in enumerate(range(0, len(text), PART_CHARS))
    }


def decode_tree(
    metadata: Mapping[str, str], tensor_count: int, *, file: str
) -> tuple[SavedTree | None, dict[str, str]]:
    """Return the tree in a file's metadata, or None, and the other entries."""
    others = dict(metadata)
    parts = []
    key = TREE_KEY
    while key in others:
        parts.append(others.pop(key))
        key = f"{TREE_KEY}.{len(parts)}"
    if not parts:
        return None, others
    text = "".join(parts).encode()
    document = parse_object(text, _WHAT, file=file, most_nbytes=MAX_HEADER_NBYTES)
    if type(document.get("version")) is int and document["version"] > _VERSION:
        raise unsupported(
            f"the tree in the metadata has version {document['version']}, this release reads "
            f"{_VERSION}; use a newer release",
            file=file,
            expected=_VERSION,
            found=document["version"],
        )
    document = {"metadata": {}, "metrics": {}, **document}
    try:
        return _decode(document, 2 * tensor_count + SPARE_LEAVES), others
    except ValueError as error:
        raise corrupt(_WHAT, str(error), file=file) from None


def _decode(document: dict[str, Any], most: int) -> SavedTree:
    """Return the tree, of at most `most` containers and `most` leaves.

    Raises:
        ValueError: a member is wrong; names it and says why.
    """
    check_form(document, _MEMBERS)
    if document["version"] != _VERSION:
        raise ValueError(f"version is not {_VERSION}")
    nodes, rows = document["nodes"], document["leaves"]
    if len(nodes) > most or len(rows) > most:
        raise ValueError(f"leaves or nodes has more than {most} items")
    structure = Structure.from_json({"leaves": len(rows), "nodes": nodes})
    extras: dict[int, Mapping[str, JsonValue]] = {}
    leaves = LeafTable([], [], extras)
    tensors: list[str | None] = []
    for row, value in enumerate(rows):
        leaf = {"tensor": value} if isinstance(value, str) else value
        if not isinstance(leaf, dict) or leaf.keys() - {"tensor", "kind", "value", "extra"}:
            raise ValueError(f"leaf {row} is neither a string nor an object of a leaf's members")
        kind, extra = leaf.get("kind", DEFAULT_KIND), leaf.get("extra", {})
        if not isinstance(kind, str) or not isinstance(extra, dict):
            raise ValueError(
                f"leaf {row} has a kind that is not a string, or extra that is not an object"
            )
        if "tensor" not in leaf:
            decode_scalar(kind, leaf.get("value"))
        elif (
            "value" in leaf
            or not isinstance(leaf["tensor"], str)
            or not kind.isidentifier()
            or kind in SCALAR_KINDS
        ):
            raise ValueError(f"leaf {row} is neither an array nor a scalar")
        elif extra:
            extras[row] = extra
        leaves.kind.append(kind)
        leaves.value.append(leaf.get("value"))
        tensors.append(leaf.get("tensor"))
    decoded = {name: decode_scalar("float", bits) for name, bits in document["metrics"].items()}
    metrics = cast(Mapping[str, float], decoded)
    return SavedTree(structure, leaves, tensors, document["metadata"], metrics)
