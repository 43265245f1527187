"""Rounds: messages, one decision, one outcome, and all ways a process can be missing."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from asyncckpt.coordinators import beats as beats_module
from asyncckpt.coordinators import rounds
from asyncckpt.coordinators.beats import Beats
from asyncckpt.coordinators.group import Group, part
from asyncckpt.coordinators.key_values import longest_pause_s, pauses
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import (
    MismatchError,
    SaveAbortedError,
    SaveError,
    SaveOutcomeUnknownError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.engine import Engine
from tests.coordinators.memory import MemoryCoordinator

COUNT = 3

Part = Callable[[Round], Coroutine[Any, Any, Any]]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine("rounds")
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats_module, "BEAT_S", 0.05)
    monkeypatch.setattr(rounds, "SLICE_S", 0.05)


def play(
    engine: Engine,
    parts: dict[int, Part],
    *,
    name: str | dict[int, str] = "",
    arrival_s: float = 20.0,
    silence_s: float = 20.0,
    service: MemoryCoordinator | None = None,
    one_left: asyncio.Event | None = None,
) -> dict[int, Any]:
    """Let each process play its part in one round; return results and errors.

    Sets `one_left` once all but one have ended.
    """

    given = service

    async def everybody() -> dict[int, Any]:
        service = given or MemoryCoordinator()
        left = set(parts)

        async def one(process: int, part: Part) -> Any:
            group = Group(service, "a" * 32, process, COUNT, ("h0", "h1", "h2"), "asyncckpt/x")
            round_ = Round(
                Beats(group, silence_s, every_s=0.05),
                "save",
                7,
                name=name if isinstance(name, str) else name[process],
                arrival_s=arrival_s,
            )
            try:
                return await round_.run(lambda: part(round_))
            except (Exception, asyncio.CancelledError) as error:
                return error
            finally:
                left.remove(process)
                if len(left) == 1 and one_left is not None:
                    one_left.set()

        results = await asyncio.gather(*(one(*item) for item in parts.items()))
        return dict(zip(parts, results, strict=True))

    return engine.submit(everybody).result()


async def lead(round_: Round) -> Any:
    found = await round_.gathered("ready")
    await round_.commit()
    await round_.finish(b"result")
    return found


async def follow(round_: Round) -> Any:
    await round_.post("ready", b"me")
    return await round_.outcome()


def test_who_expects_a_message_does_not_end_a_long_pause_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(MemoryCoordinator):
        waits = 0

        async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
            self.waits += 1
            return await super().wait(key, timeout_s=timeout_s)

    async def leads_late(round_: Round) -> Any:
        await asyncio.sleep(0.1)
        return await lead(round_)

    async def follows_late(round_: Round) -> Any:
        await asyncio.sleep(0.05)
        return await follow(round_)

    monkeypatch.setattr(rounds, "pauses", lambda count: itertools.repeat(3600.0))
    monkeypatch.setattr(rounds, "SLICE_S", 3600.0)
    service = Counting()
    results = play(engine, {0: leads_late, 1: follows_late, 2: follows_late}, service=service)
    assert results[1] == b"result"
    assert service.waits == 4  # from the beginning, and again when an answer was to come


def test_all_succeed_with_the_result_of_process_0(engine: Engine) -> None:
    results = play(engine, {0: lead, 1: follow, 2: follow})
    assert results == {0: {1: b"me", 2: b"me"}, 1: b"result", 2: b"result"}


def test_answers_come_before_the_outcome(engine: Engine) -> None:
    async def asks(round_: Round) -> Any:
        await round_.post("question", b"?")
        answer = await round_.answered("answer")
        return answer, await follow(round_)

    async def answers(round_: Round) -> Any:
        await round_.gathered("question")
        await round_.answer("answer", b"!")
        return await lead(round_)

    results = play(engine, {0: answers, 1: asks, 2: asks})
    assert results[1] == (b"!", b"result")


@pytest.mark.parametrize("failing", range(COUNT))
def test_one_error_is_raised_by_all_with_the_process_and_host(engine: Engine, failing: int) -> None:
    async def fail(round_: Round) -> Any:
        raise MismatchError("w: the values differ", path="w")

    parts: dict[int, Part] = {0: lead, 1: follow, 2: follow}
    results = play(engine, parts | {failing: fail})
    for process, error in results.items():
        assert isinstance(error, MismatchError)
        assert error.path == "w"
        assert (f"process {failing} (h{failing})" in str(error)) == (process != failing)


def test_of_two_errors_all_raise_the_first(engine: Engine) -> None:
    async def fail(round_: Round) -> Any:
        raise MismatchError(f"from {round_.group.process_index}")

    results = play(engine, {0: lead, 1: fail, 2: fail})
    assert isinstance(results[0], MismatchError)
    assert {str(results[1]), str(results[2])} == {"from 1", "from 2"}


def test_after_the_decision_nobody_can_abort(engine: Engine) -> None:
    decided = asyncio.Event()

    async def slow(round_: Round) -> Any:
        await round_.gathered("ready")
        await round_.commit()
        decided.set()
        await asyncio.sleep(0.2)
        await round_.finish(b"late")

    async def withdraws(round_: Round) -> Any:
        await round_.post("ready", b"me")
        await decided.wait()
        assert not await round_.abort(SaveAbortedError("too late"))
        return await round_.outcome()

    results = play(engine, {0: slow, 1: withdraws, 2: follow})
    assert results[1] == results[2] == b"late"


def test_an_abort_before_the_decision_wins(engine: Engine) -> None:
    async def withdraws(round_: Round) -> Any:
        await round_.post("ready", b"me")
        assert await round_.abort(SaveAbortedError("cancelled"))
        return await round_.outcome()

    async def waits(round_: Round) -> Any:
        await asyncio.sleep(0.3)
        return await lead(round_)

    results = play(engine, {0: waits, 1: withdraws, 2: follow})
    assert all(isinstance(error, SaveAbortedError) for error in results.values())


def test_a_failure_of_process_0_after_its_decision_is_the_outcome(engine: Engine) -> None:
    async def fails_to_publish(round_: Round) -> Any:
        await round_.gathered("ready")
        await round_.commit()
        raise SaveError("no space left")

    results = play(engine, {0: fails_to_publish, 1: follow, 2: follow})
    assert [str(results[p]) for p in (1, 2)] == ["process 0 (h0): no space left"] * 2


@pytest.mark.parametrize("missing", range(COUNT))
def test_a_process_that_never_comes_is_named_on_all_others(engine: Engine, missing: int) -> None:
    parts: dict[int, Part] = {0: lead, 1: follow, 2: follow}
    del parts[missing]
    results = play(engine, parts, arrival_s=0.3)
    for error in results.values():
        assert isinstance(error, SaveError)
        assert f"process {missing} (h{missing})" in str(error)
        assert 'coordinator="single"' in str(error)


def test_process_0_that_falls_silent_between_decision_and_outcome_leaves_it_unknown(
    engine: Engine,
) -> None:
    async def stops(round_: Round) -> Any:
        await round_.gathered("ready")
        await round_.commit()
        # As if the process were stopped: its beats end, and so does everything else.
        beating = round_.beats._beating
        assert beating is not None
        beating.cancel()
        async with asyncio.timeout(20):
            await others_ended.wait()
        await round_.finish(b"late")

    others_ended = asyncio.Event()
    parts: dict[int, Part] = {0: stops, 1: follow, 2: follow}
    results = play(engine, parts, silence_s=1.0, one_left=others_ended)
    for process in (1, 2):
        assert isinstance(results[process], SaveOutcomeUnknownError)
        assert "process 0 (h0)" in str(results[process])


def test_who_posts_all_the_time_notices_that_process_0_is_silent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message cuts short the wait for the outcome, after which process 0 is checked."""

    async def posts(round_: Round) -> Any:
        for _ in range(1000):
            await round_.post("ready", b"me")
            await asyncio.sleep(0.01)
        raise AssertionError

    monkeypatch.setattr(rounds, "SLICE_S", 0.2)
    results = play(engine, {1: posts, 2: posts}, arrival_s=0.3)
    for process in (1, 2):
        assert isinstance(results[process], SaveError)
        assert "process 0" in str(results[process])


