"""Rounds: calls that all processes of a group make together, one after the other.

A round consists of messages of each process, answers of process 0, a decision and an outcome::

    process p                 process 0
    post("ready") ─────────►  gathered("ready")
                              commit()            the decision, set once, by this or by `abort`
                              finish(...)         the outcome
    outcome() ◄─────────────

Until the decision to commit, any process may `abort` with an error, which `watch` then raises on
all processes.
"""

# Rule 1: the decision is set once: if two processes decide at the same time, both see the decision
#   of the faster one.
# Rule 2: after a decision to commit, process 0 alone determines the outcome. If it falls silent, no
#   other process may report that the round has failed; one whose call fails then asks once more.
# Rule 3: after a decision to commit, process 0 does not depend on the others: it ignores those that
#   fall silent, and a service that fails.
#   (test_a_service_that_fails_after_the_decision_does_not_end_the_round)
# Rule 4: process 0 polls one directory, whatever the number of processes; every other process waits
#   for one key. Missing processes are found by their beats.
# Rule 5: the messages of a round are deleted once it has ended on all processes. Process 0 may be
#   many calls ahead: saves that it skips end at once.
#   (test_a_round_is_kept_until_the_last_process_has_ended_it)
# Rule 6: a process that finds its round already decided, by another call, has missed that call and
#   takes the next number (`missed`), so numbers agree again after a call by some processes only.
#   Such a round cannot have been committed: that takes a message of every process.
# Rule 7: a round that fails because processes made different calls names both calls to all of them,
#   so that each learns whether it is behind (`call_order.py`).

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from asyncckpt.coordinators.beats import Beats
from asyncckpt.coordinators.call_order import CallOrder
from asyncckpt.coordinators.group import (
    closed_error,
    departed,
    late_error,
    other_call_error,
    silent_error,
    unknown_error,
)
from asyncckpt.coordinators.key_values import longest_pause_s, pauses
from asyncckpt.coordinators.messages import decode_error, encode_error, parts_of
from asyncckpt.errors import AsyncCheckpointError, StoreError
from asyncckpt.flow.shield import leading_error, to_completion

T = TypeVar("T")

BUSY = "busy"
"""Answer of process 0: ``1 <call>`` if it skips its call because a save is in flight, else
``0 <call>``."""

COMMIT = b"+"
_FAILED = b"-"

POST_S = 0.3
"""How long a process waits for its error to be posted; the coordinator's thread keeps trying."""

SLICE_S = 1.0
"""How long the other processes wait for the outcome before they check that process 0 is alive."""

PAUSES_PER_SLICE = 16
"""Minimum number of longest-interval polls per wait. Each wait restarts its back-off, so shorter
waits would make thousands of processes poll too often."""


