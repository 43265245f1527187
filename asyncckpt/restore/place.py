"""The place stage: make leaves of the requested types from checked values in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import check_parts
from asyncckpt.adapters.python import KINDS, NUMBERS, same_number, scalar_from_array
from asyncckpt.checkpoint.casts import castable, lost_value, may_lose
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.errors import AsyncCheckpointError, DtypeMismatchError, RestoreError
from asyncckpt.log import logger
from asyncckpt.ports import FrameworkAdapter, PlaceAll
from asyncckpt.restore.matched import NO_FACTS, LeafRestore, Matching
from asyncckpt.restore.request import RestoreRequest, enclosing, is_filled
from asyncckpt.spec import DTYPES, numeric_class
from asyncckpt.tree import where

Memory = npt.NDArray[Any]


class Placement:
    """The place stage of one restore, called in worker threads once per leaf."""

    def __init__(self, opened: OpenCheckpoint, request: RestoreRequest) -> None:
        self._opened = opened
        self._request = request
        self._into = request.mode == "into"

    def writes(self, leaf: LeafRestore) -> bool:
        """Return whether placing the leaf writes to the caller's memory."""
        if not self._into or leaf.target is None:
            return False
        return is_filled(leaf.target) and leaf.target.boxes != ()

    def written(self, matching: Matching) -> list[str]:
        """Return the paths of the targets whose own memory a restore fills."""
        return [leaf.path for leaf in matching.leaves if self.writes(leaf)]

    def converted(self, leaf: LeafRestore, parts: Sequence[Memory]) -> Sequence[Memory]:
        """Return the values in the dtype of the leaf's target, if it has one.

        Raises:
            DtypeMismatchError: a value does not fit; names the path and one such value.
        """
        target = leaf.target
        if target is None or leaf.spec is None or target.spec.dtype == leaf.spec.dtype:
            return parts
        return [
            part
            if part.dtype == DTYPES[target.spec.dtype]
            else cast_values(leaf.path, part, target.spec.dtype)
            for part in parts
        ]

    def place_all(
        self, leaves: Sequence[LeafRestore], parts: Sequence[Sequence[Memory]]
    ) -> list[Any]:
        """Return the leaves, as `place`; those that their framework makes at once, in one call."""
        made: list[Any] = [None] * len(leaves)
        groups: dict[PlaceAll, list[int]] = {}
        for number, leaf in enumerate(leaves):
            target = leaf.target
            if target is None or target.place_all is None:
                made[number] = self.place(leaf, parts[number])
            else:
                groups.setdefault(target.place_all, []).append(number)
        for place_all, numbers in groups.items():
            found = self._at_once(place_all, [(leaves[n], parts[n]) for n in numbers])
            if found is None:  # outside the handler, whose traceback keeps the memory of the batch
                found = [self.place(leaves[number], parts[number]) for number in numbers]
            for number, value in zip(numbers, found, strict=True):
                made[number] = value
        return made

    def _at_once(
        self, place_all: PlaceAll, pairs: Sequence[tuple[LeafRestore, Sequence[Memory]]]
    ) -> Sequence[Any] | None:
        """Return leaves that are made by one call; None if that fails and no leaf is to blame."""
        targets, values = [], []
        try:
            for leaf, parts in pairs:
                (array,) = self.converted(leaf, parts)
                assert leaf.target is not None
                check_parts(leaf.target, [array])
                targets.append(leaf.target)
                values.append(array)
            return place_all(targets, values)
        except AsyncCheckpointError:  # it names the leaf
            raise
        except Exception:
            logger.info("%d leaves are made one by one", len(pairs), exc_info=True)
            return None

    def place(self, leaf: LeafRestore, parts: Sequence[Memory]) -> Any:
        """Return the leaf, which owns the memory of `parts` from here on.

        `parts` are one array, an array per box of the target, or none for a scalar of the record.

        Raises:
            RestoreError: the framework could not make the leaf; names it and the checkpoint.
        """
        try:
            return self._place(leaf, parts)
        except AsyncCheckpointError:
            raise
        except Exception as error:
            location = self._opened.location
            raise RestoreError(
                f"{where(leaf.path)}: the values were read from {location}, but the leaf could not "
                f"be made from them: {type(error).__name__}: {error}; the checkpoint is intact: "
                "restore without like= for NumPy arrays",
                path=leaf.path,
                stage="place",
                location=location,
            ) from error

    def _place(self, leaf: LeafRestore, parts: Sequence[Memory]) -> Any:
        want, target = leaf.want, leaf.target
        if want is None or target is None:
            return self._without_target(leaf, parts)
        adapter, boxes = want.adapter, target.boxes
        assert adapter is not None
        if leaf.spec is None:
            parts = [leaf.scalar] * (1 if boxes is None else len(boxes))
        if self._into and target.fill and boxes == ():
            return want.leaf  # this process holds no element of it
        if not self._into or not target.buffers:
            parts = self.converted(leaf, parts)
            check_parts(target, parts)
            return adapter.place(target, parts)
        for part, buffer in zip(parts, target.buffers, strict=True):
            if part is not buffer:
                cast_values(leaf.path, part, target.spec.dtype, buffer)
        return adapter.place(target, target.buffers)

    def _without_target(self, leaf: LeafRestore, parts: Sequence[Memory]) -> Any:
        if leaf.spec is None:
            return leaf.scalar
        (values,) = parts
        extra = self._opened.leaves.extra.get(leaf.saved, NO_FACTS)
        value = python_value(values, extra) if extra else None
        if leaf.want is None:
            if value is not None:
                return value
            adapter = self._adapter(leaf) if self._request.stateful else self._request.framework
            return adapter.leaf(leaf.path, values, extra)
        if isinstance(value, bytes):
            return value
        kind = KINDS.get(type(leaf.want.leaf))
        assert kind is not None
        if self._request.cast and values.shape == ():
            same = same_number(values.item(), kind)
            if same is not None:
                return same
        return scalar_from_array(leaf.path, values, kind)

    def _adapter(self, leaf: LeafRestore) -> FrameworkAdapter:
        """Return the adapter that makes a leaf that the present state dict of its object lacks.

        The object's class may determine it (a PyTorch optimizer takes tensors); otherwise it is the
        adapter that saved the leaf (a data loader takes the NumPy arrays that it gave).
        """
        request = self._request
        root = enclosing(leaf.path, request.stateful)
        expected = None if root is None else request.stateful[root].adapter
        if expected is not None:
            return expected
        return request.loaded.get(self._opened.leaves.kind[leaf.saved], request.framework)