def test_a_process_that_falls_silent_is_named(engine: Engine) -> None:
    async def stops(round_: Round) -> Any:
        await asyncio.sleep(0.2)  # until it was heard once
        beating = round_.beats._beating
        assert beating is not None
        beating.cancel()
        async with asyncio.timeout(20):
            await others_ended.wait()

    others_ended = asyncio.Event()
    parts: dict[int, Part] = {0: lead, 1: stops, 2: follow}
    results = play(engine, parts, silence_s=1.0, one_left=others_ended)
    for process in (0, 2):
        assert isinstance(results[process], SaveError)
        assert "process 1 (h1) gave no sign of life" in str(results[process])
        assert "committed" not in str(results[process]), "the call may be a restore"


@pytest.mark.parametrize("closed", range(COUNT))
def test_a_process_that_has_left_is_named_at_once(engine: Engine, closed: int) -> None:
    service = MemoryCoordinator()

    async def leave() -> None:
        await part(Group(service, "a" * 32, closed, COUNT, ("h0", "h1", "h2"), "asyncckpt/x"))

    engine.submit(leave).result()
    parts: dict[int, Part] = {0: lead, 1: follow, 2: follow}
    del parts[closed]
    begun = time.monotonic()
    results = play(engine, parts, service=service)  # arrival_s is 20 s
    assert time.monotonic() - begun < 10
    for error in results.values():
        assert isinstance(error, UsageError)
        assert f"process {closed} (h{closed}) has closed the Checkpointer" in str(error)
        assert "committed" not in str(error), "the call may be a restore"


