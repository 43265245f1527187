"""Schema of a state: what other processes need to know about one process's part of it.

Processes with equal digests make the same plan without further messages. Otherwise they exchange
their schemas and merge them (`planning.merge`).
"""

# Rule 1: a schema holds no measurements, and nothing that depends on hash seeds, `repr` or
#   addresses. The order of leaves matters: arrays are numbered in it.
# Rule 2: what a store returns is checked before it is used, and its size before it is parsed.

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import CorruptCheckpointError, UsageError
from asyncckpt.options import LeafOptions
from asyncckpt.planning.save import PLANNER_VERSION
from asyncckpt.spec import ITEMSIZES, ArraySpec, Box, Partition, array_spec
from asyncckpt.tree import Structure

SCHEMA_VERSION = 2

MAX_SCHEMA_NBYTES = 256 << 20
"""A longer schema is not parsed; one of 100,000 leaves has 10 MiB."""

NBYTES_PER_VALUE = 2
"""Bytes per value of the densest JSON documents; schemas have more."""


@dataclass(frozen=True, slots=True)
class SchemaLeaf:
    """One leaf of one process.

    Attributes:
        kind: kind of a scalar, or the framework of an array.
        spec: shape and dtype of an array; None for a scalar.
        options: what `leaf_options` returned.
        extra: facts that are stored beside the bytes, as JSON with sorted keys; empty for none.
        tied_to: ordinal of an earlier leaf that has the same bytes, or None.
        partition: how several processes divide the array.
        boxes: the parts of the array that this process holds; None for all of it, and with a
            partition, from which all processes compute them.
        partial: whether other processes hold the rest.
    """

    kind: str
    spec: ArraySpec | None = None
    options: LeafOptions | None = None
    extra: str = ""
    tied_to: int | None = None
    partition: Partition | None = None
    boxes: tuple[Box, ...] | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """What one process saves, without values.

    Attributes:
        structure: the containers of its tree.
        leaves: its leaves, in the order of the structure.
        options: options of the save that all processes must share, by name: JSON values.
    """

    structure: Structure
    leaves: tuple[SchemaLeaf, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def schema_digest(schema: Schema) -> str:
    """Return the SHA-256 (hex) of what processes must agree on to make the same plan.

    Leaves whose parts only their holders know (`partial`) make digests differ.
    """
    return hashlib.sha256(encode_schema(schema)).hexdigest()


def encode_schema(schema: Schema) -> bytes:
    """Return the schema as bytes for other processes; equal schemas have equal bytes."""
    document = _document(schema)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def decode_schema(data: bytes, *, file: str) -> Schema:
    """Return the schema that `encode_schema` wrote; `file` is named in errors.

    Raises:
        CorruptCheckpointError: they are not a schema of this version.
    """

    def fault(reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{file}: not a schema of a save: {reason}", file=file)

    if len(data) > MAX_SCHEMA_NBYTES:
        raise fault(f"it has {len(data)} bytes, {MAX_SCHEMA_NBYTES} are allowed")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > len(data) // NBYTES_PER_VALUE + 64:
        raise fault("it has more values than a schema has")
    try:
        return _schema(json.loads(data))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, UsageError) as error:
        raise fault(f"{type(error).__name__}: {error}"[:200]) from None


# ------------------------------------------------------------------------------------ documents


class _Distinct:
    """Values that many leaves share, each written once; leaves refer to them by number."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self.values: list[Any] = []
        self._encode = encode
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        number = self._numbers.setdefault(value, len(self._numbers))
        if number == len(self.values):
            self.values.append(self._encode(value))
        return number


def _document(schema: Schema) -> dict[str, Any]:
    """Return the schema as JSON values."""
    specs = _Distinct(lambda spec: [spec.shape, spec.dtype])
    answers = _Distinct(_answer)
    texts = _Distinct(lambda text: text)
    divisions = _Distinct(_division)
    rows: list[list[int]] = []
    for leaf in schema.leaves:
        divided = leaf.partition is not None or leaf.boxes is not None or leaf.partial
        division = (leaf.partition, leaf.boxes, leaf.partial)
        rows.append(
            [
                texts.number(leaf.kind),
                -1 if leaf.spec is None else specs.number(leaf.spec),
                -1 if leaf.options is None else answers.number(leaf.options),
                texts.number(leaf.extra),
                -1 if leaf.tied_to is None else leaf.tied_to,
                divisions.number(division) if divided else -1,
            ]
        )
    return {
        "version": SCHEMA_VERSION,
        "planner": PLANNER_VERSION,
        "options": dict(schema.options),
        "tree": schema.structure.to_json(),
        "leaves": rows,
        "specs": specs.values,
        "answers": answers.values,
        "texts": texts.values,
        "divisions": divisions.values,
    }


def _answer(options: LeafOptions) -> dict[str, Any]:
    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    return {name: value for name, value in given.items() if value is not None}


def _division(division: tuple[Partition | None, Sequence[Box] | None, bool]) -> list[Any]:
    partition, boxes, partial = division
    return [
        partition and [partition.cuts, partition.holders, partition.processes, partition.pattern],
        None if boxes is None else [[box.offset, box.shape] for box in boxes],
        partial,
    ]


def _schema(document: Any) -> Schema:
    """Return the schema that a document describes.

    Raises:
        ValueError, KeyError, TypeError, IndexError, UsageError: it is malformed.
    """
    if not isinstance(document, dict):
        raise TypeError("it is not an object")
    for name, expected in (("version", SCHEMA_VERSION), ("planner", PLANNER_VERSION)):
        if document[name] != expected:
            raise ValueError(f"{name} is {document[name]!r:.40}, this library's is {expected}")
    for name in ("specs", "answers", "texts", "divisions", "leaves"):
        if not isinstance(document[name], list):
            raise TypeError(f"{name!r} is not a list")
    specs = [_spec(*item) for item in document["specs"]]
    answers = [_leaf_options(item) for item in document["answers"]]
    texts = [_text(item) for item in document["texts"]]
    divisions = [_divided(*item) for item in document["divisions"]]
    leaves: list[SchemaLeaf] = []
    for kind, spec, answer, extra, tied_to, division in document["leaves"]:
        if not -1 <= _integer(tied_to) < len(leaves):
            raise ValueError(f"leaf {len(leaves)} is tied to {tied_to}")
        leaves.append(
            SchemaLeaf(
                _at(texts, kind),
                None if spec == -1 else _at(specs, spec),
                None if answer == -1 else _at(answers, answer),
                _at(texts, extra),
                None if tied_to == -1 else tied_to,
                *((None, None, False) if division == -1 else _at(divisions, division)),
            )
        )
    structure = Structure.from_json(document["tree"])
    if structure.leaf_count != len(leaves):
        raise ValueError(f"{structure.leaf_count} leaves in the tree, {len(leaves)} described")
    if not isinstance(document["options"], dict):
        raise TypeError("'options' is not an object")
    return Schema(structure, tuple(leaves), document["options"])


def _spec(shape: Any, dtype: Any) -> ArraySpec:
    if dtype not in ITEMSIZES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    return array_spec(_lengths(shape), dtype)


def _leaf_options(item: dict[str, Any]) -> LeafOptions:
    if "chunk_shape" in item:
        item = {**item, "chunk_shape": _lengths(item["chunk_shape"])}
    return LeafOptions(**item)


def _divided(
    partition: Any, boxes: Any, partial: Any
) -> tuple[Partition | None, tuple[Box, ...] | None, bool]:
    divided = None
    if partition is not None:
        cuts, holders, processes, pattern = partition
        lengths = tuple([_lengths(c) if isinstance(c, list) else _integer(c) for c in cuts])
        divided = Partition(lengths, _text(holders), _lengths(processes), _text(pattern))
    held = None
    if boxes is not None:
        held = tuple([Box(_lengths(offset), _lengths(shape)) for offset, shape in boxes])
    if not isinstance(partial, bool):
        raise TypeError(f"{partial!r:.40} is not a boolean")
    return divided, held, partial


def _integer(value: Any) -> int:
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is not an integer of 63 bits")
    return value


def _at(items: Sequence[Any], number: Any) -> Any:
    if _integer(number) < 0:
        raise ValueError(f"{number} is not an index")
    return items[number]


def _lengths(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r:.40} is not a list")
    found = tuple(map(_integer, values))
    if -1 in found:
        raise ValueError(f"{found!r:.40} has a negative length")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return value
