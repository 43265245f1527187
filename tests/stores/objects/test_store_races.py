"""Many writers of one step: exactly one wins, whoever is stopped and goes on."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.stores.objects.publish import Publication
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.checkpoints import expect, identity, save
from tests.children import finish, start
from tests.simulator import Fault, Gate, Simulator, simulator
from tests.stores.objects.stores import ROOT, opened

WRITERS = 8


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


async def race(sim: Simulator, kind: str, writer: int, rounds: int, line: threading.Barrier) -> int:
    """So many rounds of saving one step each; returns how often this writer has won."""
    won = 0
    async with opened(kind, sim) as store:
        for number in range(rounds):
            await asyncio.to_thread(line.wait)
            try:
                await save(store, str(number), f"{kind}-{number}-{writer}", writer)
                won += 1
            except CheckpointExistsError:
                pass
    return won


def run_race(sim: Simulator, kind: str, rounds: int) -> None:
    """`WRITERS` threads, each with a loop, a client and a store of its own."""
    line = threading.Barrier(WRITERS)
    won = [0] * WRITERS
    failures: list[BaseException] = []

    def one(writer: int) -> None:
        try:
            won[writer] = asyncio.run(race(sim, kind, writer, rounds, line))
        except BaseException as error:
            failures.append(error)
            line.abort()

    threads = [threading.Thread(target=one, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert sum(won) == rounds
    asyncio.run(check(sim, kind, rounds))


async def check(sim: Simulator, kind: str, rounds: int) -> None:
    """Every step is whole, and nothing of the losers is left."""
    async with opened(kind, sim) as store:
        assert len(await store.names()) == rounds
        for number in range(rounds):
            winner = await winner_of(store, str(number))
            await expect(store, str(number), winner)
            losers = [
                identity(f"{kind}-{number}-{writer}")
                for writer in range(WRITERS)
                if writer != winner
            ]
            left = [key for key in sim.stored() if key.startswith(f"{ROOT}/{number}/")]
            assert not [key for key in left if any(loser in key for loser in losers)]
    assert not sim.uploads


async def winner_of(store: ObjectStore, name: str) -> int:
    files = store.files(name)
    record = await files.read("checkpoint.json", max_nbytes=1000)
    await files.close()
    return int(record.split()[1])


@pytest.mark.parametrize("kind", ("obstore", "gcsfs"))
def test_of_eight_writers_of_one_step_exactly_one_wins(sim: Simulator, kind: str) -> None:
    sim.clear()
    run_race(sim, kind, 15 if kind == "obstore" else 5)


def test_a_broken_rule_is_noticed(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a record that is put unconditionally, all of them win."""

    async def create(self: Publication) -> None:
        await self._requests.replace(self._key, self.record)

    sim.clear()
    monkeypatch.setattr(Publication, "create", create)
    with pytest.raises(AssertionError):
        run_race(sim, "obstore", 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ("obstore", "s3fs", "gcsfs"))
def test_of_eight_writers_exactly_one_wins_two_hundred_rounds(sim: Simulator, kind: str) -> None:
    sim.clear()
    run_race(sim, kind, 200)


def test_with_lost_answers_too_exactly_one_wins(sim: Simulator) -> None:
    """A writer whose record had landed is told so, and no other."""
    sim.clear()
    for number in (1, 9, 17, 25, 33):
        sim.faults.append(
            Fault(
                kind="put_object", key="*/checkpoint.json", number=number, reset=True, applied=True
            )
        )
    try:
        run_race(sim, "obstore", 6)
        assert all(fault.happened for fault in sim.faults[:2])
    finally:
        sim.faults.clear()


STOPPED = """
import asyncio, sys
from asyncckpt.errors import CheckpointExistsError
from asyncckpt.testing.checkpoints import save
from tests.stores.objects.stores import opened_at

async def main(endpoint):
    options = {"client": "obstore", "key": "key", "secret": "secret", "endpoint_url": endpoint,
               "client_kwargs": {"region_name": "us-east-1"}}
    async with opened_at("s3://bucket/run", options) as store:
        try:
            await save(store, "1", "stopped", 1)
        except CheckpointExistsError:
            print("exists")

asyncio.run(main(sys.argv[1]))
"""


async def test_a_process_that_was_stopped_and_goes_on_changes_nothing(sim: Simulator) -> None:
    """It has uploaded everything and was about to commit; meanwhile another one did."""
    sim.clear()
    gate = Gate()
    # Its last object has arrived, the answer to it has not.
    sim.faults.append(Fault(kind="put_object", key=f"*{identity('stopped')}-fixed-0", gate=gate))
    child = start(STOPPED, sim.s3_endpoint, warnings="ignore")
    try:
        await gate.reached.wait()
        child.send_signal(signal.SIGSTOP)
        gate.release()
        async with opened("obstore", sim) as store:
            await save(store, "1", "winner", 2)
            await store.sweep()
            before = of_others(sim)
            child.send_signal(signal.SIGCONT)
            status, output, errors = await asyncio.to_thread(finish, child)
            assert (status, output) == (0, "exists\n"), errors
            assert of_others(sim) == before
            assert not [key for key in sim.stored() if identity("stopped") in key]
            await expect(store, "1", 2)
    finally:
        sim.faults.clear()
        if child.poll() is None:
            child.kill()
            finish(child)


def of_others(sim: Simulator) -> dict[str, bytes]:
    """Every object that is not of the process that was stopped, nor an experiment."""
    objects = sim.objects()
    return {k: v for k, v in objects.items() if identity("stopped") not in k and "/probe-" not in k}
