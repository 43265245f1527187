"""Schema of a process's part of a state, for the other processes.

Processes with equal digests make the same plan without further messages. Otherwise they exchange
and merge their schemas (`planning.merge`).
"""

# Rule 1: a schema contains no measurements, and nothing that depends on hash seeds, `repr` or
#   addresses. The order of leaves matters, because it numbers the arrays.
# Rule 2: bytes from a store are checked before use, and their size before they are parsed.

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import CorruptCheckpointError, UsageError
from asyncckpt.options import LeafOptions
from asyncckpt.spec import ITEMSIZES, ArraySpec, Box, Partition, array_spec
from asyncckpt.tree import Structure

SCHEMA_VERSION = 4
"""Increase it when the encoding changes, or equal schemas give another plan than before."""

MAX_SCHEMA_NBYTES = 256 << 20
"""Longest schema that is parsed; one of 100,000 distinct leaves has 25 MiB."""

NBYTES_PER_VALUE = 2
"""Bytes per value of the densest JSON documents; schemas have more."""


@dataclass(frozen=True, slots=True)
class SchemaLeaf:
    """One leaf of one process.

    Attributes:
        kind: kind of a scalar, or the framework of an array.
        spec: shape and dtype of an array; None for a scalar.
        options: result of `leaf_options`.
        extra: facts stored with the bytes, as JSON with sorted keys; empty for none.
        tied_to: ordinal of an earlier leaf with the same bytes, or None.
        partition: how several processes divide the array.
        boxes: this process's parts of the array; None for the whole array, and with a partition,
            which determines them.
        partial: other processes hold the rest.
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
    """One process's tree, without values.

    Attributes:
        structure: the containers of its tree.
        leaves: its leaves, in the order of the structure.
        options: options of the save that all processes must share, by name; JSON values.
    """

    structure: Structure
    leaves: tuple[SchemaLeaf, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def schema_digest(schema: Schema) -> str:
    """Return the SHA-256 (hex) of a schema; processes with equal digests make the same plan.

    Digests differ if leaves have parts that only their holders know (`partial`).
    """
    return hashlib.sha256(encode_schema(schema)).hexdigest()


def encode_schema(schema: Schema) -> bytes:
    """Encode the schema for other processes; equal schemas have equal bytes.

    Leaves that differ only in their ties, as most do, are written once and referred to by number.
    """
    kinds: dict[SchemaLeaf, int] = {}
    numbers: list[int] = []
    tied: list[tuple[int, int]] = []
    for leaf in schema.leaves:
        if leaf.tied_to is not None:
            tied.append((len(numbers), leaf.tied_to))
            leaf = dataclasses.replace(leaf, tied_to=None)
        numbers.append(kinds.setdefault(leaf, len(kinds)))
    document = {
        "version": SCHEMA_VERSION,
        "options": dict(schema.options),
        "tree": schema.structure.to_json(),
        "leaves": numbers,
        "kinds": list(kinds),
        "tied": tied,
    }
    text = json.dumps(
        document, default=_fields, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return text.encode()


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, for JSON."""
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


def decode_schema(data: bytes, *, file: str) -> Schema:
    """Decode a schema; errors name `file`.

    Raises:
        CorruptCheckpointError: the bytes are not a schema of this version.
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


def _schema(document: Any) -> Schema:
    """Return the schema of a decoded JSON document.

    Raises:
        ValueError, KeyError, TypeError, IndexError, UsageError: it is malformed.
    """
    version = document["version"]
    if version != SCHEMA_VERSION:
        raise ValueError(f"version is {version!r:.40}, this library's is {SCHEMA_VERSION}")
    kinds = [_leaf(**item) for item in document["kinds"]]
    leaves = [kinds[number] for number in _lengths(document["leaves"])]
    for number, source in map(_lengths, document["tied"]):
        if source >= number:
            raise ValueError(f"leaf {number} is tied to {source}")
        leaves[number] = dataclasses.replace(leaves[number], tied_to=source)
    structure = Structure.from_json(document["tree"])
    if structure.leaf_count != len(leaves):
        raise ValueError(f"{structure.leaf_count} leaves in the tree, {len(leaves)} described")
    if not isinstance(document["options"], dict):
        raise TypeError("'options' is not an object")
    return Schema(structure, tuple(leaves), document["options"])


def _leaf(
    *,
    kind: Any,
    spec: Any,
    options: Any,
    extra: Any,
    tied_to: Any,
    partition: Any,
    boxes: Any,
    partial: Any,
) -> SchemaLeaf:
    if not isinstance(partial, bool):
        raise TypeError(f"{partial!r:.40} is not a boolean")
    if tied_to is not None:
        raise ValueError(f"a kind of leaves is tied to {tied_to!r:.40}")
    return SchemaLeaf(
        _text(kind),
        None if spec is None else _spec(**spec),
        None if options is None else _leaf_options(**options),
        _text(extra),
        None,
        None if partition is None else _partition(**partition),
        None if boxes is None else tuple([_box(**box) for box in boxes]),
        partial,
    )


def _spec(*, shape: Any, dtype: Any) -> ArraySpec:
    if dtype not in ITEMSIZES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    return array_spec(_lengths(shape), dtype)


def _leaf_options(*, chunk_shape: Any, **others: Any) -> LeafOptions:
    shape = None if chunk_shape is None else _lengths(chunk_shape)
    return LeafOptions(chunk_shape=shape, **others)


def _partition(*, cuts: Any, holders: Any, processes: Any, pattern: Any) -> Partition:
    lengths = tuple([_lengths(c) if isinstance(c, list) else _integer(c) for c in cuts])
    return Partition(lengths, _text(holders), _lengths(processes), _text(pattern))


def _box(*, offset: Any, shape: Any) -> Box:
    return Box(_lengths(offset), _lengths(shape))


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is not an unsigned integer of 63 bits")
    return value


def _lengths(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r:.40} is not a list")
    return tuple(map(_integer, values))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return value
