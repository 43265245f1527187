"""Targets of one restore must not share memory, unless they are one array of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np

from asyncckpt.checkpointer.match import Assignment
from asyncckpt.errors import UsageError
from asyncckpt.ports import Target

OVERLAP_WORK = 10_000
"""Candidates that NumPy may try to settle whether two strided targets share memory."""


class _Span(NamedTuple):
    """Memory of one target, and the chunk rows that its pieces start at: equal for tied leaves."""

    start: int
    stop: int
    rows: tuple[int, ...]
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
    # Most targets do not even come near each other: one vectorised look settles it.
    extents = [a.target.span for a in assignments if a.target is not None]
    bounds = np.array([extent for extent in extents if extent is not None], np.int64)
    if not len(bounds):
        return
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    if not np.any(bounds[1:, 0] < np.maximum.accumulate(bounds[:-1, 1])):
        return
    spans = []
    for assignment in assignments:
        target = assignment.target
        if target is not None and target.span is not None:
            rows = tuple(first_rows[array] for array in assignment.arrays)
            spans.append(_Span(*target.span, rows, target, assignment.path))
    spans.sort(key=itemgetter(0, 1))
    open_spans: list[_Span] = []
    for span in spans:
        open_spans = [other for other in open_spans if other.stop > span.start]
        for other in open_spans:
            _check(other, span)
        open_spans.append(span)


def _check(one: _Span, other: _Span) -> None:
    identity = one.target.identity
    tied = identity is not None and identity == other.target.identity and one.rows == other.rows
    if not tied and _share(one.target, other.target):
        raise UsageError(
            f"{one.path} and {other.path}: these targets overlap in memory but are different "
            "arrays in the checkpoint; restore one of them elsewhere",
            path=other.path,
        )


def _share(one: Target, other: Target) -> bool:
    a: Any = one.leaf if one.buffer is None else one.buffer
    b: Any = other.leaf if other.buffer is None else other.buffer
    try:
        # A bound on exact work, which NumPy documents and its stubs know as two constants only.
        return bool(np.shares_memory(a, b, max_work=cast(Any, OVERLAP_WORK)))
    except np.exceptions.TooHardError:
        return True
