"""Keys and classes of a state dict that a checkpoint loses, taken from the object's present one.

Checkpoints hold plain containers: a dict instead of a `Counter`, without attributes such as
`_metadata` of torch's modules. `torch.distributed.checkpoint` also turns dict keys into text and
drops empty containers; it loads into an existing state dict and so loses nothing.
"""

from __future__ import annotations

import copy
import re
from typing import Any

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def with_present_keys(saved: Any, present: Any) -> Any:
    """Return a state dict saved by DCP with the key types and empty containers of the present one.

    Keys that the present dict lacks become integers if its own keys are integers, or if it has no
    keys and all saved keys read like integers. Containers at its top level of which nothing was
    saved are restored empty.
    """
    restored = _retyped(saved, present)
    if isinstance(restored, dict) and isinstance(present, dict):
        for key, value in present.items():
            if key not in restored and isinstance(value, (dict, list)):
                restored[key] = [] if isinstance(value, list) else {}
    return restored


def with_present_classes(saved: Any, present: Any) -> Any:
    """Return the saved state dict in dicts and lists of the present one's classes.

    The attributes of a container are kept, too: `_metadata` of a module's state dict, so that
    `load_state_dict` treats the state as of the present version. Tuples, and containers without a
    counterpart, are not converted. The present state dict is not changed.
    """
    if isinstance(saved, dict) and isinstance(present, dict):
        values: Any = {k: with_present_classes(v, present.get(k)) for k, v in saved.items()}
        return values if type(present) is dict else _remade(values, present)
    if isinstance(saved, list) and isinstance(present, list):
        others = [*present, *[None] * len(saved)]
        values = list(map(with_present_classes, saved, others))
        return values if type(present) is list else _remade(values, present)
    return saved


def _remade(values: Any, present: Any) -> Any:
    """Return a copy of the present container with these values, or a plain one if that fails."""
    try:
        made = copy.copy(present)
        made.clear()
        if not isinstance(made, dict):
            made.extend(values)
            return made
        for name in present.keys() & getattr(made, "__dict__", {}).keys():
            delattr(made, name)  # an item that is also an attribute would keep its present value
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
        return result | {k: v for k, v in present.items() if k not in result and _is_empty(v)}
    if isinstance(saved, list) and isinstance(present, list):
        others = [*present, *[None] * len(saved)]
        return list(map(_retyped, saved, others))
    if isinstance(saved, dict) and isinstance(present, list):
        # A list with empty containers was saved as a dict of its other items by index.
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
