"""The numbers and the order of one process's calls, compared with those of the others."""

# Rule 1: after a round in which processes made different calls, one of them is behind: it has yet
#   to make calls that have already failed on the others. It skips these, so that its next call
#   meets the next call of the others.
# Rule 2: only one of two processes may skip calls, or they would stay equally far apart. Both see
#   the same calls and apply the same rule.
# Rule 3: until the order of the calls shows which process is behind, it is the one whose call has
#   the lower name: of two saves, the one of the lower step.

from __future__ import annotations

import itertools


class CallOrder:
    """Numbers of this process's calls of one kind, and the calls that it must skip.

    Rounds update it, synchronously, as they end.
    """

    def __init__(self) -> None:
        self._counter = itertools.count()
        self._uncounted: list[int] = []
        self._shift = 0  # the missed calls, less the skipped ones
        self._own: list[str] = []
        self._theirs: list[str] = []
        self._due: list[str] = []

    def count(self) -> int:
        """Return the number of the next call. From any thread, also in a signal handler."""
        return next(self._counter)

    def uncount(self, number: int) -> None:
        """Drop the call of this number, which the other processes do not know of."""
        self._uncounted.append(number)

    def numbered(self, number: int) -> int:
        """Return the number of the round of a call."""
        return number + self._shift - sum(dropped < number for dropped in self._uncounted)

    def missed(self) -> None:
        """Note that the other processes have made a call without this one."""
        self._shift += 1

    def agreed(self) -> None:
        """Note that all processes have made the same call, so that none is behind."""
        self._own, self._theirs, self._due = [], [], []

    def differed(self, own: str, theirs: str) -> None:
        """Note the different calls of this and another process in a round, which failed."""
        behind = own in self._theirs  # the other process made this call some rounds ago
        ahead = theirs in self._own
        self._own.append(own)
        self._theirs.append(theirs)
        if behind == ahead:
            if _order(own) < _order(theirs):
                self._due.append(theirs)
            return
        due = self._theirs[self._theirs.index(own) + 1 :] if behind else []
        self.agreed()
        self._due = due

    def skips(self, name: str) -> bool:
        """Return whether this process must skip its next call, of this name; note that it does."""
        if name not in self._due:
            return False
        self._shift -= 1
        del self._due[: self._due.index(name) + 1]
        return True


def _order(name: str) -> tuple[int, str]:
    # By step first; a name contains one number at most.
    return int("".join(filter(str.isdigit, name)) or 0), name
