"""JSON documents of bounded size, and the forms of their members."""

# Rule 1: the size of a document and its number of values are bounded before it is parsed, because
#   three bytes of ``[],`` become seventy. Parsing takes at most about 20 times the document.

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from asyncckpt.format.damage import corrupt
from asyncckpt.options import MAX_DEPTH

MAX_RANK = 32
"""Most dimensions of an array: the limit of NumPy before 2.0. torch allows 64."""

FREE_VALUES = 1 << 17
"""Values allowed in a document of any length."""

NBYTES_PER_VALUE = 6
"""Bytes of a document per additional value. A safetensors header has one value per 7 bytes, Orbax's
metadata one per 18."""


def excess(data: bytes, most_nbytes: int) -> str | None:
    """Return which limit of `parse_json` a JSON document exceeds; None if it is within both."""
    if len(data) > most_nbytes:
        return f"it has {len(data)} bytes"
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > FREE_VALUES + len(data) // NBYTES_PER_VALUE:
        return f"it has {values} values in {len(data)} bytes"
    return None


def parse_json(data: bytes, what: str, *, file: str, most_nbytes: int, base: int = 0) -> Any:
    """Parse a whole JSON document of bounded size, density and depth.

    Errors call it `what`, at byte `base` of `file`.

    Raises:
        CorruptCheckpointError: it is too large or too deep, is not JSON in UTF-8, or has a key
            twice in one object.
    """
    if reason := excess(data, most_nbytes):
        raise corrupt(what, reason, file=file, offset=base)
    try:
        document = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        at = error.pos if isinstance(error, json.JSONDecodeError) else 0
        reason = f"it is not JSON ({error})"
        raise corrupt(what, reason, file=file, offset=base + at) from None
    try:
        check_depth(document, "it")
    except ValueError as error:
        raise corrupt(what, str(error), file=file, offset=base) from None
    return document


def parse_object(
    data: bytes, what: str, *, file: str, most_nbytes: int, base: int = 0
) -> dict[str, Any]:
    """Parse a whole JSON object; otherwise like `parse_json`."""
    document = parse_json(data, what, file=file, most_nbytes=most_nbytes, base=base)
    if not isinstance(document, dict):
        raise corrupt(what, "it is not a JSON object", file=file, offset=base)
    return document


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:80]!r} occurs twice")
    return members


def check_depth(document: object, name: str) -> None:
    """Raise ValueError unless the nesting of parsed JSON is bounded. Never recurses."""
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        # Checked by type: a level of a large tree has 100,000 items of three types.
        if _CONTAINERS.isdisjoint(map(type, level)):
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level = below
    if level:
        raise ValueError(f"{name} is nested deeper than {MAX_DEPTH}")


_CONTAINERS = frozenset((dict, list))

_TYPES: dict[Any, str] = {list: "a list", dict: "an object", str: "a string", int: "an integer"}


def check_form(value: Any, form: Any, name: str = "") -> None:
    """Raise ValueError unless the value has the form; errors call it `name`.

    Forms are:

    * a pattern: a string that fully matches;
    * a number: an integer from 0 to that number;
    * `str`, `list` or `dict`: any string, list or object; `object`: anything;
    * ``[str]`` or ``[int]``: a list of strings or integers; ``[form]``: a list of items of a form;
    * ``(form,)``: null, or a value of the form;
    * a dict: an object with exactly these members, each of its form.
    """
    expected: Any = form if isinstance(form, type) else type(form)
    if expected is tuple:
        if value is not None:
            check_form(value, form[0], name)
    elif isinstance(form, re.Pattern):
        if not isinstance(value, str) or not form.fullmatch(value):
            raise ValueError(f"{name} is {repr(value)[:80]}, not of the form {form.pattern}")
    elif isinstance(form, int):
        if type(value) is not int or not 0 <= value <= form:
            raise ValueError(f"{name} is {repr(value)[:40]}, not an integer from 0 to {form}")
    elif form is object:
        return  # anything
    elif type(value) is not expected:
        raise ValueError(f"{name} is not {_TYPES[expected]}")
    elif isinstance(form, list):
        (each,) = form
        if isinstance(each, type):
            if not set(map(type, value)) <= {each}:
                raise ValueError(f"{name} has an entry that is not {_TYPES[each]}")
            return
        for row, item in enumerate(value):
            check_form(item, each, f"{name}[{row}]")
    elif isinstance(form, dict):
        place = f"{name}." if name else ""
        for member, inner in form.items():
            if member not in value:
                raise ValueError(f"{place}{member} is missing")
            check_form(value[member], inner, place + member)
        if len(value) > len(form):
            other = next(member for member in value if member not in form)
            raise ValueError(f"{place}{repr(other)[:80]} is not a member of this version")
