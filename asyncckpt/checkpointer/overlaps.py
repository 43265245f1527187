"""Targets of one restore must not share memory, unless they are one array of the checkpoint."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np

from asyncckpt.adapters.arrays import host_place
from asyncckpt.checkpointer.match import Assignment
from asyncckpt.errors import UsageError
from asyncckpt.ports import Target

OVERLAP_WORK = 10_000
"""Candidates that NumPy may try to settle whether two strided targets share memory."""


class _Span(NamedTuple):
    """Memory that a restore fills, and the chunk rows that its pieces start at.

    The rows are equal for tied leaves.
    """

    start: int
    stop: int
    rows: tuple[int, ...]
    identity: Hashable | None
    memory: Any
    target: Target
    path: str


def check_overlaps(assignments: Sequence[Assignment], first_rows: Sequence[int]) -> None:
    """No two targets share memory that are not tied in the checkpoint.

    Args:
        assignments: what is restored in place.
        first_rows: first chunk row of every array.

    Raises:
        UsageError: names both leaves.
    """
    targets = [(a, a.target) for a in assignments if a.target is not None]
    buffers = [t.buffer for _, t in targets if t.span is None and t.buffer is not None]
    owners = {id(buffer) for buffer in buffers}
    if len(owners) == len(buffers) and not any(t.span or t.buffers for _, t in targets):
        return  # each has memory of its own
    places = [(a, t, place) for a, t in targets for place in _places(t)]
    # Most targets do not even come near each other: one vectorised look settles it.
    bounds = np.array([extent for _, _, (extent, _, _) in places], np.int64).reshape(-1, 2)
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    if not np.any(bounds[1:, 0] < np.maximum.accumulate(bounds[:-1, 1])):
        return
    spans: list[_Span] = []
    for assignment, target, (extent, identity, memory) in places:
        rows = tuple(first_rows[array] for array in assignment.arrays)
        spans.append(_Span(*extent, rows, identity, memory, target, assignment.path))
    spans.sort(key=itemgetter(0, 1))
    open_spans: list[_Span] = []
    for span in spans:
        open_spans = [other for other in open_spans if other.stop > span.start]
        for other in open_spans:
            _check(other, span)
        open_spans.append(span)


def _check(one: _Span, other: _Span) -> None:
    same = one.identity is not None and one.identity == other.identity
    tied = same and one.rows == other.rows
    if one.target is other.target or tied:
        return
    if _share(one.memory, other.memory):
        raise UsageError(
            f"{one.path} and {other.path}: these targets overlap in memory but are different "
            "arrays in the checkpoint; restore one of them elsewhere",
            path=other.path,
        )


def _places(target: Target) -> list[tuple[tuple[int, int], Hashable | None, Any]]:
    """Byte span, identity and memory of everything that is filled for a target."""
    name = target.spec.dtype
    if target.buffers:
        return [(host_place(b, name)[0], target.identity, b) for b in target.buffers]
    if target.span is not None:
        memory = target.leaf if target.buffer is None else target.buffer
        return [(target.span, target.identity, memory)]
    if target.buffer is None:
        return []
    return [(*host_place(target.buffer, name), target.buffer)]


def _share(a: Any, b: Any) -> bool:
    try:
        # A bound on exact work, which NumPy documents and its stubs know as two constants only.
        return bool(np.shares_memory(a, b, max_work=cast(Any, OVERLAP_WORK)))
    except np.exceptions.TooHardError:
        return True
