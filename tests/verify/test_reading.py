"""A checkpoint that is deleted while being read is reported as missing, not as damaged."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StoreError
from asyncckpt.ports import CheckpointFiles
from asyncckpt.save import commit as save_commit
from asyncckpt.session.reads import TRIES, Reads
from asyncckpt.testing.faults import Fault
from tests.script import Script

pytestmark = pytest.mark.usefixtures("no_blocking")


@pytest.fixture(autouse=True)
def index_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read needs a second file, even that of metadata alone."""
    monkeypatch.setattr(save_commit, "INDEX_IN_RECORD_NBYTES", 0)


Read = Callable[[asyncckpt.Checkpointer, int | None], Awaitable[Any]]


async def restore(ckpt: asyncckpt.Checkpointer, step: int | None) -> Any:
    return (await ckpt.restore(step))["step"]


async def inspect(ckpt: asyncckpt.Checkpointer, step: int | None) -> Any:
    return (await ckpt.inspect(step))["step"].value


async def verify(ckpt: asyncckpt.Checkpointer, step: int | None) -> Any:
    report = await ckpt.verify(step)
    assert report.ok
    return report.step


READS: list[Read] = [restore, inspect, verify]
READING = pytest.mark.parametrize("read", READS)


def tree(seed: int) -> dict[str, Any]:
    return {"w": np.arange(20_000.0) + seed, "step": seed}


async def remove(path: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, path)


@READING
async def test_a_step_deleted_while_it_is_read_is_not_found(tmp_path: Path, read: Read) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        await ckpt.save(2, tree(2))
        index = Script(ckpt).hold("read_into")
        reading = asyncio.create_task(read(ckpt, 2))
        await index.reached()
        await remove(tmp_path / "2")
        index.go()
        with pytest.raises(CheckpointNotFoundError) as caught:
            await reading
        assert str(caught.value) == (
            f"{tmp_path / '2'}: the checkpoint was deleted while being read; "
            f"{read.__name__} another step"
        )
        assert caught.value.location == str(tmp_path / "2")


@READING
async def test_when_the_newest_goes_away_the_next_newest_is_read(
    tmp_path: Path, read: Read
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            await ckpt.save(step, tree(step))
        script = Script(ckpt)
        for step in (3, 2):
            index = script.hold("read_into")
            reading = asyncio.create_task(read(ckpt, None))
            await index.reached()
            await remove(tmp_path / str(step))
            index.go()
            assert await reading == step - 1
        index = script.hold("read_into")
        reading = asyncio.create_task(read(ckpt, None))
        await index.reached()
        await remove(tmp_path / "1")
        index.go()
        with pytest.raises(CheckpointNotFoundError, match=r"there is no checkpoint to .*latest_st"):
            await reading


@READING
async def test_when_the_newest_was_replaced_the_new_one_is_read(tmp_path: Path, read: Read) -> None:
    async with (
        asyncckpt.Checkpointer(tmp_path) as ckpt,
        asyncckpt.Checkpointer(tmp_path) as other,
    ):
        await ckpt.save(1, tree(1))
        await ckpt.save(2, tree(2))
        script = Script(ckpt)
        for step in (2, None):
            index = script.hold("read_into")
            reading = asyncio.create_task(read(ckpt, step))
            await index.reached()
            await other.save(2, tree(2), overwrite=True)
            index.go()
            assert await reading == 2


@READING
async def test_a_step_that_is_replaced_again_and_again_is_given_up(
    tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def replaced(_: Reads, verb: str, step: int, files: CheckpointFiles, *rest: Any) -> None:
        tried.append(step)
        await files.close()
        raise CheckpointNotFoundError(f"{step} was replaced", found="replaced")

    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(2, tree(2))
        monkeypatch.setattr(Reads, "_read_one", replaced)
        with pytest.raises(CheckpointNotFoundError, match=r"^2 was replaced$"):
            await read(ckpt, 2)
    assert tried == [2] * TRIES


@pytest.mark.parametrize("told", [True, False], ids=["standing", "unknown"])
async def test_what_stands_and_lacks_a_file_is_damaged(tmp_path: Path, told: bool) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        await ckpt.save(2, tree(2))
        await remove(tmp_path / "2" / "default" / "d")
        script = Script(ckpt)
        if not told:
            error = StoreError("the stat was lost")
            script.store.script.append(Fault("changed", 0, error=error))
        assert not (await ckpt.verify()).ok
        for read in (restore, inspect):
            with pytest.raises(CorruptCheckpointError, match="is missing"):
                await read(ckpt, None)
        assert script.count("changed") == 3


async def test_what_an_object_store_deletes_while_it_is_read_is_not_found() -> None:
    url = "memory://reading/run"
    async with asyncckpt.Checkpointer(url) as ckpt, asyncckpt.Checkpointer(url) as other:
        await ckpt.save(1, tree(1))
        script = Script(ckpt)
        for read, step in itertools.product(READS, (2, None)):
            await ckpt.save(2, tree(2))
            index = script.hold("read_into")
            reading = asyncio.create_task(read(ckpt, step))
            await index.reached()
            await other.delete(2)
            index.go()
            if step is None:
                assert await reading == 1
                continue
            with pytest.raises(CheckpointNotFoundError, match="was deleted while being"):
                await reading


@READING
async def test_retention_leaves_alone_what_is_being_read(tmp_path: Path, read: Read) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        index = Script(ckpt).hold("read_into")
        reading = asyncio.create_task(read(ckpt, 1))
        await index.reached()
        assert (await ckpt.save(2, tree(2))).deleted_steps == ()
        index.go()
        assert await reading == 1
        assert (await ckpt.save(3, tree(3))).deleted_steps == (1, 2)


@READING
async def test_retention_leaves_alone_what_begins_to_be_read_as_it_decides(
    tmp_path: Path, read: Read
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        script = Script(ckpt)
        names = script.hold("names")  # the save is committed, and looks for older steps
        saving = asyncio.create_task(ckpt.save(2, tree(2)))
        await names.reached()
        index = script.hold("read_into")
        reading = asyncio.create_task(read(ckpt, 1))
        await index.reached()
        names.go()
        assert (await saving).deleted_steps == ()
        index.go()
        assert await reading == 1
        assert (await ckpt.save(3, tree(3))).deleted_steps == (1, 2)


async def test_what_is_no_longer_read_is_not_remembered(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        counts = ckpt._session.reads.pinned
        await ckpt.save(1, tree(1))
        index = Script(ckpt).hold("read_into")
        reading = [asyncio.create_task(read(ckpt, 1)) for read in (inspect, verify)]
        await index.reached()
        assert counts["1"] >= 1
        index.go()
        for one in reading:
            await one
        with pytest.raises(CheckpointNotFoundError):
            await ckpt.restore(5)
        assert dict(counts) == {}
