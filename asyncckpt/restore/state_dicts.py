"""What a checkpoint does not keep of a state dict, taken from the one that the object has now.

A checkpoint has plain containers: it says that there was a `Counter`, and makes none, nor does it
keep attributes such as `_metadata` of torch's modules. `torch.distributed.checkpoint` also turns
every key of a dict into text and leaves out containers that hold nothing. Loading into a state dict
that is there, as torch does, gives all of this back; here the present one says what there was.
"""

from __future__ import annotations

import copy
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


def in_kind(saved: Any, present: Any) -> Any:
    """The saved state dict in dicts and lists of the kinds that the present one has.

    With its kind a container keeps its attributes: the `_metadata` of a module's state dict tells
    `load_state_dict` of which version the state is, so that it counts as of the present one.
    Tuples stay as they are, and so does what has no counterpart. The present one is not changed.
    """
    if isinstance(saved, dict) and isinstance(present, dict):
        values: Any = {key: in_kind(value, present.get(key)) for key, value in saved.items()}
        return values if type(present) is dict else _remade(values, present)
    if isinstance(saved, list) and isinstance(present, list):
        others = [*present, *[None] * len(saved)]
        values = [in_kind(value, other) for value, other in zip(saved, others, strict=False)]
        return values if type(present) is list else _remade(values, present)
    return saved


def _remade(values: Any, present: Any) -> Any:
    """A container like the present one with these values; the plain one if its class objects."""
    try:
        made = copy.copy(present)
        made.clear()
        if not isinstance(made, dict):
            made.extend(values)
            return made
        for name in present.keys() & getattr(made, "__dict__", {}).keys():
            delattr(made, name)  # items that are attributes as well, with their present values
        for key, value in values.items():
            made[key] = value  # not update(), which counts in a Counter
    except Exception:
        return values
    return made


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
