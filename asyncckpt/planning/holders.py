"""Sets of processes that hold something, each numbered once."""

from __future__ import annotations

from collections.abc import Iterable

Processes = tuple[int, ...]


class Holders:
    """The sets of processes that hold the leaves and shards of one plan.

    A set may have thousands of members. One that comes again as the same object is neither hashed
    nor compared again, so that leaves cost the same in small and in large jobs.

    Args:
        process: this process.
        process_count: number of processes.

    Attributes:
        sets: the distinct sets, sorted, by number.
    """

    def __init__(self, process: int = 0, process_count: int = 1) -> None:
        self.process = process
        self.process_count = process_count
        self.sets: list[Processes] = []
        self._own: list[bool] = []
        self._numbers: dict[Processes, int] = {}
        # The objects are kept with their ids, which others could get otherwise.
        self._seen: dict[int, tuple[Processes | None, int]] = {}

    def number(self, processes: Processes | None) -> int:
        """Return the number of a set; None stands for all processes."""
        seen = self._seen.get(id(processes))
        if seen is not None:
            return seen[1]
        every = range(self.process_count)
        members = tuple(sorted(set(every if processes is None else processes)))
        number = self._numbers.setdefault(members, len(self.sets))
        if number == len(self.sets):
            self.sets.append(members)
            self._own.append(self.process in members)
        self._seen[id(processes)] = processes, number
        return number

    def includes_own(self, number: int) -> bool:
        """Return whether this process is in the set."""
        return self._own[number]

    def common(self, numbers: Iterable[int]) -> int:
        """Return the number of the set of processes that all these sets have in common."""
        distinct = sorted(set(numbers))
        if len(distinct) == 1:
            return distinct[0]
        shared = set.intersection(*(set(self.sets[number]) for number in distinct))
        return self.number(tuple(sorted(shared)))
