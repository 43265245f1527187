"""The handshake: all processes agree on a new run, or all of them get the same error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.coordinators import handshake, meeting
from asyncckpt.coordinators.group import Group, part
from asyncckpt.coordinators.handshake import shake_hands
from asyncckpt.coordinators.meeting import RELEASE, Hello
from asyncckpt.errors import AsyncCheckpointError, StoreError, UsageError
from asyncckpt.version import PROTOCOL, VERSION
from tests.coordinators.members import Member, members

ARRIVAL_S = 20.0
SOON_S = 0.3


def shake(
    member: Member, *, opened: int = 1, arrival_s: float = ARRIVAL_S, root: str = "/run"
) -> Coroutine[Any, Any, Group]:
    return shake_hands(member, root=root, opened=opened, arrival_s=arrival_s)


async def outcomes(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results or errors of the calls."""

    async def outcome(call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except AsyncCheckpointError as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(call)) for call in calls]
    return [task.result() for task in tasks]


@pytest.mark.parametrize("count", [1, 2, 5, 600])
async def test_all_processes_agree_on_a_run(count: int) -> None:
    groups = await outcomes(map(shake, members(count)))
    assert len({group.run_id for group in groups}) == 1
    assert len(groups[0].run_id) == 32
    assert int(groups[0].run_id, 16) > 0
    assert [group.process_index for group in groups] == list(range(count))
    assert {group.process_count for group in groups} == {count}
    assert {group.hosts for group in groups} == {groups[0].hosts}
    assert {group.processes_on_host for group in groups} == {count}
    assert groups[0].key("a", "b") == f"asyncckpt/{groups[0].run_id}/a/b"


async def test_every_handshake_makes_another_run() -> None:
    values: dict[str, bytes] = {}
    runs = []
    for opened in (1, 2, 2):
        groups = await outcomes(shake(m, opened=opened) for m in members(3, values))
        runs.append({group.run_id for group in groups})
    assert [len(run) for run in runs] == [1, 1, 1]
    assert len(set.union(*runs)) == 3


async def test_groups_on_one_root_are_kept_apart() -> None:
    values: dict[str, bytes] = {}
    both = await outcomes(
        [
            *(shake(m, opened=1) for m in members(3, values)),
            *(shake(m, opened=2) for m in members(3, values)),
            *(shake(m, root="/other") for m in members(3, values)),
        ]
    )
    runs = [{group.run_id for group in both[i : i + 3]} for i in (0, 3, 6)]
    assert [len(run) for run in runs] == [1, 1, 1]
    assert len(set.union(*runs)) == 3


async def restarted() -> tuple[list[Group], set[str]]:
    """A second life with the keys of the first: process 1 comes long before process 0.

    Returns the groups, only that of process 1 if it does not wait, and the runs of the first life.
    """
    values: dict[str, bytes] = {}
    before = {group.run_id for group in await outcomes(map(shake, members(2, values)))}
    host, guest = members(2, values)
    async with asyncio.TaskGroup() as group:
        early = group.create_task(shake(guest))
        await asyncio.wait((early,), timeout=SOON_S)
        if early.done():
            return [early.result()], before
        late = group.create_task(shake(host))
    return [late.result(), early.result()], before


async def test_a_restarted_process_does_not_believe_its_predecessor() -> None:
    groups, before = await restarted()
    assert len(groups) == 2
    assert len({group.run_id for group in groups} | before) == 2


async def test_without_the_echo_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "echoes", lambda *_: True)
    groups, before = await restarted()
    assert {group.run_id for group in groups} == before


async def test_fewer_processes_ignore_those_of_an_earlier_life() -> None:
    values: dict[str, bytes] = {}
    before = await outcomes(map(shake, members(4, values)))
    # Long before process 0 welcomes those that have come, when its time is up.
    groups = await outcomes(shake(member, arrival_s=60.0) for member in members(2, values))
    assert len({group.run_id for group in groups}) == 1
    assert groups[0].run_id != before[0].run_id
    assert [group.process_count for group in groups] == [2, 2]


class Mortal(Member):
    """A process 0 that dies once it has posted its welcome."""

    async def put(self, key: str, value: bytes) -> None:
        await super().put(key, value)
        if "/welcome/" in key:
            await asyncio.Event().wait()


