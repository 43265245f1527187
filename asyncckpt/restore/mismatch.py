"""Mismatches between a checkpoint and a target, collected so that one error lists all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.errors import (
    DtypeMismatchError,
    MismatchError,
    ShapeMismatchError,
    TreeMismatchError,
)
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import where

LISTED = 20
"""Most mismatches that one error lists; it counts the rest."""

_ADVICE: Mapping[type[MismatchError], str] = {
    TreeMismatchError: "Pass strict=False to restore what both have, or choose with include=.",
    ShapeMismatchError: "Pass a target of the saved shape, or leave the path out with include=.",
    DtypeMismatchError: "Pass a target of the saved dtype, or leave the path out with include=.",
}

NOT_REPLACEABLE = (
    "Use restore(like=...), put the leaf into a dict or list, or leave the path out with include=."
)
"""Advice for an immutable leaf in an immutable container."""

OTHER_STATE = "Pass an object built as the saved one was, or leave the path out with include=."
"""Advice for an object whose state has other keys."""

OTHER_SHAPE = (
    "Pass an object of the saved shapes or leave it out with include=; or fill a part of a larger "
    "tensor: pass a state dict as the target, with a view in its place, as "
    'model.state_dict() | {"weight": model.weight.data[:1000]}.'
)
"""Advice for a leaf of an object whose shape differs."""

UNWRAP = (
    "The keys differ only by the name of a wrapper, _orig_mod of torch.compile or module of "
    "DistributedDataParallel: pass the module inside it (compiled._orig_mod, ddp.module) to save "
    "and restore, or a target that is wrapped as the saved module was."
)
"""Advice for a module whose keys differ only by these names."""

USE_RESTORE_INTO = (
    "restore(like=...) fills only what a state dict has now: use restore_into(), which gives "
    "objects with load_state_dict all that was saved for them."
)
"""Advice for leaves that the state dict of a fresh object lacks."""


class Mismatches:
    """The mismatches of one restore."""

    def __init__(self) -> None:
        self._found: list[tuple[MismatchError, str]] = []

    def add(
        self,
        kind: type[MismatchError],
        path: str,
        message: str,
        *,
        expected: Any = None,
        found: Any = None,
        advice: str = "",
    ) -> None:
        """Note one mismatch; `message` says what differs at `path`."""
        error = kind(f"{where(path)}: {message}", path=path, expected=expected, found=found)
        self.add_error(error, advice)

    def add_error(self, error: MismatchError, advice: str = "") -> None:
        """Note a mismatch that names its path."""
        self._found.append((error, advice or _ADVICE[type(error)]))

    def raise_any(self, location: str) -> None:
        """Raise one error for all mismatches, if any, of their common subclass."""
        if not self._found:
            return
        errors = [error for error, _ in self._found]
        advice = " ".join(dict.fromkeys(advice for _, advice in self._found))
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else MismatchError
        if len(errors) == 1:
            (only,) = errors
            message = f"{only}; {location}: nothing was read. {advice}"
            expected, found = only.expected, only.found
        else:
            lines = [f"  {error}" for error in errors[:LISTED]]
            if len(errors) > LISTED:
                lines.append(f"  … and {len(errors) - LISTED} more")
            message = (
                f"{location}: {len(errors)} leaves do not fit the target; nothing was read. "
                f"{advice}\n" + "\n".join(lines)
            )
            expected = [error.expected for error in errors]
            found = [error.found for error in errors]
        raise kind(
            message,
            path=errors[0].path,
            stage="plan",
            location=location,
            expected=expected,
            found=found,
        )


def check_array(
    mismatches: Mismatches,
    path: str,
    saved: ArraySpec,
    wanted: ArraySpec,
    facts: tuple[Mapping[str, Any], Mapping[str, Any]],
    cast: bool,
    other_shape: str,
) -> None:
    """Note the first mismatch, if any, between a saved array and an array of the target.

    `facts` are the extra facts of the saved and the wanted array; with `cast`, dtypes may differ.
    `other_shape` is the advice if the shapes differ, if not the usual one.
    """
    have, want = (known.get("prng_impl") for known in facts)
    kind: type[MismatchError] = DtypeMismatchError
    expected, found = want, have
    if have != want and have is not None and want is not None:  # their shapes may differ, too
        message = f"the checkpoint holds PRNG keys of {have}, the target wants {want}"
    elif wanted.shape != saved.shape:
        kind, expected, found = ShapeMismatchError, wanted.shape, saved.shape
        message = f"the checkpoint holds shape {found}, the target wants {expected}"
    elif wanted.dtype != saved.dtype and not cast:
        expected, found = wanted.dtype, saved.dtype
        message = f"the checkpoint holds {found}, the target wants {expected}; cast=True converts"
    elif have == want:
        return
    elif want is None:
        message = f"the checkpoint holds PRNG keys ({have}), the target an array"
    else:
        message = f"the checkpoint holds an array, the target wants PRNG keys ({want})"
    advice = other_shape if kind is ShapeMismatchError else ""
    mismatches.add(kind, path, message, expected=expected, found=found, advice=advice)
