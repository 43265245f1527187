"""How long to wait before the same request is tried again, and when to stop trying."""

# Rule: nothing here waits. Who asks also sleeps, and holds no permit while it does.

from __future__ import annotations

import random
from dataclasses import dataclass

import tenacity
from tenacity.wait import wait_base


@dataclass(frozen=True, slots=True)
class Patience:
    """How often, and for how long, one request is tried.

    Attributes:
        tries: requests in all, at most.
        total_s: seconds after which no further try begins, time in line not counted.
        backoff_s: bound of the first wait; each further one is twice as long.
        backoff_cap_s: bound of every wait, unless the server asks for more.
    """

    tries: int = 10
    total_s: float = 300.0
    backoff_s: float = 0.2
    backoff_cap_s: float = 20.0


class FullJitter(wait_base):
    """Waits for any time between nothing and an exponentially growing bound.

    As `tenacity.wait_random_exponential`, from a generator of one's own. Spreading over the whole
    interval keeps clients that failed together from coming back together: "Exponential Backoff
    And Jitter", AWS Architecture Blog, 2015.
    """

    def __init__(self, patience: Patience, rng: random.Random) -> None:
        self._bound = tenacity.wait_exponential(
            multiplier=patience.backoff_s, max=patience.backoff_cap_s
        )
        self._rng = rng

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        return self._rng.uniform(0.0, self._bound(retry_state))


class Tries:
    """The tries of one request.

    Attributes:
        failed: how many have failed so far.
        spent_s: seconds that they and the waits between them took.
    """

    __slots__ = ("_patience", "_state", "_wait", "failed", "spent_s")

    def __init__(self, patience: Patience, rng: random.Random) -> None:
        self._patience = patience
        self._wait = FullJitter(patience, rng)
        self._state = tenacity.RetryCallState(_NOBODY, None, (), {})
        self.failed = 0
        self.spent_s = 0.0

    def next_wait_s(
        self, took_s: float, *, asked_s: float | None = None, deadline_s: float = 0.0
    ) -> float | None:
        """Seconds to wait before the next try; None if there shall be none.

        Args:
            took_s: how long the try that failed has taken.
            asked_s: how long the server asks to wait; no try comes earlier.
            deadline_s: what one try may take; after one that took it all there is another one,
                whatever `total_s` says.
        """
        self.failed += 1
        self.spent_s += took_s
        if self.failed >= self._patience.tries:
            return None
        self._state.attempt_number = self.failed
        wait_s = (asked_s or 0.0) + float(self._wait(self._state))
        if self.spent_s + wait_s > max(self._patience.total_s, 2.0 * deadline_s):
            return None
        self.spent_s += wait_s
        return wait_s


_NOBODY = tenacity.AsyncRetrying()
"""The strategies of tenacity ask for a caller, of which they use nothing."""