@dataclass(eq=False, repr=False)
class Round:
    """One call that all processes of a group make together.

    Attributes:
        beats: signs of life of all of them.
        kind: sequence of rounds that this one belongs to, such as ``save``.
        number: its number in the sequence, equal in all processes.
        name: the call, unless the kind identifies it; must be equal in all processes.
        arrival_s: seconds that a process may be later than the first.
        order: order of the calls, updated when the round ends.
        silence_s: seconds that a process may give no sign of life.
        leads: this is process 0.
        result: message of process 0 with its success; None before.
        failed: the round has certainly failed.
        skipped: process 0 has skipped its call; set if this process did not ask.
    """

    beats: Beats
    kind: str
    number: int
    _: KW_ONLY
    name: str = ""
    arrival_s: float
    order: CallOrder = field(default_factory=CallOrder)

    def __post_init__(self) -> None:
        self.group = self.beats.group
        self.silence_s = self.beats.silence_s
        self._coordinator = self.group.coordinator
        self._prefix = self.group.key(self.kind, str(self.number))
        self._slice_s = max(SLICE_S, PAUSES_PER_SLICE * longest_pause_s(self.group.process_count))
        self._begun = time.monotonic()
        self._found: Mapping[str, bytes] = {}
        self._committed = False
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._expecting = False
        self._waiting: asyncio.Timeout | None = None
        self.failed = False
        self.skipped = False
        self.result: bytes | None = None
        self.leads = self.group.process_index == 0

    # -- every process

    async def post(self, what: str, message: bytes) -> None:
        """Send a message of at least one byte to process 0."""
        await self._coordinator.put(f"{self._prefix}/{what}/{self.group.process_index}", message)
        self.expect()

    async def post_parts(self, what: str, message: bytes) -> None:
        """Send a message that may be large to process 0."""
        for number, part in parts_of(message):
            await self.post(f"{what}.{number}", part)

    async def _joined(self, what: str, head: bytes, sender: str = "") -> bytes:
        """Return a message in parts, all of which exist once the first one does."""
        parts = [head[1:]]
        for number in range(1, head[0]):
            part = await self._coordinator.look(f"{self._prefix}/{what}.{number}{sender}")
            assert part is not None
            parts.append(part)
        return b"".join(parts)

    async def post_name(self) -> None:
        """Send the name of the call to process 0, which ends the round if it made another one."""
        await self.post("name", self.name.encode())

    def check_call(self, call: str) -> None:
        """Check that process 0, which made `call`, has made the call of this process.

        Raises:
            UsageError: it made another one; names both.
        """
        if call != self.name:
            raise other_call_error(self.group, self.group.process_index, self.name, call)

    async def missed(self) -> bool:
        """Return whether the round has already failed, in another call, before it begins here."""
        if not self.name:
            return False
        decision = None
        with contextlib.suppress(StoreError):  # the round will find out
            decision = await self._coordinator.look(f"{self._prefix}/decision")
        calls = () if decision is None else _calls_in(decision)
        return calls != () and self.name not in calls

    async def abort(self, error: BaseException, stage: str | None = None) -> bool:
        """End the round on all processes with an error, unless it is already decided.

        Returns:
            Whether the round fails. After the decision to commit only process 0 can end it so, and
            only before the outcome.
        """
        failure = self._failure(error, stage)
        if await self._decide(failure) != COMMIT:
            return True
        if not self.leads or self.result is not None:
            return False
        # Only process 0 knows that publishing failed after its decision to commit.
        await self.answer("outcome", failure)
        self.failed = True
        return True

    async def _decide(self, wanted: bytes) -> bytes:
        """Decide the round, unless it is already decided; return the decision."""
        decision = await self._coordinator.put_once(f"{self._prefix}/decision", wanted)
        if decision != COMMIT:
            await self._announce(decision)
        return decision

    async def _announce(self, failure: bytes) -> AsyncCheckpointError:
        """Record a decision against the round; process 0 passes it on."""
        error = self._note(failure)
        if self.leads:
            await self.answer("outcome", failure)
        return error

    def _note(self, failure: bytes) -> AsyncCheckpointError:
        """Record a decision or outcome against the round; return the error in it."""
        if not self.failed:
            self.failed = True
            first, *others = _calls_in(failure) or ("",)
            for other in others:
                self.order.differed(self.name, other if self.name == first else first)
        return decode_error(failure.partition(b"\n")[2])

    async def _fail(self, error: AsyncCheckpointError, other_call: str = "") -> None:
        """Decide against the round and raise; return if the decision was to commit."""
        failure = self._failure(error, other_call=other_call)
        decision = await self._decide(failure)
        if decision == failure:
            raise error
        if decision != COMMIT:
            raise self._note(decision)

    def begun(self) -> None:
        """Announce that this process has begun the attempt that the others join."""
        self.beats.reached(f"{self.kind}-begun", self.number)

    def has_begun(self) -> bool:
        """Return whether process 0 has begun the attempt that the others join."""
        return self.beats.last(0, f"{self.kind}-begun") >= self.number

    async def watch(self) -> None:
        """Return once the round has succeeded; runs in a separate task during the round.

        Raises:
            …: the error with which any process ended it.
            SaveError: a process is missing or silent; names it.
            UsageError: a process has closed its `Checkpointer`; names it.
            SaveOutcomeUnknownError: process 0 fell silent after its decision to commit.
        """
        try:
            await (self._lead() if self.leads else self._follow())
        except StoreError as error:
            if self.leads and self._committed:  # Rule 3
                return
            if self.leads or await self._decide(self._failure(error)) != COMMIT:
                raise
            await self._follow()  # the round had succeeded: its outcome is asked for once more
        finally:
            self._changed.set()

    async def run(self, part: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run this process's part of the round.

        Raises:
            …: the error of the process that failed first, on all processes.
        """
        async with self.alive():
            try:
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(self.watch())
                    if self.name and not self.leads:
                        await self.post_name()
                    result = await part()
                    watching.cancel()
            except BaseException as raised:
                error = leading_error(raised) if isinstance(raised, BaseExceptionGroup) else raised
                await to_completion(briefly(self.abort(error)))
                raise error from error.__cause__
        return result

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Post beats during the block."""
        self.beats.begin(self.kind, self.number)
        try:
            yield
        finally:
            await to_completion(briefly(self._rest()))

    async def _rest(self) -> None:
        await self.beats.end(self.kind, self.number)
        if self.leads:
            for number in self.beats.over(self.kind):
                await self._coordinator.delete(self.group.key(self.kind, str(number)))

    # -- process 0

    async def gathered(
        self,
        what: str,
        *,
        instead: str = "",
        refuse: Callable[[int, bytes], Exception] | None = None,
    ) -> dict[int, bytes]:
        """Return the message of every other process; `watch` must be running.

        Args:
            what: kind of the messages.
            instead: kind of message that a process may post instead.
            refuse: returns the error to raise for a process and its message of kind `instead`.
        """
        wanted = self.group.process_count - 1
        self.expect()
        while True:
            if refuse is not None:
                for process, message in self._messages(instead).items():
                    raise refuse(process, message)
            found = self._messages(what)
            if len(found) == wanted:
                return found
            self._changed.clear()
            await self._changed.wait()

    def _messages(self, what: str) -> dict[int, bytes]:
        """Return the messages of this kind that have been found, by process."""
        keys = ((key.rpartition("/"), message) for key, message in self._found.items())
        return {int(process): message for (kind, _, process), message in keys if kind == what}

    async def lowest(self, what: str, *, above: int) -> int | None:
        """Return the lowest number posted by the other processes, once it exceeds `above`.

        None if the round has failed.
        """
        while not self.failed:
            numbers = [int(number) for number in self._messages(what).values()]
            if len(numbers) == self.group.process_count - 1 and min(numbers) > above:
                return min(numbers)
            self._changed.clear()
            await self._changed.wait()
        return None

    async def gathered_parts(self, what: str) -> dict[int, bytes]:
        """Return the messages of all other processes from `post_parts`.

        Deletes them, because every poll would read them again.
        """
        heads = await self.gathered(f"{what}.0")
        found = {
            process: await self._joined(what, head, f"/{process}")
            for process, head in heads.items()
        }
        for number in range(max(head[0] for head in heads.values())):
            await self._coordinator.delete(f"{self._prefix}/{what}.{number}")
        return found

    async def answer_parts(self, what: str, message: bytes) -> None:
        """Send a message that may be large to all other processes."""
        for number, part in parts_of(message):
            await self.answer(f"{what}.{number}", part)

    async def answer(self, what: str, message: bytes) -> None:
        """Send a message to all other processes."""
        await self._coordinator.put(f"{self._prefix}/{what}", message)

    async def commit(self) -> None:
        """Decide that the round succeeds.

        Raises:
            …: another process has aborted it.
        """
        decision = await self._decide(COMMIT)
        if decision != COMMIT:
            raise self._note(decision)
        # From here on, silence of other processes is ignored.
        self._committed = True

    async def finish(self, message: bytes = b"") -> None:
        """Tell all other processes that the round has succeeded, after `commit`."""
        await self.answer("outcome", COMMIT + message)
        self._end(message)

    # -- the others

    async def answered(self, what: str) -> bytes:
        """Return an answer of process 0; `watch` must be running, and fails if none comes."""
        while True:
            message = await self._coordinator.wait(
                f"{self._prefix}/{what}", timeout_s=self._slice_s
            )
            if message is not None:
                return message

    async def answered_parts(self, what: str) -> bytes:
        """Return the message of process 0 from `answer_parts`."""
        return await self._joined(what, await self.answered(f"{what}.0"))

    async def reached(self, what: str, number: int) -> bool:
        """Return True once process 0 has sent at least this number, False if the round fails."""
        key = f"{self._prefix}/{what}"
        for pause in pauses(self.group.process_count):
            message = await self._coordinator.wait(key, timeout_s=self._slice_s)
            if message is not None and int(message) >= number:
                return True
            if self.failed:
                return False
            await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    async def outcome(self) -> bytes:
        """Return process 0's message once the round has succeeded; `watch` must be running."""
        await self._ended.wait()
        assert self.result is not None
        return self.result

    # -- watching

    async def _lead(self) -> None:
        alive_at = time.monotonic()
        waits = pauses(self.group.process_count)
        while not self._committed:
            found = await self._coordinator.list(self._prefix)
            decision = found.get("decision", COMMIT)
            if decision != COMMIT:
                raise await self._announce(decision)
            if found != self._found:
                waits = pauses(self.group.process_count)
            self._found = found
            await self._check_calls()
            self._changed.set()
            if time.monotonic() - alive_at > SLICE_S:
                alive_at = time.monotonic()
                await self._check_alive(await departed(self.group))
            if not self._expecting:
                await self._waited(asyncio.sleep(next(waits)))
            if self._expecting:
                self._expecting = False
                waits = pauses(self.group.process_count)

    async def _follow(self) -> None:
        key = f"{self._prefix}/outcome"
        checked_at = time.monotonic()
        while self.result is None:
            self._expecting = False
            outcome = await self._waited(self._coordinator.wait(key, timeout_s=self._slice_s))
            now = time.monotonic()
            if outcome is None and self._expecting and now < checked_at + self._slice_s:
                continue  # but who posts again and again must notice that process 0 is silent
            checked_at = now
            closed: tuple[int, ...] = ()
            if outcome is None:
                await self._check_decision()
                closed = await departed(self.group)
                if closed or not self._takes_part(0):  # process 0 posts the outcome, then leaves
                    outcome = await self._coordinator.look(key)
            if outcome is None:
                await self._check_alive(closed)
            elif outcome[:1] == COMMIT:
                self._end(outcome[1:])
            else:
                raise self._note(outcome)

    def expect(self) -> None:
        """Poll at once and often: a message is expected, and the pauses have grown long."""
        self._expecting = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.reschedule(asyncio.get_running_loop().time())

    async def _waited(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a wait, None if `expect` has cut it short."""
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await waiting
        except TimeoutError:
            return None
        finally:
            self._waiting = None

    async def _check_decision(self) -> None:
        """Raise if process 0 does not take part and a process has decided against the round.

        Also if process 0 has skipped the round, in another call.
        """
        if self._takes_part(0):
            return  # process 0 announces the decision
        decision = await self._coordinator.look(f"{self._prefix}/decision")
        if decision is not None and decision != COMMIT:
            raise self._note(decision)
        answer = await self._coordinator.look(f"{self._prefix}/{BUSY}")
        if answer is not None and answer.startswith(b"1 "):
            self.skipped = True
            self.check_call(answer[2:].decode())

    def _takes_part(self, process: int) -> bool:
        """Return whether a watched process has begun this round and not ended it."""
        begun = self.beats.last(process, self.kind) >= self.number
        return begun and self.beats.ended(process, self.kind) <= self.number

    def _failure(
        self, error: BaseException, stage: str | None = None, *, other_call: str = ""
    ) -> bytes:
        """Return the decision against the round for this error, with the calls concerned."""
        process, host = self.group.process_index, self.group.host
        message = encode_error(error, process=process, host=host, stage=stage)
        calls = "\t".join(filter(None, (self.name, other_call)))
        return _FAILED + calls.encode() + b"\n" + message

    async def _check_calls(self) -> None:
        """Abort the round if a process made another call."""
        for process, name in self._messages("name").items():
            if (other := name.decode()) != self.name:
                error = other_call_error(self.group, process, other, self.name)
                await self._fail(error, other)

    def _end(self, result: bytes) -> None:
        self.order.agreed()
        self.result = result
        self._ended.set()

    async def _check_alive(self, closed: Sequence[int]) -> None:
        """Abort the round if a watched process is missing or silent, or has closed."""
        group, call = self.group, self.name or self.kind
        watched = range(1, group.process_count) if self.leads else range(1)
        silent = [process for process in watched if self.beats.silent(process)]
        late = []
        if time.monotonic() - self._begun > self.arrival_s:
            late = [process for process in watched if not self._takes_part(process)]
        if closed:
            await self._fail(closed_error(group, closed))
        elif silent:
            await self._fail(silent_error(group, silent, self.silence_s))
        elif late:
            elsewhere = [process for process in late if self.beats.at_work(process)]
            await self._fail(late_error(group, call, late, elsewhere, self.arrival_s))
        else:
            return
        if not self.leads:
            raise unknown_error(group, call)


def _calls_in(decision: bytes) -> tuple[str, ...]:
    """Return the call of the process that decided against a round, and the one that differed.

    Empty for a decision to commit and for calls without names.
    """
    return tuple(filter(None, decision[1:].partition(b"\n")[0].decode().split("\t")))


async def briefly(call: Coroutine[Any, Any, T], *, limit_s: float = POST_S) -> T | None:
    """Await a call to the service; return None if it fails or takes longer than `limit_s`.

    A stopped service must not delay a process that was cancelled.
    """
    with contextlib.suppress(AsyncCheckpointError, TimeoutError):
        async with asyncio.timeout(limit_s):
            return await call
    return None
