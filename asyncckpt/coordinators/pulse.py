"""The pulse of a process: beats while it is at work, which say how far it has come."""

from __future__ import annotations

import json

from asyncckpt.coordinators.beats import Beats
from asyncckpt.flow.engine import Engine, Job, ended


class Pulse:
    """Beats while at least one round is under way.

    Args:
        engine: where they run.
        beats: posts them, and hears those of others.
    """

    def __init__(self, engine: Engine, beats: Beats) -> None:
        self._engine = engine
        self._beats = beats
        self._rounds = 0
        self._beating: Job[None] | None = None
        self._reached: dict[str, int] = {}

    def begin(self) -> None:
        """Begin a round; beats go on until as many have ended."""
        self._rounds += 1
        if self._beating is None:
            self._beating = self._engine.submit(self._beats.run)

    async def end(self) -> None:
        """End a round; after the last one, post that this process rests."""
        self._rounds -= 1
        if self._rounds or self._beating is None:
            return
        beating, self._beating = self._beating, None
        beating.cancel()
        await ended(beating.future)
        if not self._rounds:  # none has begun meanwhile
            await self._beats.rest()

    def reached(self, what: str, number: int) -> None:
        """Tell the others how far this process has come."""
        self._reached[what] = number
        self._beats.tell(json.dumps(self._reached))

    def last(self, process: int, what: str) -> int:
        """Return how far another process at work has come; -1 if it has not begun."""
        return int(json.loads(self._beats.heard(process) or "{}").get(what, -1))

    def silent(self, process: int) -> bool:
        """Return whether a process at work gives no sign of life."""
        return self._beats.silent(process)
