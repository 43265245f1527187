"""Which steps a run keeps. Policies are pure: they see steps and name those to delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncckpt.errors import UsageError


class Retention(Protocol):
    """Decides which committed steps stay."""

    def keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, out of `steps` in ascending order."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the `n` highest steps."""

    n: int

    def __post_init__(self) -> None:
        """Refuse a count that would keep nothing."""
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise UsageError(f"KeepLast({self.n!r}): pass the number of steps to keep, at least 1")

    def keep(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The `n` highest of the steps."""
        return set(sorted(steps)[-self.n :])
