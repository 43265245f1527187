"""Documents that Orbax writes in addition to arrays.

Source: orbax-checkpoint 0.12.8, `metadata/tree.py`, `metadata/step_metadata_serialization.py`,
`metadata/array_metadata_store.py` and `serialization/type_handlers.py`:

- ``_METADATA``: every leaf and empty container of an item, with its path and handler;
- ``_strings.json``: the string leaves;
- ``array_metadatas/process_<i>``: which arrays are the data of typed PRNG keys;
- ``_CHECKPOINT_METADATA``: the items of a step with their handlers, metrics and times.

``_sharding``, the device of arrays without a target, is not read: asyncckpt uses the default
device. `orbax.checkpoint` is an empty marker file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.format.damage import corrupt
from asyncckpt.format.fields import parse_json, parse_object
from asyncckpt.format.orbax import EMPTY, KEY_TYPES, string_keys
from asyncckpt.format.scalars import JsonValue
from asyncckpt.tree import Key

CHECKPOINT_METADATA_FILE = "_CHECKPOINT_METADATA"
PROCESS_DIRECTORY = re.compile(r"ocdbt\.process_[^/]+")
"""Databases of single processes, which may have been merged into one."""

UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name of an unfinished directory."""

MAX_DOCUMENT_NBYTES = 1 << 28
"""A million leaves take 250 bytes each in `_METADATA`."""

_STEP = re.compile(rf"(?!\.|.*{re.escape(UNFINISHED)})(?:.*[^0-9])?([0-9]+)")
_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")
_IMPLEMENTATION = re.compile(r"[A-Za-z0-9_.]{1,64}")


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """Leaf or empty container.

    Attributes:
        path: keys from the root; integers are indices of lists and tuples.
        kind: its `value_type`, the name of a handler: one of `KINDS`, or an unknown one.
        elsewhere: whether its value is in a file of older releases instead of an array.
    """

    path: tuple[Key, ...]
    kind: str
    elsewhere: bool

    @property
    def name(self) -> str:
        """Name of its array, and of its string."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """Content of `_METADATA`: leaves and empty containers in order, and the storage of arrays.

    Attributes:
        use_ocdbt: whether arrays are in an OCDBT database; None if not stated.
        complete: whether chunks are stored even if they consist of the fill value.
        custom: the user's JSON.
    """

    entries: tuple[TreeEntry, ...]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    complete: bool = False
    custom: JsonValue = None


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Content of `_CHECKPOINT_METADATA`.

    Attributes:
        handlers: class that wrote each item, by item name; ``""`` is the name of a single item.
        committed_ns: time of the commit in nanoseconds since 1970; 0 if not stated.
    """

    handlers: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    custom: Mapping[str, JsonValue] = field(default_factory=dict)
    committed_ns: int = 0


def parse_document(data: bytes, what: str, *, file: str) -> Any:
    """Parse a whole JSON document."""
    return parse_json(data, what, file=file, most_nbytes=MAX_DOCUMENT_NBYTES)


def _members(data: bytes, what: str, file: str) -> dict[str, Any]:
    return parse_object(data, what, file=file, most_nbytes=MAX_DOCUMENT_NBYTES)


# ------------------------------------------------------------------------------------------ items


def decode_metadata(data: bytes, *, file: str) -> TreeMetadata:
    """Decode `_METADATA`; `file` is named in errors."""
    what = "the Orbax metadata"
    document = _members(data, what, file)
    tree = document.get("tree_metadata")
    if not isinstance(tree, dict):
        raise corrupt(what, "its tree_metadata is not an object", file=file)
    flags = {}
    for name in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value"):
        flags[name] = document.get(name)
        if flags[name] not in (None, True, False):
            raise corrupt(what, f"its {name} is {repr(flags[name])[:40]}", file=file)
    entries = []
    for name, entry in tree.items():
        try:
            entries.append(_decode_entry(entry))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"its entry {name[:200]} is malformed ({error})"
            raise corrupt(what, reason, file=file) from None
    return TreeMetadata(
        tuple(entries),
        flags["use_ocdbt"],
        bool(flags["use_zarr3"]),
        bool(flags["store_array_data_equal_to_fill_value"]),
        document.get("custom_metadata"),
    )


def _decode_entry(entry: dict[str, Any]) -> TreeEntry:
    path: list[Key] = []
    for step in entry["key_metadata"]:
        key, kind = step["key"], step["key_type"]
        if not isinstance(key, str) or kind not in KEY_TYPES.values():
            raise ValueError(f"key {repr(key)[:80]} of type {repr(kind)[:40]}")
        is_index = kind == KEY_TYPES[True]
        if is_index and not _INDEX.fullmatch(key):
            raise ValueError(f"{key[:40]!r} is not an index of a list")
        path.append(int(key) if is_index else key)
    value = entry["value_metadata"]
    handler, skipped = value["value_type"], value.get("skip_deserialize", False)
    if not isinstance(handler, str) or not isinstance(skipped, bool):
        raise TypeError("value_type or skip_deserialize")
    return TreeEntry(tuple(path), handler, skipped and handler not in EMPTY)


def find_string(document: object, name: str) -> str | None:
    """Return the string leaf of this name in `_strings.json`, or None."""
    at = document
    for key in string_keys(name):
        at = at.get(key) if isinstance(at, dict) else None
    return at if isinstance(at, str) else None


def decode_array_metadatas(data: bytes, *, file: str) -> dict[str, str]:
    """Return the implementations of typed PRNG keys by array name, without other arrays."""
    if b"random_key_impl" not in data:
        return {}  # as in most checkpoints: entries for all arrays, but no typed keys
    what = "the array metadata"
    document = _members(data, what, file)
    found = {}
    try:
        for row in document["array_metadatas"]:
            metadata = row["array_metadata"]
            name = metadata["param_name"]
            implementation = (metadata.get("ext_metadata") or {}).get("random_key_impl")
            if implementation is None:
                continue
            if not isinstance(name, str) or not _IMPLEMENTATION.fullmatch(implementation):
                raise ValueError(f"random_key_impl is {repr(implementation)[:80]}")
            found[name] = implementation
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise corrupt(what, f"an entry is malformed ({error})", file=file) from None
    return found


# ------------------------------------------------------------------------------------------ steps


def step_number(name: str) -> int:
    """Return the number of the step with this name, as `2`, `00000002` or `ckpt_2`; -1 if none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else -1


def decode_checkpoint_metadata(data: bytes, *, file: str) -> StepMetadata:
    """Decode `_CHECKPOINT_METADATA`; missing members are empty."""
    what = "the checkpoint metadata"
    document = _members(data, what, file)

    def member(name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = document.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise corrupt(what, f"its {name} is {repr(value)[:40]}", file=file)
        return value

    handlers = member("item_handlers", (dict, str), {})
    if isinstance(handlers, str):
        handlers = {"": handlers}
    time_ns = member("commit_timestamp_nsecs", int, 0)
    return StepMetadata(
        {name: handler for name, handler in handlers.items() if isinstance(handler, str)},
        numbers(member("metrics", dict, {})),
        member("custom_metadata", dict, {}),
        time_ns if 0 <= time_ns < 1 << 63 else 0,
    )


def numbers(document: object) -> dict[str, float]:
    """Return the numeric members of a JSON object."""
    members = document.items() if isinstance(document, dict) else ()
    return {
        name: float(value)
        for name, value in members
        if type(value) is float or (type(value) is int and abs(value) < 1 << 1000)
    }
