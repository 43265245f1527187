"""The tree of a checkpoint beside the tensors of a safetensors file.

safetensors knows tensors by name and strings by name. What else a checkpoint holds is one JSON
object under the metadata key ``asyncckpt``; a text of more than `PART_CHARS` characters goes on
under ``asyncckpt.1``, ``asyncckpt.2``, …:

``version``    1
``nodes``      the containers, as in a commit record: ``kind``, ``type``, ``keys``, ``children``
``leaves``     in tree order; an array is the name of its tensor, or an object with ``tensor``,
               ``kind`` (framework) and ``extra`` where these are not ``numpy`` and empty; a scalar
               is an object with ``kind`` and ``value``, as in a commit record
``metadata``   the user's metadata
``metrics``    the user's metrics, each as a scalar of kind ``float``

Files whose tensors are not those that the tree names were changed by somebody else; then the
tensors count, and this does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.format.fields import depth_fault
from asyncckpt.format.json_reader import JsonReader
from asyncckpt.format.record import LeafTable
from asyncckpt.format.scalars import SCALAR_KINDS, JsonValue, decode_scalar, encode_scalar
from asyncckpt.tree import Structure

TREE_KEY = "asyncckpt"
PART_CHARS = 1 << 20

DEFAULT_KIND = "numpy"

MAX_USER_NBYTES = 1 << 20
"""User metadata beyond this is refused: readers of untrusted files bound single values."""

SPARE_LEAVES = 100_000
"""Scalars and containers that a tree may have beyond two for each tensor of the file."""

_VERSION = 1
_WHAT = "the tree in the safetensors metadata"


@dataclass(frozen=True, slots=True, eq=False)
class SavedTree:
    """What the metadata of a safetensors file tells of the tree it came from.

    Attributes:
        structure: the containers.
        leaves: kinds, scalar values and facts, without pieces.
        tensors: per leaf the name of its tensor, None for scalars; tied leaves share one.
        metadata: the user's metadata.
        metrics: the user's metrics.
    """

    structure: Structure
    leaves: LeafTable
    tensors: Sequence[str | None]
    metadata: Mapping[str, JsonValue]
    metrics: Mapping[str, float]


def encode_tree(tree: SavedTree) -> dict[str, str]:
    """The metadata entries of a file that holds this tree.

    Raises:
        UsageError: the user's metadata is too large.
    """
    leaves: list[JsonValue] = []
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
            f"the metadata takes {len(metadata)} bytes, more than the {MAX_USER_NBYTES} that are "
            "carried into a safetensors file; keep it elsewhere",
            expected=MAX_USER_NBYTES,
            found=len(metadata),
        )
    document = {
        "version": _VERSION,
        "nodes": tree.structure.to_json()["nodes"],
        "leaves": leaves,
        "metadata": dict(tree.metadata),
        "metrics": {name: encode_scalar(value)[1] for name, value in tree.metrics.items()},
    }
    text = json.dumps(document, separators=(",", ":"))
    return {
        TREE_KEY if number == 0 else f"{TREE_KEY}.{number}": text[start : start + PART_CHARS]
        for number, start in enumerate(range(0, len(text), PART_CHARS))
    }


def decode_tree(
    metadata: Mapping[str, str], tensor_count: int, *, file: str
) -> tuple[SavedTree | None, dict[str, str]]:
    """The tree in a file's metadata, or None, and the other entries.

    Raises:
        CorruptCheckpointError: it is malformed.
        UnsupportedFormatError: it is of a newer version.
    """
    others = dict(metadata)
    parts = []
    key = TREE_KEY
    while key in others:
        parts.append(others.pop(key))
        key = f"{TREE_KEY}.{len(parts)}"
    if not parts:
        return None, others
    reader = JsonReader("".join(parts).encode(), _WHAT, file)
    most = 2 * tensor_count + SPARE_LEAVES
    tree = _Tree(reader, most)
    for member in reader.members():
        tree.read(member)
    reader.end()
    return tree.result(), others


class _Tree:
    def __init__(self, reader: JsonReader, most: int) -> None:
        self._reader = reader
        self._most = most
        self._seen: set[str] = set()
        self._nodes: list[dict[str, Any]] = []
        self._kinds: list[str] = []
        self._values: list[JsonValue] = []
        self._extra: dict[int, Mapping[str, JsonValue]] = {}
        self._tensors: list[str | None] = []
        self._metadata: Mapping[str, JsonValue] = {}
        self._metrics: Mapping[str, float] = {}

    def read(self, member: str) -> None:
        reader = self._reader
        if member in self._seen:
            raise reader.fault(f"{member[:40]!r} stands there twice")
        self._seen.add(member)
        if member == "version":
            version = reader.integer()
            if version != _VERSION:
                raise reader.unsupported(
                    f"the tree beside the tensors has version {version}, this release reads "
                    f"{_VERSION}; use a newer release",
                    expected=_VERSION,
                    found=version,
                )
        elif member == "nodes":
            for number in reader.items():
                self._bound(number)
                self._nodes.append(self._node())
        elif member == "leaves":
            for number in reader.items():
                self._bound(number)
                self._leaf(number)
        elif member == "metadata":
            value = reader.value()
            fault = depth_fault(value)
            if not isinstance(value, dict) or fault is not None:
                raise reader.fault(f"metadata {fault or 'is not an object'}")
            self._metadata = value
        elif member == "metrics":
            self._metrics = {name: self._metric(name) for name in reader.members()}
        else:
            raise reader.fault(f"{member[:40]!r} is no member of this version")

    def result(self) -> SavedTree:
        missing = {"version", "nodes", "leaves"} - self._seen
        if missing:
            raise self._reader.fault(f"{sorted(missing)[0]} is missing")
        try:
            structure = Structure.from_json({"leaves": len(self._kinds), "nodes": self._nodes})
        except ValueError as error:
            raise self._reader.fault(str(error)) from None
        leaves = LeafTable(self._kinds, self._values, self._extra, {})
        return SavedTree(structure, leaves, self._tensors, self._metadata, self._metrics)

    def _metric(self, name: str) -> float:
        try:
            value = decode_scalar("float", self._reader.string())
        except ValueError as error:
            raise self._reader.fault(f"metric {name[:40]!r}: {error}") from None
        assert isinstance(value, float)
        return value

    def _bound(self, number: int) -> None:
        if number >= self._most:
            raise self._reader.fault(f"it has more than {self._most} containers or leaves")

    def _node(self) -> dict[str, Any]:
        reader = self._reader
        node: dict[str, Any] = {}
        for member in reader.members():
            if member in node:
                raise reader.fault(f"{member[:40]!r} of a container stands there twice")
            if member in ("kind", "type"):
                node[member] = reader.string()
            elif member == "children":
                node[member] = list(reader.integers(most=self._most))
            elif member == "keys":
                node[member] = []
                for number in reader.items():
                    self._bound(number)
                    node[member].append(reader.value())
            else:
                raise reader.fault(f"{member[:40]!r} is no member of a container")
        return node

    def _leaf(self, leaf: int) -> None:
        reader = self._reader
        if reader.at_string():
            self._add(DEFAULT_KIND, None, reader.string())
            return
        found: dict[str, Any] = {}
        for member in reader.members():
            if member in found or member not in ("tensor", "kind", "value", "extra"):
                raise reader.fault(f"{member[:40]!r} is no member of a leaf, or stands there twice")
            found[member] = reader.string() if member in ("tensor", "kind") else reader.value()
        kind = found.get("kind", DEFAULT_KIND)
        if "tensor" in found:
            extra = found.get("extra", {})
            named = kind.isidentifier() and kind not in SCALAR_KINDS
            if not named or "value" in found or not isinstance(extra, dict):
                raise reader.fault(f"leaf {leaf} is neither an array nor a scalar")
            if extra:
                self._extra[leaf] = extra
            self._add(kind, None, found["tensor"])
            return
        try:
            decode_scalar(kind, found.get("value"))
        except ValueError as error:
            raise reader.fault(f"leaf {leaf}: {error}") from None
        self._add(kind, found["value"], None)

    def _add(self, kind: str, value: JsonValue, tensor: str | None) -> None:
        self._kinds.append(kind)
        self._values.append(value)
        self._tensors.append(tensor)
