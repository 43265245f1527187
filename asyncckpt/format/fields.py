"""JSON documents of bounded size, and typed access to their members.

Every mismatch is a `CorruptCheckpointError`.
"""

# Rule 1: a document's size and the number of values in it are bounded before it is parsed, since
#   three bytes of ``[],`` become seventy: parsing takes at most about 20 times the document.

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.damage import corrupt
from asyncckpt.format.scalars import JsonValue

MAX_DEPTH = 256
"""Deepest nesting of containers in a stored document."""

FREE_VALUES = 1 << 17
"""Values that any document may have, however short it is."""

NBYTES_PER_VALUE = 6
"""Bytes of a document per further value. Tensors in a safetensors header have one per 7 bytes,
leaves in Orbax's metadata one per 18."""

_CRC = re.compile(r"[0-9a-f]{8}")
_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")


def parse_json(data: bytes, what: str, *, file: str, most_nbytes: int, base: int = 0) -> Any:
    """Return the value of a whole JSON document of bounded size, density and depth.

    Args:
        data: the document.
        what: name of the document in errors.
        file: name of its file in errors.
        most_nbytes: longest document that is parsed.
        base: offset of the document in its file.

    Raises:
        CorruptCheckpointError: it is too large or too deep, is not JSON in UTF-8, or has a key
            twice in one object.
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if len(data) > most_nbytes:
        raise corrupt(what, f"it has {len(data)} bytes", file=file, offset=base)
    if values > FREE_VALUES + len(data) // NBYTES_PER_VALUE:
        reason = f"it has {values} values in {len(data)} bytes"
        raise corrupt(what, reason, file=file, offset=base)
    try:
        document = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else 0
        reason = f"it is not JSON ({error})"
        raise corrupt(what, reason, file=file, offset=base + at) from None
    deep = depth_fault(document)
    if deep is not None:
        raise corrupt(what, f"it {deep}", file=file, offset=base)
    return document


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:80]!r} occurs twice")
    return members


def depth_fault(value: object) -> str | None:
    """Return why `value` is not JSON of bounded depth, or None if it is. Never recurses."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        # A level of a large tree has 100,000 items of three types: it is asked by type.
        kinds = set(map(type, level))
        for kind in kinds:
            if not issubclass(kind, _JSON):
                return f"holds a {kind.__name__}, which is not JSON"
        if not any(issubclass(kind, _CONTAINERS) for kind in kinds):
            return None
        objects = [item for item in level if isinstance(item, dict)]
        for key in itertools.chain.from_iterable(objects):
            if type(key) is not str:
                return f"has the key {key!r}, which is not a string"
        arrays = [item for item in level if isinstance(item, (list, tuple))]
        level = list(itertools.chain.from_iterable(arrays))
        for item in objects:
            level += item.values()
    return f"is nested deeper than {MAX_DEPTH}" if level else None


_CONTAINERS = (dict, list, tuple)
_JSON = (*_CONTAINERS, str, int, float, type(None))


@dataclass(frozen=True, slots=True)
class Fields:
    """Members of one JSON object. `where` is its place in the document, for errors."""

    members: dict[str, Any]
    what: str
    file: str
    where: str = ""

    def fault(self, name: str, reason: str) -> CorruptCheckpointError:
        """Return the error for member `name`."""
        return corrupt(self.what, f"{self.where}{name} {reason}", file=self.file)

    def only(self, names: Sequence[str]) -> None:
        """Raise unless the object has these members and no others."""
        for name in names:
            if name not in self.members:
                raise self.fault(name, "is missing")
        for name in self.members:
            if name not in names:
                raise self.fault(repr(name)[:80], "is not a member of this version")

    def integer(self, name: str, *, most: int = (1 << 63) - 1) -> int:
        """Return an integer from 0 to `most`."""
        value = self.members[name]
        if type(value) is not int or not 0 <= value <= most:
            raise self.fault(name, f"is {repr(value)[:40]}, not an integer from 0 to {most}")
        return value

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        """Return a string that matches the pattern as a whole."""
        value = self.members[name]
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.fault(name, f"is {repr(value)[:80]}, not of the form {pattern.pattern}")
        return value

    def crc(self, name: str) -> int:
        """Return a CRC-32C written as 8 hex digits."""
        return int(self.text(name, _CRC), 16)

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self.members[name]
        if not isinstance(value, list):
            raise self.fault(name, "is not a list")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """Return an object's members."""
        value = self.members[name]
        if not isinstance(value, dict):
            raise self.fault(name, "is not an object")
        return value

    def json(self, name: str) -> JsonValue:
        """Return JSON of bounded depth."""
        value: JsonValue = self.members[name]
        reason = depth_fault(value)
        if reason is not None:
            raise self.fault(name, reason)
        return value

    def inner(self, name: str, names: Sequence[str]) -> Fields:
        """Return the members of an object inside this one."""
        fields = Fields(self.object(name), self.what, self.file, f"{self.where}{name}.")
        fields.only(names)
        return fields

    def each(self, name: str, names: Sequence[str]) -> list[Fields]:
        """Return the members of every object in a list."""
        rows = []
        for row, value in enumerate(self.items(name)):
            if not isinstance(value, dict):
                raise self.fault(f"{name}[{row}]", "is not an object")
            fields = Fields(value, self.what, self.file, f"{self.where}{name}[{row}].")
            fields.only(names)
            rows.append(fields)
        return rows

    def strings(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self.items(name)
        if not set(map(type, value)) <= {str}:
            raise self.fault(name, "has an entry that is not a string")
        return value

    def integers(self, name: str, *, below: int) -> list[int]:
        """Return a list of integers from 0, each smaller than `below`."""
        value = self.items(name)
        if not set(map(type, value)) <= {int}:
            raise self.fault(name, "has an entry that is not an integer")
        if value and not 0 <= min(value) <= max(value) < below:
            raise self.fault(name, f"has an entry that is not between 0 and {below - 1}")
        return value

    def by_index(self, name: str, *, below: int) -> dict[int, Any]:
        """Return an object whose keys are indices below `below`, in canonical decimal."""
        result = {}
        for key, value in self.object(name).items():
            if not _INDEX.fullmatch(key) or int(key) >= below:
                raise self.fault(name, f"has the key {key[:40]!r}, not an index below {below}")
            result[int(key)] = value
        return result
