"""The order of the calls of one process, compared with that of the others."""

# Rule 1: after a round in which processes made different calls, one of them is behind: it has still
#   to make calls that have failed already, on the others. It leaves these out of the rounds, and
#   its next call meets the next call of the others.
# Rule 2: only one of two processes may leave out calls, or both would stay as far apart. Both see
#   the same calls, and judge by the same rule.
# Rule 3: until the order of the calls shows which one it is, it is the one with the lower name: of
#   two saves, that of the lower step.

from __future__ import annotations


class CallOrder:
    """Which calls of one kind this process still has to leave out, to be in step with the others.

    State changes are synchronous, and made by the rounds as they end.
    """

    def __init__(self) -> None:
        self._own: list[str] = []
        self._theirs: list[str] = []
        self._due: list[str] = []

    def agreed(self) -> None:
        """Note that all processes have made the same call: none is behind."""
        self._own, self._theirs, self._due = [], [], []

    def differed(self, own: str, theirs: str) -> None:
        """Note a call of this process, and that of another one in the same round, which failed."""
        behind = own in self._theirs  # the other made this call some rounds ago
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

    def leaves_out(self, name: str) -> bool:
        """Return whether this process leaves out its next call, of this name."""
        if name not in self._due:
            return False
        del self._due[: self._due.index(name) + 1]
        return True


def _order(name: str) -> tuple[int, str]:
    return len(name), name  # numbers in the order of their values
