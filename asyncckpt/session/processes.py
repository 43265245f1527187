"""The processes of one session: chosen at first use, with one handshake and numbered calls."""

# Rule 1: calls are numbered in the caller's thread, including calls that fail there: if processes
#   make the same calls in the same order, equal numbers mean the same call. A process that has left
#   out a call finds the failed round of the others, and adds one to its later numbers. If the
#   others are still waiting, all fail, and the others skip the calls that it has made instead
#   (`call_order.py`): each skip subtracts one from their later numbers.
# Rule 2: a call that fails before its round exists ends that round on all processes, which would
#   otherwise wait.
# Rule 3: a call that ends before the processes have met does not count: processes that come later
#   do not know of it. Earlier calls that still wait for them keep their numbers.
#   (test_a_call_that_ends_before_the_processes_have_met_does_not_count,
#   test_calls_that_wait_for_the_processes_keep_their_numbers_when_another_one_ends)

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from asyncckpt.coordinators.beats import Beats
from asyncckpt.coordinators.call_order import CallOrder
from asyncckpt.coordinators.choice import SingleProcess, choose
from asyncckpt.coordinators.group import Group, behind_error, part
from asyncckpt.coordinators.handshake import shake_hands
from asyncckpt.coordinators.rounds import Round, briefly
from asyncckpt.errors import UsageError
from asyncckpt.flow.shield import to_completion, within
from asyncckpt.ports import Coordinator, ExchangingCoordinator
from asyncckpt.runtime import Runtime

T = TypeVar("T")

PART_S = 2.0
"""How long leaving the group may take; leftover keys of an ended run are harmless."""

_agreed: Counter[tuple[str, int, int]] = Counter()
"""Successful handshakes of this process, by root, process index and process count. Failed ones do
not count, or a process that once came alone would stay out of step."""


