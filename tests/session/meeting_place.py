"""Collectives of processes that threads play, on a `DirectoryCoordinator`."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asyncckpt import DirectoryCoordinator
from asyncckpt.ports import Bytes, CallIn


class MeetingPlace:
    """Where the threads of one job leave their pieces.

    Attributes:
        gathers: how often each set of members has met.
        callers: names of the threads that made collectives.
        on_gather: called in every gather with the process and the number of its gather.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[tuple[Any, ...], tuple[dict[int, Bytes], Future[None]]] = {}
        self.gathers: Counter[tuple[int, ...]] = Counter()
        self.callers: set[str] = set()
        self.on_gather: Callable[[int, int], None] = lambda process, number: None

    def leave(
        self, key: tuple[Any, ...], process: int, piece: Bytes, count: int
    ) -> tuple[dict[int, Bytes], Future[None]]:
        """Leave one of `count` pieces; return those that are there, and when all are."""
        with self._lock:
            pieces, all_there = self._pieces.setdefault(key, ({}, Future()))
            pieces[process] = piece.copy()
            if len(pieces) == count:
                all_there.set_result(None)
            return pieces, all_there


class ExchangingCoordinator(DirectoryCoordinator):
    """A coordinator whose collectives meet in memory."""

    def __init__(self, place: MeetingPlace, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.place = place

    def exchange(
        self, name: str, *, in_caller: CallIn, in_worker: CallIn, timeout_s: float
    ) -> MemoryExchange:
        return MemoryExchange(self.place, self.process_index, name, in_caller)


class MemoryExchange:
    """The collectives of one restore."""

    binding = False

    def __init__(self, place: MeetingPlace, process: int, name: str, in_caller: CallIn) -> None:
        self._place, self._process, self._name = place, process, name
        self._in_caller = in_caller
        self._numbers: Counter[tuple[int, ...]] = Counter()
        self._gathered = 0

    async def gather(self, members: tuple[int, ...], piece: Bytes) -> Bytes:
        assert self._process in members
        place, number = self._place, self._numbers[members]
        self._numbers[members] += 1
        place.on_gather(self._process, self._gathered)
        self._gathered += 1
        place.gathers[members] += self._process == members[0]
        key = (self._name, members, number)

        def meet() -> tuple[dict[int, Bytes], Future[None]]:
            place.callers.add(threading.current_thread().name)
            return place.leave(key, self._process, piece, len(members))

        pieces, all_there = await self._in_caller(meet)
        # One that stops waiting must not cancel it for the others.
        await asyncio.shield(asyncio.wrap_future(all_there))
        assert len({len(each) for each in pieces.values()}) == 1
        return np.concatenate([pieces[member] for member in members])

    async def close(self) -> None:
        pass
