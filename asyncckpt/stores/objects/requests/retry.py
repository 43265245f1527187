"""Retry policy for object-store requests."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and for how long, one request is tried.

    Attributes:
        tries: requests in all, at most.
        total_s: seconds after which no further try begins, time in the queue not counted.
        backoff_s: bound of the first wait; each further one is twice as long.
        backoff_cap_s: bound of every wait, unless the server asks for more.
    """

    tries: int = 10
    total_s: float = 300.0
    backoff_s: float = 0.2
    backoff_cap_s: float = 20.0

    def wait_s(
        self,
        failed: int,
        spent_s: float,
        rng: random.Random,
        *,
        asked_s: float = 0.0,
        deadline_s: float = 0.0,
    ) -> float | None:
        """Return the seconds to wait before the next try, or None to give up.

        Waits have full jitter: spreading over the whole interval keeps clients that failed
        together from coming back together ("Exponential Backoff And Jitter", AWS Architecture
        Blog, 2015).

        Args:
            failed: tries that have failed, at least 1.
            spent_s: seconds that they and the waits between them took.
            rng: source of the jitter.
            asked_s: how long the server asks to wait; no try comes earlier.
            deadline_s: deadline of one try. A try that used all of it is followed by another
                one, whatever `total_s` says.
        """
        if failed >= self.tries:
            return None
        bound_s = min(self.backoff_cap_s, self.backoff_s * 2.0 ** (failed - 1))
        wait_s = asked_s + rng.uniform(0.0, bound_s)
        return None if spent_s + wait_s > max(self.total_s, 2.0 * deadline_s) else wait_s
