"""A save by several processes, where process 0 no longer answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import StoreError
from asyncckpt.format.record import RECORD_NAME, save_id_of
from asyncckpt.save import shared
from asyncckpt.save.shared import SharedSave


class Files:
    """The files of a step, whose record can be read from a certain attempt on."""

    def __init__(self, record: bytes, failures: int) -> None:
        self.record = record
        self.failures = failures
        self.closed = False

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        if self.failures:
            self.failures -= 1
            raise StoreError("the network is down")
        return self.record

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("failures", "found"), [(0, True), (3, True), (1 << 40, False)])
async def test_a_store_that_does_not_answer_may_hold_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, found: bool
) -> None:
    """Whether the save has succeeded is unknown then: its error is not that of the store."""
    await asyncckpt.save(tmp_path / "1", {"a": np.ones(3)})
    record = (tmp_path / "1" / RECORD_NAME).read_bytes()
    files = Files(record, failures)
    monkeypatch.setattr(shared, "LOOK_S", 0.001)
    save: Any = SharedSave.__new__(SharedSave)
    save.store = SimpleNamespace(files=lambda name: files)
    save.request = SimpleNamespace(name="1")
    save.round_ = SimpleNamespace(silence_s=60.0 if found else 0.05)
    save._save_id = save_id_of(record)
    assert await save._is_committed() is found
    assert files.closed


async def test_a_record_that_replaces_another_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {"a": np.ones(3)})
        store: Any = ckpt._session.root.store
        save: Any = SharedSave.__new__(SharedSave)
        save.store = store
        save.request = SimpleNamespace(name="1")
        save.round_ = SimpleNamespace(silence_s=60.0)
        save._save_id = "f" * 32
        record_of, looks = shared.record_of, 0

        async def replaced_after_the_first(files: Any) -> bytes | None:
            nonlocal looks
            looks += 1
            record = await record_of(files)
            if looks == 1:
                report = await ckpt.save(1, {"a": np.zeros(3)}, overwrite=True)
                save._save_id = report.save_id
            assert looks < 3, "the record is not seen"
            return record

        monkeypatch.setattr(shared, "LOOK_S", 0.001)
        monkeypatch.setattr(shared, "record_of", replaced_after_the_first)
        assert await save._is_committed()
