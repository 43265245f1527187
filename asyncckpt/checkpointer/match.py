"""Match: which saved leaf goes where, decided before any payload is read.

Pure: it sees the record and the targets; every mismatch is listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from asyncckpt.adapters.scalars import array_from_scalar
from asyncckpt.errors import (
    DtypeMismatchError,
    MismatchError,
    ShapeMismatchError,
    TreeMismatchError,
)
from asyncckpt.format.record import SCALAR_KINDS, Piece, decode_scalar
from asyncckpt.ports import ArrayAdapter, Target
from asyncckpt.spec import ArraySpec
from asyncckpt.stages.opened import OpenCheckpoint
from asyncckpt.stages.place import numeric_class

LISTED = 20
"""Mismatches written out in one error; the rest is counted."""


@dataclass(slots=True, eq=False)
class Wanted:
    """One leaf of the target: an array with its adapter, or a Python scalar."""

    path: str
    leaf: Any
    adapter: ArrayAdapter | None = None
    target: Target | None = None


@dataclass(slots=True, eq=False)
class Assignment:
    """One saved leaf and what becomes of it.

    Attributes:
        number: ordinal of the target's leaf (of the saved leaf when restoring without a target).
        path: its path.
        saved: ordinal of the saved leaf.
        array: the array that holds it; -1 for scalars of the record.
        pieces: the arrays that hold it, where there are several.
        spec: shape and stored dtype of the leaf, None for scalars.
        wanted: the target, or None.
        scalar: value of a scalar from the record.
        values: host memory of an array, once allocated; a scalar that goes into a rank-0 array.
        parts: the same per box of a target with boxes.
        waiting: fetches that have not ended.
        result: the finished leaf.
    """

    number: int
    path: str
    saved: int
    array: int = -1
    pieces: tuple[Piece, ...] = ()
    spec: ArraySpec | None = None
    wanted: Wanted | None = None
    scalar: Any = None
    values: Any = None
    parts: Sequence[npt.NDArray[Any]] = ()
    waiting: int = 0
    result: Any = None

    @property
    def target(self) -> Target | None:
        """What an adapter makes of it, or None."""
        return None if self.wanted is None else self.wanted.target

    @property
    def arrays(self) -> tuple[int, ...]:
        """All arrays that hold it."""
        return tuple(piece.array for piece in self.pieces) or (self.array,)


@dataclass(slots=True, eq=False)
class Matching:
    """The outcome of matching.

    Attributes:
        assignments: what is restored.
        missing: paths of the target that the checkpoint lacks; of an object with a state dict its
            own.
        unexpected: paths of the checkpoint that the target lacks.
        additions: saved leaves below a stateful object that its present state dict lacks (the
            state of a fresh optimizer).
    """

    assignments: list[Assignment] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    additions: list[Assignment] = field(default_factory=list)


def match(
    opened: OpenCheckpoint,
    paths: Sequence[str],
    wanted: Sequence[Wanted],
    *,
    absent: Sequence[str],
    selected: set[int] | None,
    strict: bool,
    cast: bool,
    free: Callable[[str], bool],
    loose: Callable[[str], bool],
) -> Matching:
    """Which saved leaf goes to which leaf of the target.

    Args:
        opened: the checkpoint.
        paths: path of every saved leaf.
        wanted: the target's leaves.
        absent: paths of the target's objects with a state dict that the checkpoint has nothing for.
        selected: saved leaves chosen by `include`, or None for all.
        strict: missing and unexpected leaves are errors.
        cast: other dtypes are accepted.
        free: whether a path lies in a state dict whose owner decides what fits.
        loose: whether that owner may take arrays of any shape and dtype, too.

    Raises:
        TreeMismatchError: leaves are missing or unexpected.
        ShapeMismatchError: shapes differ.
        DtypeMismatchError: dtypes differ.
        MismatchError: several of these.
    """
    arrays = opened.leaf_arrays()
    place = {path: leaf for leaf, path in enumerate(paths)}
    result = Matching()
    faults: list[MismatchError] = []
    seen = set()
    chosen = {paths[leaf] for leaf in selected} if selected is not None else None
    for number, want in enumerate(wanted):
        if chosen is not None and want.path not in chosen:
            continue
        saved = place.get(want.path)
        if saved is None:
            if not free(want.path):
                result.missing.append(want.path)
            continue
        seen.add(saved)
        if free(want.path) and _is_other(
            opened, want, saved, arrays[saved], loose=loose(want.path)
        ):
            result.additions.append(_saved(opened, want.path, saved, arrays[saved]))
            continue
        assignment = _assign(opened, number, want, saved, arrays[saved], cast, faults)
        result.assignments.append(assignment)
    for leaf, path in enumerate(paths):
        if leaf in seen or (selected is not None and leaf not in selected):
            continue
        if free(path):
            result.additions.append(_saved(opened, path, leaf, arrays[leaf]))
        else:
            result.unexpected.append(path)
    if strict:
        faults += [_absent(path, "target", "checkpoint") for path in result.missing]
        if chosen is None:
            faults += [_without_state(path) for path in absent]
        faults += [_absent(path, "checkpoint", "target") for path in result.unexpected]
    if faults:
        raise _combined(opened.location, faults)
    if chosen is None:
        result.missing += absent
    return result


def _is_other(opened: OpenCheckpoint, want: Wanted, saved: int, array: int, *, loose: bool) -> bool:
    """Whether a leaf of a state dict has become something else, which is no fault there.

    A learning rate of 1 may be 0.5 now, or a tensor, and a replay buffer may have grown. But
    modules and optimizers (not `loose`) have arrays of one shape and dtype.
    """
    if want.target is None and array < 0:
        return opened.leaves.kind[saved] != type(want.leaf).__name__
    if want.target is None or array < 0:
        return True
    pieces = opened.leaves.pieces.get(saved, ())
    return loose and want.target.spec != _spec(opened, array, pieces)


def match_saved(
    opened: OpenCheckpoint, paths: Sequence[str], selected: set[int] | None
) -> list[Assignment]:
    """Assignments for restoring what was saved, without a target."""
    arrays = opened.leaf_arrays()
    return [
        _saved(opened, path, leaf, arrays[leaf])
        for leaf, path in enumerate(paths)
        if selected is None or leaf in selected
    ]


def _absent(path: str, having: str, lacking: str) -> TreeMismatchError:
    wanted = having == "target"
    return TreeMismatchError(
        f"{path}: the {having} has this leaf, the {lacking} does not",
        path=path,
        expected="a leaf" if wanted else "nothing",
        found="nothing" if wanted else "a leaf",
    )


def _without_state(path: str) -> TreeMismatchError:
    return TreeMismatchError(
        f"{path}: the target has an object with a state dict here, the checkpoint has nothing",
        path=path,
        expected="a state dict",
        found="nothing",
    )


def check_framework(
    opened: OpenCheckpoint, assignments: Sequence[Assignment], framework: ArrayAdapter
) -> None:
    """The framework can hold every array as it was saved.

    Raises:
        DtypeMismatchError: lists those that it cannot.
    """
    faults: list[MismatchError] = []
    for assignment in assignments:
        extra = opened.leaves.extra.get(assignment.saved, _NO_FACTS)
        if assignment.spec is None or "python" in extra:
            continue
        fault = framework.refuses(assignment.path, assignment.spec.dtype)
        if fault is not None:
            faults.append(fault)
    if faults:
        raise _combined(opened.location, faults)


def _saved(opened: OpenCheckpoint, path: str, leaf: int, array: int) -> Assignment:
    if array >= 0:
        pieces = opened.leaves.pieces.get(leaf, ())
        return Assignment(leaf, path, leaf, array, pieces, _spec(opened, array, pieces))
    leaves = opened.leaves
    return Assignment(leaf, path, leaf, scalar=decode_scalar(leaves.kind[leaf], leaves.value[leaf]))


def _spec(opened: OpenCheckpoint, array: int, pieces: Sequence[Piece]) -> ArraySpec:
    return opened.leaf_spec(pieces) if pieces else opened.storage(array).spec


def _assign(
    opened: OpenCheckpoint,
    number: int,
    want: Wanted,
    saved: int,
    array: int,
    cast: bool,
    faults: list[MismatchError],
) -> Assignment:
    leaves = opened.leaves
    pieces = leaves.pieces.get(saved, ())
    result = Assignment(number, want.path, saved, array, pieces, wanted=want)
    kind = leaves.kind[saved]
    if kind in SCALAR_KINDS:
        result.scalar = decode_scalar(kind, leaves.value[saved])
        _match_scalar(result, want, faults)
        return result
    spec = result.spec = _spec(opened, array, pieces)
    extra = leaves.extra.get(saved, _NO_FACTS)
    if want.target is None:
        if extra.get("python") == "bytes" and type(want.leaf) is bytes:
            return result
        _match_array_to_scalar(spec, want, faults)
        return result
    target = want.target
    if target.spec.shape != spec.shape:
        faults.append(
            ShapeMismatchError(
                f"{want.path}: the checkpoint holds shape {_shape(spec.shape)}, the target wants "
                f"{_shape(target.spec.shape)}",
                path=want.path,
                expected=target.spec.shape,
                found=spec.shape,
            )
        )
    elif target.spec.dtype != spec.dtype and not cast:
        faults.append(
            DtypeMismatchError(
                f"{want.path}: the checkpoint holds {spec.dtype}, the target wants "
                f"{target.spec.dtype}; cast=True converts",
                path=want.path,
                expected=target.spec.dtype,
                found=spec.dtype,
            )
        )
    elif (fault := _key_fault(extra, target.extra or _NO_FACTS)) is not None:
        faults.append(
            DtypeMismatchError(
                f"{want.path}: {fault}",
                path=want.path,
                expected=(target.extra or _NO_FACTS).get("prng_impl"),
                found=extra.get("prng_impl"),
            )
        )
    return result


_NO_FACTS: Mapping[str, Any] = {}


def _key_fault(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    have, want = saved.get("prng_impl"), wanted.get("prng_impl")
    if have == want:
        return None
    if want is None:
        return f"the checkpoint holds PRNG keys ({have}), the target an array"
    if have is None:
        return f"the checkpoint holds an array, the target wants PRNG keys ({want})"
    return f"the checkpoint holds PRNG keys of {have}, the target wants {want}"


def _match_scalar(result: Assignment, want: Wanted, faults: list[MismatchError]) -> None:
    value = result.scalar
    if want.target is None:
        if type(want.leaf) is not type(value):
            faults.append(
                DtypeMismatchError(
                    f"{want.path}: the checkpoint holds a {type(value).__name__}, the target a "
                    f"{type(want.leaf).__name__}",
                    path=want.path,
                    expected=type(want.leaf).__name__,
                    found=type(value).__name__,
                )
            )
        return
    spec = want.target.spec
    if spec.shape != ():
        faults.append(
            ShapeMismatchError(
                f"{want.path}: the checkpoint holds a {type(value).__name__}, the target wants "
                f"shape {_shape(spec.shape)}",
                path=want.path,
                expected=spec.shape,
                found=(),
            )
        )
        return
    try:
        result.values = array_from_scalar(want.path, value, spec.dtype)
    except DtypeMismatchError as fault:
        faults.append(fault)


def _match_array_to_scalar(spec: ArraySpec, want: Wanted, faults: list[MismatchError]) -> None:
    if spec.shape != () or numeric_class(spec.dtype) != numeric_class(type(want.leaf).__name__):
        faults.append(
            DtypeMismatchError(
                f"{want.path}: the checkpoint holds an array {spec}, the target a "
                f"{type(want.leaf).__name__}",
                path=want.path,
                expected=type(want.leaf).__name__,
                found=str(spec),
            )
        )


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _combined(location: str, faults: list[MismatchError]) -> MismatchError:
    kinds = {type(fault) for fault in faults}
    kind = kinds.pop() if len(kinds) == 1 else MismatchError
    if len(faults) == 1:
        (only,) = faults
        return kind(
            f"{only}; {location}: nothing was read. {_ADVICE[type(only)]}",
            path=only.path,
            stage="plan",
            location=location,
            expected=only.expected,
            found=only.found,
        )
    lines = [f"  {fault}" for fault in faults[:LISTED]]
    if len(faults) > LISTED:
        lines.append(f"  … and {len(faults) - LISTED} more")
    advice = " ".join(dict.fromkeys(_ADVICE[type(fault)] for fault in faults))
    return kind(
        f"{location}: {len(faults)} leaves do not fit the target; nothing was read. {advice}\n"
        + "\n".join(lines),
        path=faults[0].path,
        stage="plan",
        location=location,
        expected=[fault.expected for fault in faults],
        found=[fault.found for fault in faults],
    )


_ADVICE: dict[type[MismatchError], str] = {
    TreeMismatchError: "Pass strict=False to restore what both have, or choose with include=.",
    ShapeMismatchError: ("Pass a target of the saved shape, or leave the path out with include=."),
    DtypeMismatchError: "Pass a target of the saved dtype, or leave the path out with include=.",
    MismatchError: "",
}
