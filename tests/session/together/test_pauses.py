"""How long processes pause between two looks for a message."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import Checkpointer, SaveOptions
from asyncckpt.coordinators import rounds
from asyncckpt.coordinators.key_values import LAST_PAUSE_S, pauses
from asyncckpt.coordinators.rounds import Round
from asyncckpt.stores.local.datafile import LocalDataFile
from tests.session.together.job import Job, state

WAIT_S = 15


def test_process_0_looks_for_the_others_once_it_has_written_its_part(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has waited for them since it staged its part, and its pauses have become long."""
    post, write = Round.post, LocalDataFile._write
    ready, begun = threading.Semaphore(0), threading.Event()
    held: list[int] = []

    async def posted(self: Round, what: str, message: bytes) -> None:
        await post(self, what, message)
        if (self.name, what) == ("save(2)", "ready"):
            ready.release()

    def written_last(file: LocalDataFile, offset: int, data: Any) -> None:
        others = job.count - 1
        held.append(offset)
        for _ in range(others):
            assert ready.acquire(timeout=WAIT_S)
        ready.release(others)
        write(file, offset, data)

    def by_process_0(file: LocalDataFile, offset: int, data: Any) -> None:
        is_its_own = Path(file.path).name.count("-") == 1
        (written_last if is_its_own and begun.is_set() else write)(file, offset, data)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, state())
        if process == 0:
            monkeypatch.setattr(rounds, "pauses", lambda count: itertools.repeat(3600.0))
            begun.set()
        return (await ckpt.save(2, state())).step

    monkeypatch.setattr(Round, "post", posted)
    monkeypatch.setattr(LocalDataFile, "_write", by_process_0)
    options = SaveOptions(chunk_nbytes=1 << 17)
    assert job.play(part, save_options=options) == [2] * job.count
    assert held


def test_few_processes_notice_a_message_after_little_more_than_it_took() -> None:
    before = 0.0
    for pause in itertools.takewhile(lambda pause: pause < LAST_PAUSE_S, pauses(2)):
        assert pause <= before / 4 + 0.0011
        before += pause
