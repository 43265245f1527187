"""A job that is stopped somewhere in a save, taken over, and continued; its possible leftovers."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest

import asyncckpt
from asyncckpt import Checkpointer, FencedError, KeepLast
from asyncckpt.stores.local.publish import Publication
from asyncckpt.stores.local.store import LocalStore, Unlisted
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from tests.objects.stores import SAVE_OPTIONS, Place
from tests.simulator import Fault, Gate, Request

Scenario = Literal["create", "replace"]
SCENARIOS: tuple[Scenario, ...] = ("create", "replace")

SAVED = {"create": 3, "replace": 2}
"""The step that is being saved when the job is stopped; it has saved 1 and 2."""

NEW = 10
"""The step that the job saves that takes over."""

STOPPED_S = 60.0
"""Longest time that a job stays stopped: a test that fails must end."""

LOCAL = os.path.dirname(sys.modules[LocalStore.__module__].__file__ or "")

PATIENT = RequestPolicy(hedge_cold_s=STOPPED_S, hedge_min_s=STOPPED_S, timeout_s=STOPPED_S)
"""A request that is held is neither raced nor tried again."""


class Stop(Protocol):
    """Where the job is stopped; nowhere, if it ends before it comes there."""

    @property
    def reached(self) -> bool:
        """Whether it is stopped, or was."""

    def release(self) -> None:
        """Let it go on."""


@dataclass(slots=True)
class Round:
    """Findings of one round.

    Attributes:
        stopped: the job did not end before it was to be stopped.
        wrong: what must not be.
    """

    stopped: bool
    wrong: list[str]


def state(step: int) -> dict[str, Any]:
    """A tree whose values tell the step."""
    return {"w": np.arange(1000.0) + step, "step": step}


# -- stops


class LineStop:
    """Stops a writer before the `number`-th line of stores/local that it runs to publish or delete.

    Lines are the smallest steps that a thread of Python makes; a system call is one.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._count = 0
        self._reached = threading.Event()
        self._released = threading.Event()
        self.on = False

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def release(self) -> None:
        self._released.set()

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LOCAL):
            return None
        if event == "line":
            self._count += 1
            if self._count == self._number:
                self._reached.set()
                self._released.wait(STOPPED_S)
        return self._trace

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on or self.reached:
                return function(*args, **kwargs)
            before = sys.gettrace()
            sys.settrace(self._trace)
            try:
                return function(*args, **kwargs)
            finally:
                sys.settrace(before)

        return call

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Stop publications and deletions during the block."""
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (Publication, "run"),
                (LocalStore, "_move_to_trash"),
                (Unlisted, "remove"),
            ):
                patch.setattr(owner, name, self._traced(getattr(owner, name)))
            self.on = True
            yield


class RequestStop:
    """Holds the `number`-th request from the first one for the record on; it arrives later."""

    def __init__(self, number: int, at: Place, step: int) -> None:
        self._gate = Gate()
        self._begun = False
        self._key = f"/{step}/checkpoint.json"
        self.held: Request | None = None
        self._at = at
        self._fault = Fault(
            number=number, gate=self._gate, when=self._when, hook=self._note, name="stop"
        )

    def _when(self, request: Request) -> bool:
        self._begun = self._begun or request.key.endswith(self._key)
        return self._begun

    def _note(self, request: Request) -> None:
        self.held = request

    @property
    def reached(self) -> bool:
        return self._gate.reached.is_set

    def release(self) -> None:
        self._gate.release()

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Stop requests during the block."""
        self._at.sim.faults.append(self._fault)
        try:
            yield
        finally:
            self._at.sim.faults.remove(self._fault)


# -- one round


async def local_round(root: Path, scenario: Scenario, number: int) -> Round:
    """Stop a job before its `number`-th line, take it over, and let it go on."""
    return await _round(lambda: root, scenario, LineStop(number))


async def remote_round(at: Place, scenario: Scenario, number: int) -> Round:
    """Hold a job's `number`-th request, take it over, and let the request and the job go on."""
    stop = RequestStop(number, at, SAVED[scenario])
    found = await _round(lambda: at.store(policy=PATIENT), scenario, stop)
    if stop.held is not None and stop.held.kind.startswith("delete"):
        # Decided, checked for higher claims, and sent: no store can call it back.
        found.wrong = [text for text in found.wrong if not text.startswith("lost: [1]")]
    return found


async def _round(
    root: Callable[[], Any], scenario: Scenario, stop: LineStop | RequestStop
) -> Round:
    options = SAVE_OPTIONS
    wrong: list[str] = []
    async with Checkpointer(root(), keep=KeepLast(2), takeover=True, save_options=options) as stale:
        acknowledged = {1: 1, 2: 2}
        for step in acknowledged:
            await stale.save(step, state(step))
        with stop.armed():
            saving = asyncio.create_task(_saved(stale, scenario))
            while not stop.reached and not saving.done():
                await asyncio.sleep(0.001)
            if not stop.reached:
                assert await saving is None
                return Round(False, wrong)
            async with Checkpointer(root(), takeover=True, save_options=options) as new:
                await new._session.call(new._session.claims.epoch).wait()
                inherited = await new.steps()
                await new.save(NEW, state(NEW))
                stop.release()
                error = await saving
            if error is not None and not isinstance(error, FencedError):
                wrong.append(f"the save raised {error!r}")
            if error is None:
                acknowledged[SAVED[scenario]] = 3
            try:
                await stale.save(20, state(20))
                wrong.append("a save after the takeover was acknowledged")
            except FencedError:
                pass
    async with Checkpointer(root(), save_options=options) as reader:
        final = await reader.steps()
        expected = sorted({*inherited, NEW})
        if more := sorted({*final} - {*expected}):
            wrong.append(f"came back: {more}")
        if lost := sorted({*expected} - {*final}):
            wrong.append(f"lost: {lost}")
        if gone := sorted({2, *acknowledged} - {1} - {*final}):
            wrong.append(f"acknowledged and not there: {gone}")
        for step in final:
            found = (await reader.restore(step))["step"]
            right = {acknowledged.get(step), step}
            if scenario == "replace" and step == 2:
                right.add(3)
            if found not in right:
                wrong.append(f"step {step} holds {found}")
        if latest := await reader.latest_step() != NEW:
            wrong.append(f"the latest step is {latest}")
    return Round(True, wrong)


async def _saved(stale: Checkpointer, scenario: Scenario) -> BaseException | None:
    """Save, and wait until retention has ended; return the error."""
    try:
        await stale.save(SAVED[scenario], state(3), overwrite=scenario == "replace")
        await stale.wait()
    except asyncckpt.AsyncCheckpointError as error:
        return error
    return None
