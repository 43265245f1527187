"""Claims on an object store: which records count after crashes, late requests and damage."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.errors import (
    AsyncCheckpointError,
    FencedError,
    SaveOutcomeUnknownError,
    StoreError,
    UnsupportedFormatError,
)
from asyncckpt.format.record import seal
from asyncckpt.stores.objects.requests import requests
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.checkpoints import delete, expect, expect_no_record, fill, identity, save
from tests.simulator import Fault, Gate, Simulator
from tests.stores.objects.stores import ROOT, UNRACED, names, opened

FOREVER = 1 << 30
DAY_S = 24 * 3600.0
YEAR_S = 366 * DAY_S
KINDS = ("obstore", "gcsfs")
LISTS = {"kind": "put_object", "key": "*/inherited-*"}


async def claimed(store: ObjectStore) -> int:
    claim = await store.claim()
    assert claim is not None
    return claim.epoch


async def late_save(
    sim: Simulator, store: ObjectStore, name: str, text: str, seed: int, **options: Any
) -> tuple[asyncio.Task[None], Gate]:
    """A save whose record is on its way until the gate is released."""
    gate = Gate()
    sim.faults.append(Fault(kind="put_object", key=f"*/{name}/checkpoint.json", gate=gate))
    saving = asyncio.create_task(save(store, name, text, seed, **options))
    await gate.reached.wait()
    return saving, gate


async def listed(store: ObjectStore) -> set[str]:
    """Names of which the record counts."""
    found = set()
    for name in await store.names():
        with suppress(AssertionError):
            try:
                await expect_no_record(store, name)
            except BaseException:
                found.add(name)
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_a_claim_without_its_list_hides_nothing(sim: Simulator, kind: str) -> None:
    """Its maker died; the job before it goes on, as far as it can, and nothing is hidden."""
    async with opened(kind, sim) as store, opened(kind, sim) as dying:
        first = await claimed(store)
        await save(store, "1", "a", 1, epoch=first)
        sim.faults.append(Fault(**LISTS, number=0, times=FOREVER, status=403))
        with pytest.raises(StoreError, match="writing what the claim inherits"):
            await dying.claim()
        sim.faults.clear()
        assert [claim.epoch for claim in await store.claims()] == [1, 2]
        await expect(store, "1", 1)
        with pytest.raises(FencedError) as caught:
            await save(store, "2", "b", 2, epoch=first)
        assert caught.value.visible is None
        await expect(store, "2", 2)
        assert await claimed(dying) == 3
        await expect(dying, "1", 1)
        await expect(dying, "2", 2)


async def test_a_list_that_comes_late_hides_nothing(sim: Simulator) -> None:
    """The maker of a claim was stopped before its list, and another one took over in its turn."""
    async with opened("obstore", sim, policy=UNRACED) as late, opened("obstore", sim) as store:
        gate = Gate()
        sim.faults.append(Fault(**LISTS, gate=gate))
        claiming = asyncio.create_task(late.claim())
        await gate.reached.wait()
        second = await claimed(store)
        await save(store, "1", "a", 1, epoch=second)
        gate.release()
        with pytest.raises(FencedError, match="claim 2, made by process"):
            await claiming
        await expect(store, "1", 1)
        third = await claimed(store)
        await expect(store, "1", 1)
        await save(store, "2", "b", 2, epoch=third)


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 10_000])
async def test_damaged_claims_and_lists_hide_nothing(
    sim: Simulator, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        first = await claimed(store)
        await save(store, "1", "a", 1, epoch=first)
        attempt = await store.begin("2", identity("b"), epoch=first)
        record = await fill(attempt, identity("b"), 2, first)
        second = await claimed(other)
        for name in ("claim-2", "inherited-2"):
            sim.put("bucket", f"{ROOT}/.asyncckpt/{name}", content)
        with pytest.raises(FencedError, match="another process, whose claim cannot be read"):
            await attempt.publish(record)
        async with opened("obstore", sim) as reader:
            with caplog.at_level(logging.WARNING, "asyncckpt"):
                await expect(reader, "1", 1)
                await expect(reader, "2", 2)
            assert "inherited-2: not a valid list of checkpoints" in caplog.text
            assert await claimed(reader) == 3
            await expect(reader, "2", 2)  # which is part of the run from here on
        with pytest.raises(FencedError):
            await save(other, "3", "c", 3, epoch=second)


def newer(sim: Simulator, name: str) -> None:
    """The list has the form of a newer release."""
    key = f"{ROOT}/.asyncckpt/{name}"
    text = sim.get("bucket", key)[:-22].decode().replace('"version":1', '"version":2')
    sim.put("bucket", key, seal(text.replace('"save_ids"', '"saved"') + "}"))


async def test_a_list_of_a_newer_release_is_refused_where_it_would_decide(sim: Simulator) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        first = await claimed(store)
        attempt = await store.begin("1", identity("a"), epoch=first)
        record = await fill(attempt, identity("a"), 1, first)
        second = await claimed(other)
        with pytest.raises(FencedError):
            await attempt.publish(record)
        await save(other, "2", "b", 2, epoch=second)
        newer(sim, "inherited-2")
        async with opened("obstore", sim) as reader:
            with pytest.raises(
                UnsupportedFormatError,
                match=r"inherited-2: the list .* version 2, .* newer release",
            ):
                await expect(reader, "1", 1)
            await expect(reader, "2", 2)


async def test_a_list_of_a_newer_release_does_not_fail_a_sweep(
    sim: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        first = await claimed(store)
        await save(store, "1", "a", 1, epoch=first)
        await claimed(other)
        newer(sim, "inherited-2")
        sim.delete("bucket", f"{ROOT}/1/default/small")
    async with opened("obstore", sim) as reader:
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            assert await reader.sweep() == ()
    assert "continue this run with a newer release" in caplog.text


async def test_a_claim_that_cannot_be_made_is_an_error_and_changes_nothing(sim: Simulator) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        first = await claimed(store)
        key = f"{ROOT}/.asyncckpt/claim-2"
        sim.faults.append(Fault(kind="put_object", key=f"*{key}", number=0, status=403))
        with pytest.raises(StoreError, match=r"claim-2: making a claim failed: .*403"):
            await other.claim()
        await save(store, "1", "a", 1, epoch=first)
        sim.faults.clear()
        assert await claimed(other) == 2


async def test_a_claim_whose_response_is_lost_is_made(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        for key in ("*/claim-1", "*/inherited-1"):
            sim.faults.append(Fault(kind="put_object", key=key, reset=True, applied=True))
        assert await claimed(store) == 1
        await save(store, "1", "a", 1, epoch=1)


async def test_without_an_answer_about_the_claims_the_outcome_is_unknown(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        first = await claimed(store)
        sim.faults.append(Fault(kind="get_object", key="*/claim-2", number=0, status=403))
        with pytest.raises(SaveOutcomeUnknownError, match="the record is written, but whether"):
            await save(store, "1", "a", 1, epoch=first)
        sim.faults.clear()
        await expect(store, "1", 1)


async def test_a_replacement_that_comes_late_takes_the_place_of_what_it_replaced(
    sim: Simulator,
) -> None:
    """Its condition holds, since a takeover changes no record; the step must not be lost."""
    async with opened("obstore", sim, policy=UNRACED) as store, opened("obstore", sim) as other:
        first = await claimed(store)
        await save(store, "1", "a", 1, epoch=first)
        saving, gate = await late_save(sim, store, "1", "b", 2, epoch=first, overwrite=True)
        second = await claimed(other)
        await expect(other, "1", 1)
        gate.release()
        with pytest.raises(FencedError):
            await saving
        await other.sweep()  # writes the fixed names of the record that is there
        await expect(other, "1", 2)
        third = await claimed(other)
        await expect(other, "1", 2)
        await save(other, "1", "c", 3, epoch=third, overwrite=True)
        await expect(store, "1", 3)
        assert second < third
        # The note of a replacement that was acknowledged is removed.
        notes = [key for key in names(sim) if "/replaces-" in key]
        assert notes == [f".asyncckpt/replaces-{identity('b')}-{identity('a')}"]


async def test_a_record_that_does_not_count_makes_way(sim: Simulator) -> None:
    async with opened("gcsfs", sim, policy=UNRACED) as store, opened("gcsfs", sim) as other:
        first = await claimed(store)
        saving, gate = await late_save(sim, store, "1", "stale", 1, epoch=first)
        second = await claimed(other)
        gate.release()
        with pytest.raises(FencedError):
            await saving
        await expect_no_record(other, "1")
        await save(other, "1", "new", 2, epoch=second)
        await expect(store, "1", 2)
        assert not [key for key in names(sim) if identity("stale") in key and "replaces" not in key]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_record_that_does_not_count_gets_no_fixed_names_from_a_deletion(
    sim: Simulator, kind: str
) -> None:
    """It arrives between the deletion of a record and that of its bytes."""
    async with opened(kind, sim, policy=UNRACED) as store, opened(kind, sim) as other:
        first = await claimed(store)
        saving, gate = await late_save(sim, store, "1", "stale", 1, epoch=first)
        second = await claimed(other)
        await save(other, "1", "new", 2, epoch=second)
        remove = await other.unlist("1", epoch=second)
        gate.release()
        with pytest.raises(FencedError):
            await saving
        await remove()
        left = [key for key in names(sim) if key.startswith("1/")]
        assert "1/checkpoint.json" in left
        assert all(key == "1/checkpoint.json" or identity("stale") in key for key in left)
        await expect_no_record(other, "1")


async def test_a_reader_asks_for_the_claims_after_it_has_read_the_record(sim: Simulator) -> None:
    """Readers share a listing only if it began after all of them had asked."""
    async with opened("obstore", sim, policy=UNRACED) as store:
        claims = store._context.claims
        await claims.seen()  # the store is known from here on
        gate = Gate()
        sim.faults.append(Fault(kind="list_objects", gate=gate))
        before = len(sim.requests)
        async with asyncio.TaskGroup() as group:
            group.create_task(claims.seen())
            await gate.reached.wait()
            for _ in range(5):
                group.create_task(claims.seen())
            for _ in range(20):
                await asyncio.sleep(0)
            gate.release()
        assert [request.kind for request in sim.requests[before:]] == ["list_objects"] * 2


async def test_without_claims_no_request_asks_for_them_and_with_them_a_save_asks_once(
    sim: Simulator,
) -> None:
    def asked(before: int) -> list[str]:
        found = [request for request in sim.requests[before:] if ".asyncckpt/" in request.key]
        return [request.key.rpartition("/")[2] for request in found if "probe-" not in request.key]

    async with opened("obstore", sim, policy=UNRACED) as store:
        before = len(sim.requests)
        await save(store, "1", "a", 1)
        await expect(store, "1", 1)
        await delete(store, "1")
        assert asked(before) == []
        first = await claimed(store)
        before = len(sim.requests)
        await save(store, "2", "b", 2, epoch=first)
        assert asked(before) == ["claim-2"]


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_clock_that_is_wrong_by_a_day_decides_nothing(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:

    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        first = await claimed(store)
        await save(store, "1", "a", 1, epoch=first)
        now_ns = time.time_ns()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: int(now_ns + days * DAY_S * 1e9))
            second = await claimed(other)
        with pytest.raises(FencedError):
            await save(store, "2", "b", 2, epoch=first)
        await save(other, "3", "c", 3, epoch=second)
        assert await listed(other) == {"1", "3"}


# -- a crash in a takeover


@pytest.mark.parametrize("kind", KINDS)
async def test_a_takeover_that_dies_at_any_request_hides_and_loses_nothing(
    sim: Simulator, kind: str
) -> None:
    """From request N on nothing arrives any more; or it does, and no response comes back."""
    number, happened, saved = 0, True, set()
    while happened:
        sim.clear()
        async with opened(kind, sim) as store, opened(kind, sim) as later:
            first = await claimed(store)
            await save(store, "1", "a", 1, epoch=first)
            async with opened(kind, sim) as dying:
                await dying._context.probes.conditions(versions=False)
                applied, at = bool(number % 2), number // 2 + 1
                fault = Fault(number=at, times=FOREVER, reset=True, applied=applied)
                sim.faults.append(fault)
                with suppress(AsyncCheckpointError):
                    await dying.claim()
                sim.faults.clear()
                happened = bool(fault.happened)
            await expect(later, "1", 1)
            try:
                await save(store, "2", "b", 2, epoch=first)
                saved.add(True)
            except FencedError:
                saved.add(False)
            visible = await listed(later)
            epoch = await claimed(later)
            assert epoch in (2, 3)
            assert await listed(later) == visible >= {"1"}
            await save(later, "3", "c", 3, epoch=epoch)
            with pytest.raises(FencedError):
                await save(store, "4", "d", 4, epoch=first)
            assert await listed(later) == visible | {"3"}
        number += 1
    assert number > 8 and saved == {True, False}


# -- any order of the requests of several jobs


class Turns:
    """Lets the requests of several stores take effect one at a time, in a random order."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._waiting: list[asyncio.Event] = []
        self._over = False
        self.alone = asyncio.Lock()  # fsspec's memory is not to be listed while it is written

    async def turn(self) -> None:
        """Wait until it is the turn of this request."""
        if self._over:
            return
        event = asyncio.Event()
        self._waiting.append(event)
        await event.wait()

    async def run(self, *jobs: Callable[[], object]) -> None:
        """Run the jobs until all have ended."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job()) for job in jobs]  # type: ignore[arg-type]
            while not all(task.done() for task in tasks):
                if self._waiting:
                    self._waiting.pop(self._rng.randrange(len(self._waiting))).set()
                await asyncio.sleep(0)
        self._over = True
        for event in self._waiting:
            event.set()


def in_turns(store: ObjectStore, turns: Turns) -> None:
    """Let every request of the store wait for its turn."""
    client = store._requests.client
    for name in ("put", "get", "size", "list", "delete", "version", "replace", "delete_version"):
        method = getattr(client, name)

        async def call(*args: object, _method: object = method, **options: object) -> object:
            await turns.turn()
            async with turns.alone:
                return await _method(*args, **options)  # type: ignore[operator]

        setattr(client, name, call)


async def one_history(seed: int) -> None:
    """Three jobs take over from each other and save, in any order of their requests."""
    turns = Turns(seed)
    acknowledged: dict[str, int] = {}
    inherited: dict[int, set[str]] = {}
    epochs: dict[str, int] = {}
    root = f"one-history-{seed}"
    async with AsyncExitStack() as stack:
        places = [opened("memory", None, root, policy=UNRACED) for _ in range(3)]  # type: ignore[arg-type]
        stores = [await stack.enter_async_context(place) for place in places]
        for store in stores:
            await store._context.probes.conditions(versions=False)
            in_turns(store, turns)
        reader = await stack.enter_async_context(opened("memory", None, root))  # type: ignore[arg-type]

        in_turns(reader, turns)

        async def job(number: int) -> None:
            store = stores[number]
            with suppress(FencedError):
                epoch = await claimed(store)
                inherited[epoch] = await listed(reader)
                for turn in range(3):
                    name = str(10 * turn + number)
                    epochs[name] = epoch
                    await save(store, name, f"{seed} {name}", int(name), epoch=epoch)
                    acknowledged[name] = epoch

        await turns.run(*[lambda n=n: job(n) for n in range(3)])
        final = await listed(reader)
        assert set(acknowledged) <= final, "an acknowledged step is lost"
        assert inherited, "nobody got the claim"
        last = max(inherited)
        assert inherited[last] <= final, "an inherited step is lost"
        late = {name for name in final - inherited[last] if epochs[name] != last}
        assert not late, "a step of a job that was taken over came back"
        for name in final:
            await expect(reader, name, int(name))


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 500), marks=pytest.mark.long)])
async def test_any_sequence_of_saves_and_takeovers_is_one_history(seeds: range) -> None:
    for seed in seeds:
        try:
            await one_history(seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


# -- gc


async def test_gc_lists_no_record_that_was_replaced_before_it_could_be_removed(
    sim: Simulator,
) -> None:
    key = "run/1/checkpoint.json"
    async with opened("gcsfs", sim, policy=UNRACED) as store, opened("gcsfs", sim) as other:
        first = await claimed(store)
        saving, gate = await late_save(sim, store, "1", "stale", 1, epoch=first)
        second = await claimed(other)
        gate.release()
        with pytest.raises(FencedError):
            await saving
        objects = sim.buckets["bucket"].objects
        for name, item in list(objects.items()):
            objects[name] = replace(item, modified_s=item.modified_s - 2 * COLLECT_MIN_S)

        async def save_first(_: object) -> None:
            sim.faults.clear()
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(again(), loop))

        async def again() -> None:
            await save(other, "1", "new", 2, epoch=second, overwrite=True)

        loop = asyncio.get_running_loop()
        sim.faults[:] = [Fault(kind="delete_object", key=f"*{key}", hook=save_first)]
        found = list(await other.collect(COLLECT_MIN_S))
        assert sim.faults == []
        assert "1/checkpoint.json" not in found
        await expect(other, "1", 2)


@pytest.mark.parametrize("kind", KINDS)
async def test_gc_removes_what_does_not_count_and_lists_that_decide_nothing(
    sim: Simulator, kind: str
) -> None:
    """Claims, the highest list and everything that counts stay."""
    async with (
        opened(kind, sim, policy=UNRACED) as store,
        opened(kind, sim) as other,
    ):
        first = await claimed(store)
        await save(store, "1", "a", 1, epoch=first)
        saving, gate = await late_save(sim, store, "2", "stale", 2, epoch=first)
        second = await claimed(other)
        gate.release()
        with pytest.raises(FencedError):
            await saving
        await save(other, "3", "b", 3, epoch=second)
        before = set(names(sim))
        conditions = await other._context.probes.conditions(create=False, versions=True)
        objects = sim.buckets["bucket"].objects
        for key, item in list(objects.items()):
            objects[key] = replace(item, modified_s=item.modified_s - 2 * COLLECT_MIN_S)
        found = list(await other.collect(COLLECT_MIN_S, dry_run=True))
        assert set(names(sim)) == before
        assert list(await other.collect(COLLECT_MIN_S)) == found
        gone = before - set(names(sim))
        assert (
            gone
            == {key for key in found if not key.endswith("?upload")}
            >= {".asyncckpt/inherited-1"}
        )
        stale = {key for key in before if key.startswith("2/")}
        assert gone - {".asyncckpt/inherited-1"} == (stale if conditions.delete else set())
        await expect(store, "1", 1)
        await expect(other, "3", 3)
        kept = {f".asyncckpt/{name}" for name in ("claim-1", "claim-2", "inherited-2")}
        assert kept <= {*names(sim)}


@pytest.mark.parametrize("kind", KINDS)
async def test_too_many_names_below_the_control_prefix_are_an_error(
    sim: Simulator, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim beyond the limit of a listing would be missed."""
    async with opened(kind, sim) as store:
        epoch = await claimed(store)
        await save(store, "1", "a", epoch=epoch)
        monkeypatch.setattr(requests, "LISTED_MAX", 1)
        for call in (store.claims(), store.claim(), store.collect(YEAR_S), store.take_notes()):
            with pytest.raises(StoreError, match=r"\.asyncckpt: more than 1 names"):
                await call
        monkeypatch.undo()
        await expect(store, "1")
