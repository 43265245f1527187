"""Retention policies: pure functions of steps and metrics that name the steps to keep.

keep = KeepLast(3) | KeepEvery(1000) | KeepBest(2, "loss")
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from numbers import Integral
from typing import Any, ClassVar, Literal, Protocol

from asyncckpt.errors import UsageError
from asyncckpt.pickled import PickledByName

Metrics = Mapping[int, Mapping[str, float]]
"""The numbers given to `save`, by step and name; `{}` for steps saved without numbers."""


class Retention(Protocol):
    """Policy that decides which committed steps to keep.

    A policy whose attribute `uses_metrics` is False gets no metrics, so they need not be read.
    """

    def keep(self, steps: Sequence[int], metrics: Metrics) -> Iterable[int]:
        """Return the steps to keep.

        Args:
            steps: all steps, the newest last, except those that another job saves meanwhile above
                the step just saved. They ascend, unless the run went back to an earlier step: then
                the steps saved since follow the older ones.
            metrics: the numbers given to `save`.
        """
        ...


class _Policy(PickledByName, ABC):
    """Base of policies that ``|`` joins with each other and with a user's own."""

    __slots__ = ()

    @abstractmethod
    def keep(self, steps: Sequence[int], metrics: Metrics) -> set[int]: ...

    def __or__(self, other: Retention) -> KeepAny:
        return KeepAny((*_parts(self), *_parts(other))) if is_policy(other) else NotImplemented

    def __ror__(self, other: Retention) -> KeepAny:
        return KeepAny((*_parts(other), *_parts(self))) if is_policy(other) else NotImplemented


@dataclass(frozen=True, slots=True)
class KeepLast(_Policy):
    """Keep the `n` newest steps: the highest ones, unless the run went back to an earlier step."""

    uses_metrics: ClassVar[bool] = False

    n: int

    def __post_init__(self) -> None:
        """Refuse a count that would keep nothing."""
        if not _is_count(self.n):
            raise UsageError(f"KeepLast({self.n!r}): pass the number of steps to keep, at least 1")

    def keep(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """Return the last `n` of the steps."""
        return set(steps[-self.n :])


@dataclass(frozen=True, slots=True)
class KeepEvery(_Policy):
    """Keep the steps that are multiples of `k`, including step 0.

    Unlike every k-th save, these do not depend on where the run was resumed.
    """

    uses_metrics: ClassVar[bool] = False

    k: int

    def __post_init__(self) -> None:
        """Refuse a distance below 1."""
        if not _is_count(self.k):
            raise UsageError(
                f"KeepEvery({self.k!r}): pass the distance between steps to keep, at least 1"
            )

    def keep(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """Return the multiples of `k` among the steps."""
        return {step for step in steps if step % self.k == 0}


@dataclass(frozen=True, slots=True)
class KeepBest(_Policy):
    """Keep the `n` steps with the best values of one metric; of equal values the newer step wins.

    A step that was saved without the metric, or with NaN, is never among the best. If no step has
    a value, all are kept: a misspelt name deletes nothing, and the report of each save says so.

    Attributes:
        n: number of steps to keep.
        metric: a name among the `metrics` given to `save`.
        mode: whether the smallest (``"min"``) or the largest (``"max"``) values are best.
    """

    uses_metrics: ClassVar[bool] = True

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Refuse a count below 1, and invalid names and modes."""
        if not _is_count(self.n):
            raise UsageError(
                f"KeepBest({self.n!r}, {self.metric!r}): pass the number of steps to keep, at "
                "least 1"
            )
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(
                f"KeepBest({self.n}, {self.metric!r}): pass the name of a metric given to save"
            )
        if self.mode not in ("min", "max"):
            raise UsageError(
                f"KeepBest({self.n}, {self.metric!r}, {self.mode!r}): pass mode='min' if small "
                "values are good, or mode='max'"
            )

    def keep(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """Return the `n` best of the steps; all of them if none has a value."""
        values = self.values(steps, metrics)
        sign = 1.0 if self.mode == "min" else -1.0
        # A stable sort, from the newest step: of equal values the newer one comes first.
        ranked = sorted(reversed(values), key=lambda step: sign * values[step])
        return set(ranked[: self.n] or steps)

    def values(self, steps: Sequence[int], metrics: Metrics) -> dict[int, float]:
        """Return the metric of the steps that have a number for it."""
        found = {step: metrics.get(step, {}).get(self.metric, math.nan) for step in steps}
        return {step: value for step, value in found.items() if not math.isnan(value)}


@dataclass(frozen=True, slots=True, repr=False)
class KeepAny(_Policy):
    """Keep the steps that any of several policies keeps; the result of ``|``."""

    policies: tuple[Retention, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    @property
    def uses_metrics(self) -> bool:
        """Whether any of the policies uses metrics."""
        return any(map(uses_metrics, self.policies))

    def keep(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """Return the steps that any of the policies keeps."""
        return set[int]().union(*(policy.keep(steps, metrics) for policy in self.policies))


def uses_metrics(policy: Retention) -> bool:
    """Return whether a policy uses metrics; True if it does not say."""
    return bool(getattr(policy, "uses_metrics", True))


def decided(policy: Retention, steps: Sequence[int], metrics: Metrics) -> tuple[set[int], set[int]]:
    """Return the steps to keep, and those of them that a policy may keep in place of others.

    Raises:
        TypeError: a policy returned no steps, so the steps to keep are unknown.
    """
    kept, displacing = set[int](), set[int]()
    for part in _parts(policy):
        answer = _steps(part.keep(steps, metrics))
        kept |= answer
        if type(part) is not KeepEvery:  # which keeps a step whatever the others are
            displacing |= answer
    return kept, displacing


def concerns(policy: Retention, steps: Sequence[int], metrics: Metrics) -> list[str]:
    """Return warnings about the policy's decision on these steps."""
    if isinstance(policy, KeepAny):
        return [text for part in policy.policies for text in concerns(part, steps, metrics)]
    if not isinstance(policy, KeepBest) or policy.values(steps, metrics):
        return []
    names = sorted({name for step in steps for name in metrics.get(step, ())})
    found = f"they have {', '.join(map(repr, names))}" if names else "they have no metrics"
    return [
        f"{policy!r} keeps every step, because none has a number for {policy.metric!r}: {found}; "
        f"pass metrics={{{policy.metric!r}: …}} to save"
    ]


def _steps(answer: Any) -> set[int]:
    """Return the steps that a policy returned, as any iterable; refuse None, text and masks."""
    if not isinstance(answer, Iterable):
        raise TypeError(f"keep() returned {answer!r:.80}, not the steps to keep")
    steps = list(answer)
    for step in steps:
        if not isinstance(step, Integral) or isinstance(step, bool):
            raise TypeError(f"keep() returned {step!r:.80} among the steps to keep")
    return set(map(int, steps))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_policy(value: object) -> bool:
    """Return whether this is an instance with an ordinary method `keep`."""
    keep = getattr(value, "keep", None)
    return callable(keep) and not isinstance(value, type) and not iscoroutinefunction(keep)


def _parts(policy: Retention) -> tuple[Retention, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)