async def test_a_process_0_that_falls_silent_after_its_welcome_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that give up first have left when the others do, and are not to blame."""
    monkeypatch.setattr(handshake, "ANSWER_S", 0.1)
    values: dict[str, bytes] = {}
    _, *guests = members(3, values)
    async with asyncio.TaskGroup() as group:
        host = group.create_task(shake(Mortal(values, 0, 3)))
        waiting = [shake(g, arrival_s=SOON_S * (1 + n)) for n, g in enumerate(guests)]
        errors = await outcomes(waiting)
        host.cancel()
    for process, error in enumerate(errors, 1):
        assert f"process 0 of 3 has welcomed process {process}" in str(error), error


async def test_process_0_does_not_believe_the_predecessors_of_others() -> None:
    values: dict[str, bytes] = {}
    await outcomes(map(shake, members(3, values)))
    host, *guests = members(3, values)
    async with asyncio.TaskGroup() as group:
        early = group.create_task(shake(host))
        await asyncio.wait((early,), timeout=SOON_S)
        assert not early.done()
        late = [group.create_task(shake(guest)) for guest in guests]
    assert {task.result().run_id for task in late} == {early.result().run_id}


@pytest.mark.parametrize("absent", [0, 2])
async def test_a_process_that_never_comes_is_named(absent: int) -> None:
    begun = time.monotonic()
    errors = await outcomes(
        shake(m, arrival_s=SOON_S) for m in members(3) if m.process_index != absent
    )
    assert time.monotonic() - begun < 10
    for error in errors:
        assert isinstance(error, UsageError)
        assert f"waited 0.3 s for process {absent}; here: process" in str(error)
        assert 'coordinator="single"' in str(error)
        assert str(error.expected) == "3"
        assert error.location == "/run"


@pytest.mark.parametrize("process", [0, 1])
async def test_a_process_that_cannot_delete_its_earlier_hellos_belongs_to_the_run(
    process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = members(2)
    own, kept = f"/hello/{process}", job[process].list

    async def failing(prefix: str) -> Any:
        if prefix.endswith(own) and job[process].calls["put"] > 0:  # all have agreed
            raise StoreError("the service is gone")
        return await kept(prefix)

    monkeypatch.setattr(job[process], "list", failing)
    one, two = await outcomes(map(shake, job))
    assert one.run_id == two.run_id


async def test_keys_of_an_earlier_life_are_not_counted_as_processes() -> None:
    values: dict[str, bytes] = {}
    await outcomes(map(shake, members(3, values)))
    errors = await outcomes(
        shake(m, arrival_s=SOON_S) for m in members(3, values) if m.process_index != 1
    )
    assert all("for process 1; here: processes 0, 2" in str(error) for error in errors)
    (error,) = await outcomes([shake(members(3, values)[2], arrival_s=SOON_S)])
    assert "waited 0.3 s for process" in str(error)


async def test_a_checkpointer_opened_on_some_processes_only_is_told_the_counts() -> None:
    values: dict[str, bytes] = {}
    host, guest = members(2, values)
    await outcomes((shake(host), shake(guest)))
    (error,) = await outcomes([shake(host, opened=2, arrival_s=SOON_S)])
    assert isinstance(error, UsageError)
    assert "process 1 has opened it 1 times, process 0 2 times" in str(error)
    (error,) = await outcomes([shake(guest, opened=3, arrival_s=SOON_S)])
    assert "process 0 has opened it 2 times, process 1 3 times" in str(error)


@pytest.mark.parametrize("twice", [0, 1])
@pytest.mark.parametrize("programs", [1, 2])
async def test_a_process_that_comes_twice_is_an_error_for_all(
    monkeypatch: pytest.MonkeyPatch, twice: int, programs: int
) -> None:
    if programs == 2:
        pids = SimpleNamespace(getpid=itertools.count(1000).__next__)
        monkeypatch.setattr(meeting, "os", pids)
    values: dict[str, bytes] = {}
    job = [*members(3, values), members(3, values)[twice]]
    errors = await outcomes(shake(m, arrival_s=2.0) for m in job)
    assert all(isinstance(error, UsageError) for error in errors)
    what = {
        1: rf"process {twice} of 3 \(pid \d+ on .*\) has opened it twice at once",
        2: rf"process {twice} of 3 runs twice: pid \d+ on .*, and pid \d+ on",
    }[programs]
    assert sum(bool(re.search(what, str(error))) for error in errors) == 4


@pytest.mark.parametrize("release", ["0.0.1", VERSION, f"{VERSION} (protocol {PROTOCOL + 1})"])
async def test_another_release_or_protocol_is_named_with_its_host(release: str) -> None:
    class OfAnotherRelease(Member):
        async def put(self, key: str, value: bytes) -> None:
            await super().put(key, value.replace(RELEASE.encode(), release.encode()))

    host, guest, other = members(3)
    other = OfAnotherRelease(host._values, 2, 3)
    errors = await outcomes(map(shake, (host, guest, other)))
    for error in errors:
        assert isinstance(error, UsageError)
        assert "process 2 (pid" in str(error)
        assert f"runs asyncckpt {release}, process 0 (pid" in str(error)
        assert f"runs {VERSION} (protocol {PROTOCOL}): install the same release" in str(error)
    assert str(errors[1]).startswith("process 0 (")
    assert [error.process for error in errors] == [None, 0, 0]


@pytest.mark.parametrize("places", [[(0, 2), (1, 3)], [(0, 3), (1, 2)], [(0, 2), (1, 3), (2, 3)]])
async def test_different_counts_are_an_error_for_all_that_names_both(
    places: list[tuple[int, int]],
) -> None:
    values: dict[str, bytes] = {}
    begun = time.monotonic()
    errors = await outcomes(shake(Member(values, *place)) for place in places)
    assert time.monotonic() - begun < ARRIVAL_S / 2
    for error in errors:
        assert isinstance(error, UsageError), errors
        for process, count in places[:2]:
            assert f"process {process} (pid" in str(error)
            assert f"process_count={count}" in str(error)


async def test_a_process_beyond_the_count_is_an_error_for_all() -> None:
    values: dict[str, bytes] = {}
    async with asyncio.TaskGroup() as group:
        early = group.create_task(outcomes([shake(Member(values, 2, 3))]))
        while not values:  # until it has said hello
            await asyncio.sleep(0)
        errors = await outcomes([shake(Member(values, 0, 2))])
    for error in (*errors, *early.result()):
        assert isinstance(error, UsageError)
        assert "process 2 (pid" in str(error) and "process_count=3" in str(error)


def test_a_hello_of_another_release_may_have_other_fields() -> None:
    hello = Hello("ab" * 8, "host", 1)
    fields = json.loads(hello.encoded())
    del fields["count"]
    assert Hello.decoded(json.dumps({**fields, "more": 1}).encode()) == hello


@pytest.mark.parametrize("change", [{"more": 1}, {"count": None}])
async def test_a_process_0_of_another_release_in_an_earlier_life_is_no_second_one(
    change: dict[str, Any],
) -> None:
    job = members(2)
    await outcomes(map(shake, job))
    values = job[0]._values
    (key,) = (key for key in values if "/hello/0/" in key)
    fields = json.loads(values[key]) | change
    values[key] = json.dumps({k: v for k, v in fields.items() if v is not None}).encode()
    groups = await outcomes(map(shake, members(2, values)))
    assert all(isinstance(group, Group) for group in groups), groups


async def test_a_service_that_takes_no_hello_is_the_error_of_process_0() -> None:
    class Full(Member):
        async def put(self, key: str, value: bytes) -> None:
            raise StoreError("no space")

    (error,) = await outcomes([shake(Full({}, 0, 2))])
    assert isinstance(error, StoreError)
    assert str(error) == "no space"


async def test_a_cancelled_process_0_tells_the_others() -> None:
    host, guest, _ = members(3)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(outcomes([shake(guest)]))
        gathering = group.create_task(shake(members(3, guest._values)[0]))
        await asyncio.sleep(0.1)
        gathering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((gathering,))
    (error,) = waiting.result()
    assert "process 0 (" in str(error)
    assert "cancelled" in str(error)
    assert host.calls == Counter()


async def test_a_cancelled_process_withdraws() -> None:
    host, guest = members(2)
    async with asyncio.TaskGroup() as group:
        arriving = group.create_task(shake(guest))
        await asyncio.sleep(0.05)
        arriving.cancel()
    (error,) = await outcomes([shake(host, arrival_s=SOON_S)])
    assert "for process 1; here: process 0" in str(error)


async def test_a_process_that_acknowledged_and_was_cancelled_withdraws() -> None:
    values: dict[str, bytes] = {}
    host, guest, _ = members(3, values)
    async with asyncio.TaskGroup() as group:
        gathering = group.create_task(outcomes([shake(host, arrival_s=0.9)]))
        arriving = group.create_task(shake(guest))
        await asyncio.sleep(0.2)
        (hello,) = (value for key, value in values.items() if "/hello/1/" in key)
        assert Hello.decoded(hello).run
        arriving.cancel()
    assert "for processes 1, 2; here: process 0" in str(gathering.result()[0])


async def test_calls_of_process_0_do_not_grow_with_the_number_of_processes() -> None:
    counts = []
    for count in (2, 200):
        job = members(count)
        await outcomes(map(shake, job))
        counts.append({kind: n for kind, n in job[0].calls.items() if kind != "list"})
        assert job[0].calls["list"] < 50
    assert counts[0] == counts[1]


@pytest.mark.parametrize("early", [0, 1])
async def test_the_last_one_out_leaves_the_keys_of_a_later_job(early: int) -> None:
    values: dict[str, bytes] = {}
    before = await outcomes(map(shake, members(2, values)))
    await part(before[0])
    later, left = members(2, values), dict(values)
    async with asyncio.TaskGroup() as group, asyncio.timeout(30):
        first = group.create_task(shake(later[early], arrival_s=5.0))
        while values == left:  # it has not said hello
            await asyncio.sleep(0)
        await part(before[1])
        second = group.create_task(shake(later[1 - early], arrival_s=5.0))
    groups = first.result(), second.result()
    assert groups[0].run_id == groups[1].run_id != before[0].run_id
    for one in groups:
        await part(one)
    assert values == {}


async def test_the_last_one_out_deletes_all_keys() -> None:
    values: dict[str, bytes] = {}
    groups = await outcomes(map(shake, members(3, values)))
    await groups[1].coordinator.put(groups[1].key("beat", "1"), b"x")
    for group in groups[:2]:
        await part(group)
    assert values
    await part(groups[2])
    assert values == {}
    (alone,) = await outcomes(map(shake, members(1)))
    await part(alone)