def array_from_scalar(path: str, value: object, dtype: str) -> npt.NDArray[Any]:
    """Return a rank-0 array of this zarr dtype with this value; floats are rounded.

    Raises:
        DtypeMismatchError: the value has another numeric class or does not fit.
    """
    kind = type(value).__name__
    if numeric_class(dtype) != kind:
        raise DtypeMismatchError(
            f"{path}: the checkpoint holds the {kind} {value!r:.40}, the target wants {dtype}; "
            f"pass a target of type {kind}",
            path=path,
            expected=dtype,
            found=kind,
        )
    return cast_values(path, np.asarray(value), dtype)


def cast_values(
    path: str, values: npt.NDArray[Any], dtype: str, out: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """Return the values in another dtype, in `out` if given. May lose precision. Blocking.

    Raises:
        DtypeMismatchError: a value does not fit into the dtype; names the path and one such value.
    """
    source = values.dtype.name
    if out is None:
        out = np.empty(values.shape, DTYPES[dtype])
    assert out.dtype == DTYPES[dtype]
    if values.dtype == object:  # an int of more than 64 bits
        source, fault = "int", values.item()
    else:
        fault = lost_value(values, source, dtype) if may_lose(source, dtype) else None
    if fault is None:
        with np.errstate(over="ignore", invalid="ignore"):
            if numeric_class(dtype) in ("int", "float"):
                values = values.real
            np.copyto(out, castable(values, dtype), casting="unsafe")
        fault = None if source == dtype else _overflow(values, out)
    if fault is not None:
        raise DtypeMismatchError(
            f"{path}: {fault!r:.80} of the checkpoint does not fit into {dtype}; restore it as "
            f"{source}",
            path=path,
            stage="place",
            expected=dtype,
            found=source,
        )
    return out


def _overflow(values: npt.NDArray[Any], cast: npt.NDArray[Any]) -> Any:
    """Return a finite value, or part of one, that a cast turned into an infinity or a NaN."""
    if numeric_class(cast.dtype.name) not in ("float", "complex") or np.isfinite(cast).all():
        return None
    for part in (np.real, np.imag):
        before = part(values)
        lost = before[np.isfinite(before) & ~np.isfinite(part(cast))]
        if lost.size:
            return lost[:1].astype(np.float64).item()
    return None


def python_value(values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
    """Return the Python value that an array stores, or None.

    asyncckpt stores long `bytes` as arrays; other libraries, all numbers.
    """
    kind = extra.get("python")
    if kind == "bytes":
        return values.tobytes()
    number = NUMBERS.get(kind) if isinstance(kind, str) else None
    return None if number is None or values.shape else number(values[()])