def test_a_process_0_that_left_after_the_outcome_has_not_failed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MemoryCoordinator.wait

    async def in_vain(service: MemoryCoordinator, key: str, *, timeout_s: float) -> bytes | None:
        # The outcome comes just after the end of every wait for it.
        await asyncio.sleep(0)
        return None if key.endswith("outcome") else await real(service, key, timeout_s=timeout_s)

    async def leads_and_leaves(round_: Round) -> Any:
        await lead(round_)
        await part(round_.group)

    monkeypatch.setattr(MemoryCoordinator, "wait", in_vain)
    results = play(engine, {0: leads_and_leaves, 1: follow, 2: follow})
    assert results == {0: None, 1: b"result", 2: b"result"}


def test_an_error_that_was_posted_before_leaving_is_the_one_that_counts(engine: Engine) -> None:
    left = asyncio.Event()

    async def fails_and_leaves(round_: Round) -> Any:
        await round_.abort(MismatchError("w differs"))
        await part(round_.group)
        left.set()

    async def late(round_: Round) -> Any:
        await left.wait()
        await round_._check_alive((1,))

    results = play(engine, {0: late, 1: fails_and_leaves, 2: follow})
    assert results[1] is None
    assert all(isinstance(results[process], MismatchError) for process in (0, 2)), results


def test_other_calls_on_other_processes_are_an_error_on_all(engine: Engine) -> None:
    names = {0: "delete(3)", 1: "delete(3)", 2: "latest_step()"}
    results = play(engine, {0: lead, 1: follow, 2: follow}, name=names)
    for error in results.values():
        assert isinstance(error, UsageError)
        assert "process 2 (h2) called latest_step()" in str(error)


def test_a_message_that_excludes_what_is_waited_for_ends_the_round(engine: Engine) -> None:
    async def plans(round_: Round) -> Any:
        await round_.gathered(
            "plan", instead="ready", refuse=lambda process, message: UsageError(f"{message!r}")
        )

    results = play(engine, {0: plans, 1: follow, 2: follow})
    assert all(isinstance(error, UsageError) for error in results.values())
    assert str(results[0]) == "b'me'"


