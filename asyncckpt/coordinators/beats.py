"""Beats: signs of life with progress, which all processes post and which reveal silent ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.service import CALL_LIMIT_S
from asyncckpt.errors import StoreError
from asyncckpt.flow.background import BackgroundTask
from asyncckpt.log import logger

BEAT_S = 5.0
"""Interval of beats."""

MANY_PROCESSES = 256
"""Largest number of processes that post beats every `BEAT_S`."""

SLOW_BEAT_S = 20.0
"""Interval of beats with more processes: 10,000 of them write 500 keys a second."""


@dataclass(slots=True)
class _Heard:
    """The last beat of a process.

    Attributes:
        value: the beat as posted; empty before the first one.
        fields: its decoded contents.
        silent_s: seconds since it changed.
    """

    value: bytes = b""
    fields: Mapping[str, Any] = field(default_factory=dict)
    silent_s: float = 0.0


class Beats:
    """Posts the beats of this process while a round is under way, and watches those of others.

    Process 0 watches all others with one call; the others watch process 0. A beat tells whether its
    process is at work, its progress, and which rounds have ended on it. Only a process at work can
    fall silent; `arrival_s` covers processes that have not made a call yet.

    Silence is measured by the observer's clock, and only while it observes: a process that was
    stopped for a minute does not blame the others.

    Args:
        silence_s: seconds without a new beat after which a process is silent.
        every_s: longest interval of beats; they are rarer with many processes.
    """

    def __init__(self, group: Group, silence_s: float, every_s: float = math.inf) -> None:
        self.group = group
        self.silence_s = silence_s
        usual_s = SLOW_BEAT_S if group.process_count > MANY_PROCESSES else BEAT_S
        # Several beats fit into any `silence_s`.
        self._every_s = min(usual_s, every_s, silence_s / 3)
        # Silence takes at least two observations, even if this process was stopped in between.
        self._longest_s = min(self._every_s + CALL_LIMIT_S, silence_s / 2)
        self._open: defaultdict[str, list[int]] = defaultdict(list)
        self._over: defaultdict[str, int] = defaultdict(int)
        self._beating: BackgroundTask[None] | None = None
        self._count = 0
        self._reached: dict[str, int] = {}
        self._changed = asyncio.Event()
        watched = range(1, group.process_count) if group.process_index == 0 else (0,)
        self._heard = {process: _Heard() for process in watched}
        self._observed = time.monotonic()

    def begin(self, kind: str, number: int) -> None:
        """Begin a round or a part of one; beats are posted until all of them have ended."""
        self._open[kind].append(number)
        self.reached(kind, number)
        if self._beating is None:
            self._beating = BackgroundTask(self.run())

    async def end(self, kind: str, number: int) -> None:
        """End a round or a part of one; after the last, post that this process is idle."""
        self._open[kind].remove(number)
        if any(self._open.values()) or self._beating is None:
            return
        beating, self._beating = self._beating, None
        beating.cancel()
        await beating.settled()
        if not any(self._open.values()):  # no round has begun meanwhile
            await self._post(at_work=False)

    async def run(self) -> None:
        """Post and watch until cancelled. An unreachable service counts as silence."""
        self._observed = time.monotonic()
        while True:
            self._changed.clear()
            try:
                await self._post(at_work=True)
                seen = await self._look()
            except StoreError as error:
                logger.warning("beat of process %d: %s", self.group.process_index, error)
                seen = {}
            self._note(seen)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._changed.wait()

    def reached(self, what: str, number: int) -> None:
        """Record progress of this process and post it soon; progress only rises."""
        self._reached[what] = max(number, self._reached.get(what, number))
        self._changed.set()

    def last(self, process: int, what: str) -> int:
        """Return the progress of a watched process; -1 if it has not begun."""
        return int(self._heard[process].fields.get("reached", {}).get(what, -1))

    def ended(self, process: int, kind: str) -> int:
        """Return the number below which all rounds of a kind have ended on a watched process."""
        return int(self._heard[process].fields.get("ended", {}).get(kind, 0))

    def over(self, kind: str) -> Iterator[int]:
        """Yield the rounds of a kind that have ended on all processes, each once.

        For process 0. Its beats of the others may be old, so a round may be yielded late.
        """
        end = min([self._ended(kind), *(self.ended(process, kind) for process in self._heard)])
        while self._over[kind] < end:
            self._over[kind] += 1
            yield self._over[kind] - 1

    def at_work(self, process: int) -> bool:
        """Return whether a watched process was in any round at its last beat."""
        return bool(self._heard[process].fields.get("at_work"))

    def silent(self, process: int) -> bool:
        """Return whether a watched process at work has posted no new beat for `silence_s`."""
        return self._heard[process].silent_s >= self.silence_s and self.at_work(process)

    def _ended(self, kind: str) -> int:
        """Return the number below which all rounds of a kind have ended on this process."""
        return min(self._open[kind], default=self._reached[kind] + 1)

    async def _post(self, *, at_work: bool) -> None:
        self._count += 1
        group = self.group
        beat = {
            "count": self._count,
            "at_work": at_work,
            "reached": self._reached,
            "ended": {kind: self._ended(kind) for kind in self._open},
        }
        value = json.dumps(beat).encode()
        await group.coordinator.put(group.key("beat", str(group.process_index)), value)

    async def _look(self) -> Mapping[int, bytes]:
        group = self.group
        if group.process_index == 0:
            beats = await group.coordinator.list(group.key("beat"))
            return {int(process): value for process, value in beats.items()}
        value = await group.coordinator.look(group.key("beat", "0"))
        return {} if value is None else {0: value}

    def _note(self, seen: Mapping[int, bytes]) -> None:
        now = time.monotonic()
        passed_s = min(now - self._observed, self._longest_s)
        self._observed = now
        for process, heard in self._heard.items():
            value = seen.get(process, heard.value)
            if value != heard.value:
                heard.value, heard.fields, heard.silent_s = value, json.loads(value), 0.0
            else:
                heard.silent_s += passed_s
