"""Parts of a state dict that a checkpoint does not keep, taken from the object's present one.

A checkpoint restores plain containers: a dict instead of a `Counter`, and without attributes such
as `_metadata` of torch's modules. `torch.distributed.checkpoint` also turns every key of a dict
into text and drops empty containers. Torch loads into an existing state dict and so loses none of
this; here the present state dict supplies it.
"""

from __future__ import annotations

import copy
import re
from typing import Any

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def as_it_was(saved: Any, present: Any) -> Any:
    """Return the saved state dict with the key types of the present one.

    Keys that the present dict lacks become integers where its own are integers, or where it has no
    keys and all saved ones read like integers. Empty containers of the present one are kept;
    non-empty ones at its top level, of which nothing was saved, come back empty.
    """
    restored = _retyped(saved, present)
    if isinstance(restored, dict) and isinstance(present, dict):
        for key, value in present.items():
            if key not in restored and isinstance(value, (dict, list)):
                restored[key] = type(value)() if type(value) in (dict, list) else {}
    return restored


def in_kind(saved: Any, present: Any) -> Any:
    """Return the saved state dict in dicts and lists of the present one's classes.

    A container keeps its attributes with its class: `_metadata` of a module's state dict tells
    `load_state_dict` the version of the state, so that it is loaded as of the present version.
    Tuples are not converted, nor is anything without a counterpart. The present one is not changed.
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
    """Return a copy of the present container with these values, a plain one if that fails."""
    try:
        made = copy.copy(present)
        made.clear()
        if not isinstance(made, dict):
            made.extend(values)
            return made
        for name in present.keys() & getattr(made, "__dict__", {}).keys():
            delattr(made, name)  # an item that is an attribute too would keep its present value
        for key, value in values.items():
            made[key] = value  # update() of a Counter would add
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
        # A list with empty containers in it was saved as a dict of the others, by their index.
        rest = [value for index, value in enumerate(present) if index not in saved]
        if saved.keys() <= set(range(len(present))) and all(map(_is_empty, rest)):
            return [
                _retyped(saved[index], value) if index in saved else value
                for index, value in enumerate(present)
            ]
    return saved


def _is_empty(value: Any) -> bool:
    """Return whether a container and all containers in it are empty."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return isinstance(value, (list, tuple)) and all(map(_is_empty, value))
