"""The order of one process's calls, compared with that of the others."""

# Rule 1: after a round in which processes made different calls, one of them is behind: it has yet
#   to make calls that have already failed on the others. It skips these, so that its next call
#   meets the next call of the others.
# Rule 2: only one of two processes may skip calls, or they would stay equally far apart. Both see
#   the same calls and apply the same rule.
# Rule 3: until the order of the calls shows which process is behind, it is the one whose call has
#   the lower name: of two saves, the one of the lower step.

from __future__ import annotations


class CallOrder:
    """Calls of one kind that this process must skip to be in step with the others.

    Rounds update it, synchronously, as they end.
    """

    def __init__(self) -> None:
        self._own: list[str] = []
        self._theirs: list[str] = []
        self._due: list[str] = []

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
        """Return whether this process must skip its next call, of this name."""
        if name not in self._due:
            return False
        del self._due[: self._due.index(name) + 1]
        return True


def _order(name: str) -> tuple[int, str]:
    # By step first; a name contains one number at most.
    return int("".join(filter(str.isdigit, name)) or 0), name