class Forgetful(MemoryCoordinator):
    """A coordinator whose keys can be set twice."""

    async def put_once(self, key: str, value: bytes) -> bytes:
        await self.put(key, value)
        return value


def test_control_a_decision_that_can_be_set_twice_is_two_decisions(engine: Engine) -> None:
    decided = asyncio.Event()

    async def slow(round_: Round) -> Any:
        await round_.gathered("ready")
        await round_.commit()
        decided.set()
        await asyncio.sleep(0.2)
        await round_.finish(b"late")

    async def withdraws(round_: Round) -> Any:
        await round_.post("ready", b"me")
        await decided.wait()
        return await round_.abort(SaveAbortedError("too late"))

    results = play(engine, {0: slow, 1: withdraws, 2: follow}, service=Forgetful())
    assert results == {0: None, 1: True, 2: b"late"}, "one aborts what the others commit"


def test_nobody_is_missed_after_the_decision_to_commit(engine: Engine) -> None:
    async def publishes(round_: Round) -> Any:
        await round_.gathered("ready")
        await round_.commit()
        await asyncio.sleep(1.0)  # process 2 falls silent, and process 1 rests
        await round_.finish(b"result")
        return "published"

    async def dies(round_: Round) -> Any:
        await round_.post("ready", b"me")
        beating = round_.beats._beating
        assert beating is not None
        beating.cancel()
        return await round_.outcome()

    results = play(engine, {0: publishes, 1: follow, 2: dies}, silence_s=0.3, arrival_s=0.3)
    assert (results[0], results[1]) == ("published", b"result")


