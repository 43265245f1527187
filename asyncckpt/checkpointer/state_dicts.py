"""State dicts from a format that keeps less of them than was there.

`torch.distributed.checkpoint` turns every key of a dict into text and leaves out containers that
hold nothing. Loading into a state dict that is there, as torch does, gives them back; here the
present state dict of an object says what they were.
"""

from __future__ import annotations

import re
from typing import Any

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def as_it_was(saved: Any, present: Any) -> Any:
    """The saved state dict with keys of the types that the present one has.

    Keys that the present dict lacks become integers where its own are, or where it has none and
    all of the saved read like integers. Containers of the present one that hold nothing are kept;
    those at its top level that hold something, of which nothing was saved, are emptied.
    """
    restored = _retyped(saved, present)
    if isinstance(restored, dict) and isinstance(present, dict):
        for key, value in present.items():
            if key not in restored and isinstance(value, (dict, list)):
                restored[key] = type(value)() if type(value) in (dict, list) else {}
    return restored


def _retyped(saved: Any, present: Any) -> Any:
    if isinstance(saved, dict) and isinstance(present, dict):
        keys = {str(key): key for key in present}
        texts = any(type(key) is str for key in present)
        numbers = not texts and all(_INTEGER.fullmatch(str(key)) for key in saved)
        result = {}
        for text, value in saved.items():
            key = keys.get(str(text), int(text) if numbers else text)
            result[key] = _retyped(value, present.get(key))
        kept = {key: value for key, value in present.items() if key not in result}
        return result | {key: value for key, value in kept.items() if _is_empty(value)}
    if isinstance(saved, list) and isinstance(present, list):
        others = [*present, *[None] * len(saved)]
        return [_retyped(value, other) for value, other in zip(saved, others, strict=False)]
    if isinstance(saved, dict) and isinstance(present, list):
        # Where a list has empty containers in it, the others come by their index.
        rest = [value for index, value in enumerate(present) if index not in saved]
        if saved.keys() <= set(range(len(present))) and all(map(_is_empty, rest)):
            return [
                _retyped(saved[index], value) if index in saved else value
                for index, value in enumerate(present)
            ]
    return saved


def _is_empty(value: Any) -> bool:
    """Whether a container holds nothing, nor do those in it."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return isinstance(value, (list, tuple)) and all(map(_is_empty, value))
