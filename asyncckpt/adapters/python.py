"""Python scalars: their kinds, and conversion from and to rank-0 arrays.

A scalar is a leaf of exactly the type int, float, bool, complex, str or bytes. Subclasses are
refused: an enum member, for example, would be restored as a plain int.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt

from asyncckpt.errors import DtypeMismatchError, UnsupportedLeafError
from asyncckpt.format.scalars import Scalar
from asyncckpt.spec import numeric_class

KINDS: Final[dict[type, str]] = {
    kind: kind.__name__ for kind in (int, float, bool, complex, str, bytes)
}
"""Kinds of scalars, by exact type."""

NUMBERS: Final[dict[str, Callable[[Any], Scalar]]] = {
    kind.__name__: kind for kind in (bool, int, float, complex)
}
"""Types of Python numbers, by name."""

_TORCH_SETTING: Final = (
    "store str(value); if a module or optimizer has it in its state dict, convert it there, with "
    "register_state_dict_post_hook(), and back with register_load_state_dict_pre_hook()"
)

_ADVICE: Final = {
    "torch.dtype": _TORCH_SETTING,
    "torch.device": _TORCH_SETTING,
    "torch._C.Generator": "store get_state(), a tensor, and pass it to set_state() after restoring",
    "numpy.random._generator.Generator": (
        "store bit_generator.state, a dict, and assign it to bit_generator.state after restoring"
    ),
    "jax.sharding.NamedSharding": "pass jax.ShapeDtypeStruct(shape, dtype, sharding=...)",
}
"""Advice for unsupported leaves, by type name."""


def unsupported(path: str, leaf: object, verb: str = "stored") -> UnsupportedLeafError:
    """Return the error for a leaf that is not a scalar and has no adapter."""
    kind = type(leaf)
    name = f"{kind.__module__}.{kind.__qualname__}"
    base = next((base for base in KINDS if isinstance(leaf, base)), None)
    if name in _ADVICE:
        advice = _ADVICE[name]
    elif isinstance(leaf, enum.Enum):
        advice = "store its value (member.value), and make the member from it after restoring"
    elif base is not None:
        advice = f"it is a subclass of {base.__name__}: store {base.__name__}(value)"
    elif isinstance(leaf, type):
        advice = "classes are not stored; pass an instance"
    elif isinstance(leaf, (set, frozenset)):
        advice = "store sorted(value), a list"
    elif isinstance(leaf, (bytearray, memoryview)):
        advice = "store bytes(value) or np.frombuffer(value, np.uint8)"
    elif callable(leaf):
        advice = (
            "code is not stored; take it out of the tree, mark the dataclass field with "
            "metadata={'static': True}, or save only the arrays, as eqx.filter(tree, eqx.is_array) "
            "of Equinox does"
        )
    else:
        advice = (
            "convert it to an array, a scalar, str or bytes, or give it state_dict() and "
            "load_state_dict()"
        )
    return UnsupportedLeafError(
        f"{path or 'the tree itself'}: a leaf of type {name} cannot be {verb}; {advice}",
        path=path,
        expected="an array, int, float, bool, complex, str or bytes",
        found=name,
    )


def fails_again(call: Callable[[], object]) -> bool:
    """Return whether a call that has failed does so again: else a signal handler had raised."""
    try:
        call()
    except Exception:
        return True
    return False


def unreadable(path: str, leaf: object, error: Exception) -> UnsupportedLeafError:
    """Return the error for an array whose adapter raised this error."""
    kind = type(leaf)
    return UnsupportedLeafError(
        f"{path or 'the tree itself'}: this {kind.__module__}.{kind.__qualname__} cannot be read "
        f"({type(error).__name__}: {str(error)[:200]}); pass a plain array or tensor, and outside "
        "of function transforms such as vmap and grad",
        path=path,
        found=str(error),
    )


def same_number(value: object, kind: str) -> Scalar | None:
    """Return the value as another kind of Python number if it is exactly equal, else None."""
    if type(value).__name__ not in NUMBERS or kind not in NUMBERS:
        return None
    try:
        number = NUMBERS[kind](value)
    except (TypeError, ValueError, OverflowError):  # an imaginary part, NaN, infinity
        return None
    return number if number == value else None


def scalar_from_array(path: str, values: npt.NDArray[Any], kind: str) -> Scalar:
    """Return the Python scalar of `kind` that a rank-0 array holds.

    Raises:
        DtypeMismatchError: the array is not of rank 0, or has another numeric class.
    """
    found = numeric_class(values.dtype.name)
    if values.shape != () or found != kind:
        raise DtypeMismatchError(
            f"{path}: the checkpoint holds a {values.dtype} array of shape {values.shape}, the "
            f"target wants a Python {kind}; pass an array of the saved shape and dtype",
            path=path,
            expected=kind,
            found=f"{values.dtype}{list(values.shape)}",
        )
    return NUMBERS[kind](values)