def test_a_refusal_that_process_0_could_not_announce_is_found(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(round_: Round) -> Any:
        key = f"{round_._prefix}/decision"
        failure = round_._failure(MismatchError("w differs"), "upload")
        await round_.group.coordinator.put_once(key, failure)
        await asyncio.sleep(0.3)
        raise asyncio.CancelledError

    async def unannounced(round_: Round, *_: Any) -> bool:
        return True

    real = Round.abort

    async def abort(round_: Round, *args: Any) -> bool:
        return await (unannounced if round_.leads else real)(round_, *args)

    monkeypatch.setattr(Round, "abort", abort)
    monkeypatch.setattr(Round, "_lead", lambda round_: asyncio.sleep(20))
    results = play(engine, {0: fails, 1: follow, 2: follow}, silence_s=20.0)
    assert all(isinstance(results[process], MismatchError) for process in (1, 2)), results


def test_a_round_that_begins_while_another_one_ends_is_heard(engine: Engine) -> None:
    async def both() -> str:
        service = MemoryCoordinator()
        group = Group(service, "a" * 32, 0, 2, ("h", "h"), "asyncckpt/x")
        beats = Beats(group, 20.0, every_s=0.05)
        beats.begin("save", 1)
        ending = asyncio.create_task(beats.end("save", 1))
        await asyncio.sleep(0)
        beats.begin("save", 2)
        await ending
        await asyncio.sleep(0.2)
        posted = await service.list(group.key("beat"))
        await beats.end("save", 2)
        return posted["0"].decode()

    beat = json.loads(engine.submit(both).result())
    assert (beat["at_work"], beat["reached"], beat["ended"]) == (True, {"save": 2}, {"save": 2})


def pair() -> tuple[MemoryCoordinator, Beats, Beats]:
    """Return a service, and the beats of two processes that use it."""
    service = MemoryCoordinator()
    groups = [
        Group(service, "a" * 32, process, 2, ("h0", "h1"), "asyncckpt/x") for process in (0, 1)
    ]
    first, second = (Beats(group, 20.0, every_s=0.05) for group in groups)
    return service, first, second


def round_of(beats: Beats, number: int, name: str = "", arrival_s: float = 20.0) -> Round:
    return Round(beats, "save", number, name=name, arrival_s=arrival_s)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_process_that_was_left_behind_learns_where_the_others_are(
    engine: Engine, behind: int
) -> None:
    async def both() -> Any:
        _, *beats = pair()
        ahead = beats[1 - behind]
        round_ = round_of(beats[behind], 7, "save(7)", arrival_s=0.3)
        part = partial(round_.gathered, "ready") if round_.leads else round_.outcome
        ahead.begin("save", 9)
        try:
            with pytest.raises(SaveError, match=r"made this call, save\(7\)") as caught:
                await round_.run(part)
        finally:
            await ahead.end("save", 9)
        assert f"process {1 - behind} (h{1 - behind}) is in another call" in str(caught.value)
        assert round_.failed

    engine.submit(both).result()


def test_a_round_is_kept_until_the_last_process_has_ended_it(engine: Engine) -> None:
    async def both() -> Any:
        service, leading, following = pair()

        async def left() -> set[str]:
            return {key[0] for key in await service.list(leading.group.key("save"))}

        # As by saves that are skipped: process 0 waits for nobody.
        for number in range(5):
            round_ = round_of(leading, number)
            await round_.run(partial(round_.answer, "busy", b"1"))
        assert await left() == set("01234")
        for number in range(4):
            round_ = round_of(following, number)
            assert await round_.run(partial(round_.answered, "busy")) == b"1"
        # Process 0 looks at the others' beats when it begins a round, and deletes at its end.
        last = round_of(leading, 5)
        await last.run(partial(asyncio.sleep, 0.2))
        assert await left() == {"4"}

    engine.submit(both).result()


def test_only_a_round_that_failed_in_another_call_is_missed(engine: Engine) -> None:
    async def both() -> Any:
        _, leading, following = pair()
        await round_of(leading, 1, "save(1)").abort(SaveError("late"))
        await round_of(leading, 2).abort(SaveError("of an unknown call"))
        await round_of(leading, 3, "save(3)").commit()
        return [await round_of(following, number, "save(2)").missed() for number in range(4)] + [
            await round_of(following, 1, "save(1)").missed()
        ]

    assert engine.submit(both).result() == [False, True, False, False, False]


def test_waits_of_many_processes_mostly_pause_as_long_as_they_may(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait begins with short pauses: too short a wait would consist of these."""
    monkeypatch.setattr(rounds, "SLICE_S", 1.0)

    async def looks_a_second() -> float:
        group = Group(MemoryCoordinator(), "a" * 32, 1, 10_000, ("h",) * 10_000, "asyncckpt/x")
        round_ = Round(Beats(group, 20.0), "save", 7, arrival_s=20.0)
        ends = itertools.accumulate(pauses(10_000))
        looks = list(itertools.takewhile(lambda end: end < round_._slice_s, ends))
        return len(looks) / round_._slice_s

    assert engine.submit(looks_a_second).result() <= 1.6 / longest_pause_s(10_000)


def test_a_service_that_fails_after_the_decision_does_not_end_the_round(engine: Engine) -> None:
    listing, decided = asyncio.Event(), asyncio.Event()

    class Failing(MemoryCoordinator):
        async def list(self, prefix: str) -> Mapping[str, bytes]:
            if prefix.endswith("/bye"):
                listing.set()
                await decided.wait()
                raise StoreError("reset by peer")
            return await super().list(prefix)

    async def leads(round_: Round) -> Any:
        await listing.wait()
        await round_.gathered("ready")
        await round_.commit()
        decided.set()
        for _ in range(100):  # in which the error would end the round
            await asyncio.sleep(0)
        await round_.finish(b"result")
        return b"result"

    results = play(engine, {0: leads, 1: follow, 2: follow}, service=Failing())
    assert results == dict.fromkeys(range(COUNT), b"result")


def test_an_outcome_is_not_replaced(engine: Engine) -> None:
    service = MemoryCoordinator()

    async def finishes(round_: Round) -> Any:
        await lead(round_)
        assert not await round_.abort(SaveAbortedError("too late"))

    assert play(engine, {0: finishes, 1: follow, 2: follow}, service=service)[0] is None
    assert service._values[f"asyncckpt/{'a' * 32}/save/7/outcome"] == b"+result"