class Processes:
    """The processes that save and restore together.

    Args:
        runtime: resources that the processes of one host divide.
        root: path or URL of the run.
        coordinator: ``"auto"``, ``"single"`` or an object.
        arrival_s: seconds that a process may be later than the first.
        silence_s: seconds that a process may give no sign of life.
        owned: close a coordinator that was given as an object.

    Attributes:
        lost: numbers of the rounds of saves that failed before this process planned its part.
    """

    def __init__(
        self,
        runtime: Runtime,
        root: str,
        coordinator: object,
        *,
        arrival_s: float,
        silence_s: float,
        owned: bool = False,
    ) -> None:
        self._runtime = runtime
        self._root = root
        self._given = coordinator
        self._owned = owned
        self._arrival_s = arrival_s
        self._silence_s = silence_s
        self._chosen: list[Coordinator | SingleProcess] = []
        self.lost: set[int] = set()
        self._orders = {kind: CallOrder() for kind in ("save", "preemption", "call")}
        self._numbering = asyncio.Lock()
        self._meeting = asyncio.Lock()
        self._beats: Beats | None = None

    # -- in the caller's thread

    @property
    def coordinator(self) -> Coordinator | SingleProcess:
        """The coordinator, chosen at first use.

        Raises:
            UsageError: there are several processes, and no service through which to coordinate.
        """
        if not self._chosen:
            # If a thread or signal handler does the same meanwhile, the first one counts.
            self._chosen.append(choose(self._given))
        return self._chosen[0]

    def foreseen(self) -> Coordinator | SingleProcess | None:
        """Return the coordinator that would be chosen now, None if none could be.

        The choice remains open: the runtime may be initialised later.
        """
        try:
            return self._chosen[0] if self._chosen else choose(self._given)
        except UsageError:
            return None

    @property
    def alone(self) -> bool:
        """Whether this process saves and restores by itself."""
        return self.coordinator.process_count == 1

    @property
    def job(self) -> object:
        """Identity that sessions of one job share: their coordinator, or the runtime of "auto"."""
        return Processes if isinstance(self._given, str) else self._given

    @property
    def leads(self) -> bool:
        """Whether this is process 0, or the only one."""
        return self.coordinator.process_index == 0

    def check_broadcast(self, broadcast: object) -> None:
        """Check that processes can exchange what they read, if `broadcast` is True."""
        if broadcast is not True:
            return
        coordinator = self.coordinator
        if self._given == "single":
            raise UsageError(
                f'{self._root}: RestoreOptions(broadcast=True) with coordinator="single": a '
                "process that works alone exchanges nothing; leave out one of the two",
                location=self._root,
            )
        if coordinator.process_count > 1 and not isinstance(coordinator, ExchangingCoordinator):
            raise UsageError(
                f"{self._root}: RestoreOptions(broadcast=True) with the {coordinator.name} "
                "coordinator, which has no collectives: initialise jax.distributed or "
                "torch.distributed, or let every process read for itself with broadcast=False",
                location=self._root,
            )

    def count(self, kind: str) -> int:
        """Return the number of this call among the calls of its kind."""
        return self._orders[kind].count()

    # -- on the engine

    async def group(self) -> Group:
        """Return the group of processes, after the handshake."""
        return (await self._met()).group

    async def round(
        self, kind: str, number: int, name: str = "", *, deadline_s: float | None = None
    ) -> Round:
        """Begin a round; the first one includes the handshake.

        Args:
            kind: ``save``, ``preemption``, or ``call`` for all other calls.
            number: its number among the calls of its kind on this process.
            name: the call, unless the kind identifies it.
            deadline_s: seconds that this may take; None for no limit.

        Raises:
            DeadlineExceededError: `deadline_s` passed; the others get this error, too.
            UsageError: the others have already made this call, in a round that failed because this
                process made another call.
        """
        failure = f"not all processes came to {name}"
        order = self._orders[kind]

        def numbered() -> Round:
            assert self._beats is not None
            return Round(
                self._beats,
                kind,
                order.numbered(number),
                name=name,
                arrival_s=self._arrival_s,
                order=order,
            )

        skipped = False
        try:
            async with within(deadline_s, self._root, failure, "deadline_s"):
                group = await self.group()
                async with self._numbering:  # one by one: the next call counts what this one finds
                    if skipped := order.skips(name):
                        raise behind_error(group, name)
                    while await (round_ := numbered()).missed():
                        order.missed()
                        if kind == "save":
                            self.lost.add(round_.number)
                    return round_
        except BaseException as error:
            if self._beats is None:
                order.uncount(number)  # Rule 3
            elif not skipped:  # the others would wait
                round_ = numbered()
                if kind == "save":
                    self.lost.add(round_.number)
                await to_completion(briefly(round_.abort(error)))
            raise

    async def once(
        self, name: str, function: Callable[[], Coroutine[Any, Any, T]], number: int
    ) -> T:
        """Run the coroutine on process 0; return its result, a JSON value, on all processes."""
        round_ = await self.round("call", number, name)

        async def on_this() -> T:
            if not round_.leads:
                await round_.outcome()
                return cast("T", json.loads(await round_.answered_parts("result")))
            # Nothing is done before all processes have made this call.
            await round_.gathered("name")
            # From here on, no process may report that nothing was done.
            await round_.commit()
            result = await function()
            await round_.answer_parts("result", json.dumps(result).encode())
            await round_.finish()
            return result

        return await round_.run(on_this)

    async def refuse(self, kind: str, number: int, name: str, error: BaseException) -> None:
        """End the round of a call with an error that occurred before it."""
        round_ = await self.round(kind, number, name)
        if kind == "save":
            self.lost.add(round_.number)
        async with round_.alive():  # so that its messages are deleted eventually
            await round_.abort(error)

    async def _met(self) -> Beats:
        async with self._meeting:
            if self._beats is None:
                coordinator = self.coordinator
                assert not isinstance(coordinator, SingleProcess)
                place = self._root, coordinator.process_index, coordinator.process_count
                group = await shake_hands(
                    coordinator,
                    root=self._root,
                    opened=_agreed[place] + 1,
                    arrival_s=self._arrival_s,
                )
                _agreed[place] += 1
                self._runtime.share_host(group.processes_on_host)
                # Beats also tell which processes have made a call.
                self._beats = Beats(group, self._silence_s, self._arrival_s / 3)
            return self._beats

    async def release(self) -> None:
        """Leave the group, and close the coordinator if it was chosen here."""
        try:
            if self._beats is not None:
                await briefly(part(self._beats.group), limit_s=PART_S)
        finally:
            if self._chosen and (self._owned or self._chosen[0] is not self._given):
                await self._chosen[0].close()
