"""Restored memory becomes leaves: the last conversions, and what immutable targets must equal."""

# Rule 1: what is immutable in a plain target is compared, never replaced silently.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.scalars import scalar_from_array, scalar_kind
from asyncckpt.checkpointer.match import Assignment
from asyncckpt.ports import ArrayAdapter, ShardedAdapter, Target
from asyncckpt.spec import DTYPES, ArraySpec, Box
from asyncckpt.stages.place import cast_values, python_value, same_bits

Memory = npt.NDArray[Any]


class Leaves:
    """Makes the leaves of one restore. Used in worker threads, by one at a time per leaf.

    Args:
        extra: facts beside the values, by ordinal of the saved leaf.
        framework: gives the adapter for a leaf without a target.
        into: whether targets are filled in place.
        stateful: paths of the objects whose `load_state_dict` gets what is below them.

    Attributes:
        changed: paths of immutable leaves of a plain target that differ from the checkpoint.
    """

    def __init__(
        self,
        extra: Mapping[int, Mapping[str, Any]],
        framework: Callable[[Assignment], ArrayAdapter],
        *,
        into: bool,
        stateful: Sequence[str],
    ) -> None:
        self._extra = extra
        self._framework = framework
        self._into = into
        self._stateful = stateful
        self.changed: list[str] = []

    def writes(self, assignment: Assignment) -> bool:
        """Whether finishing the leaf writes to memory of the caller."""
        target = assignment.target
        if target is None or not self._into:
            return False
        return target.buffer is not None or bool(target.buffers) or target.fill

    def convert(self, assignment: Assignment) -> None:
        """The values are in the target's dtype, so that nothing can fail to fit any more."""
        target, spec = assignment.target, assignment.spec
        if target is None or spec is None or target.spec.dtype == spec.dtype:
            return
        if target.boxes is None:
            assignment.values = cast_values(assignment.path, assignment.values, target.spec.dtype)
        else:
            assignment.parts = [
                cast_values(assignment.path, part, target.spec.dtype) for part in assignment.parts
            ]
        assignment.spec = ArraySpec(spec.shape, target.spec.dtype)

    def value(self, assignment: Assignment) -> Any:
        """The leaf of an array."""
        spec, values, want = assignment.spec, assignment.values, assignment.wanted
        assert spec is not None
        if want is None or want.target is None:
            extra = self._extra.get(assignment.saved, {})
            as_python = python_value(values, extra)
            if want is None:
                if as_python is not None:
                    return as_python
                return self._framework(assignment).leaf(assignment.path, values, extra)
            if isinstance(as_python, bytes):
                return as_python
            kind = scalar_kind(type(want.leaf))
            assert kind is not None
            return self._immutable(assignment, scalar_from_array(want.path, values, kind))
        assert want.adapter is not None
        target = want.target
        if self._into:
            if target.boxes == ():
                return want.leaf  # no element of it is held here: nothing to fill or to compare
            if target.buffers:
                return _sharded(want.adapter).place_parts(target, self._filled(assignment, target))
            if target.buffer is not None:
                if values is not target.buffer:
                    cast_values(want.path, values, target.spec.dtype, target.buffer)
                return want.adapter.place(target, target.buffer)
            if not target.fill:
                return self._compare(assignment, target)
        self.convert(assignment)
        return self._placed(assignment, target)

    def _filled(self, assignment: Assignment, target: Target) -> Sequence[Memory]:
        for part, buffer in zip(assignment.parts, target.buffers, strict=True):
            if part is not buffer:
                cast_values(assignment.path, part, target.spec.dtype, buffer)
        return target.buffers

    def _placed(self, assignment: Assignment, target: Target) -> Any:
        assert assignment.wanted is not None and assignment.wanted.adapter is not None
        adapter = assignment.wanted.adapter
        if target.boxes is None:
            return adapter.place(target, assignment.values)
        return _sharded(adapter).place_parts(target, assignment.parts)

    def _compare(self, assignment: Assignment, target: Target) -> Any:
        want = assignment.wanted
        assert want is not None and want.adapter is not None
        self.convert(assignment)
        if self._inside_stateful(want.path):
            return self._placed(assignment, target)
        source = want.adapter.source(want.path, want.leaf)
        boxes, memories = target.boxes, assignment.parts
        if boxes is None:
            boxes, memories = (Box.whole(source.spec.shape),), [assignment.values]
        for box, values in zip(boxes, memories, strict=True):
            present = np.empty(box.shape, DTYPES[source.spec.dtype])
            if source.view is not None:
                np.copyto(present, source.view)
            else:
                want.adapter.fetch(source, box, present)
            if not same_bits(present, values):
                self.changed.append(want.path)
                break
        return want.leaf

    def _immutable(self, assignment: Assignment, value: Any) -> Any:
        want = assignment.wanted
        assert want is not None
        if self._into and not self._inside_stateful(want.path) and value != want.leaf:
            self.changed.append(want.path)
        return value

    def _inside_stateful(self, path: str) -> bool:
        return any(
            not root or path == root or path.startswith(f"{root}/") for root in self._stateful
        )

    def scalar(self, assignment: Assignment) -> Any:
        """The leaf of a scalar of the record, which may go into a rank-0 array."""
        want, target = assignment.wanted, assignment.target
        if want is None or target is None:
            return assignment.scalar
        assert want.adapter is not None
        if target.boxes is not None:
            assignment.parts = [assignment.values] * len(target.boxes)
        if self._into:
            if target.boxes == ():
                return want.leaf
            if target.buffers:
                return _sharded(want.adapter).place_parts(target, self._filled(assignment, target))
            if target.buffer is not None:
                np.copyto(target.buffer, assignment.values)
                return want.adapter.place(target, target.buffer)
            if not target.fill:
                assignment.spec = ArraySpec((), target.spec.dtype)
                try:
                    return self._compare(assignment, target)
                finally:
                    assignment.spec = None
        return self._placed(assignment, target)


def _sharded(adapter: ArrayAdapter) -> ShardedAdapter:
    assert isinstance(adapter, ShardedAdapter), f"{adapter.name} made a target with boxes"
    return adapter
