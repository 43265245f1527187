"""One line at level INFO for each thing that has happened to a checkpoint."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import asyncckpt
from asyncckpt import KeepLast
from asyncckpt.errors import StoreError
from asyncckpt.testing.faults import FaultStore
from tests.script import Script

TREE = {"w": np.arange(1000.0)}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "asyncckpt")
    return caplog


def taken(lines: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines so far, and forget them."""
    found = list(lines.messages)
    assert all(line.levelno == logging.INFO and line.name == "asyncckpt" for line in lines.records)
    lines.clear()
    return found


class Failing(logging.Handler):
    """A handler that fails, as where its disk is full."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def emit(self, _: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise self._error


@pytest.fixture(params=[OSError("no space left for the log"), SystemExit("no log")], ids=repr)
def failing_log(request: pytest.FixtureRequest) -> Iterator[None]:
    logger, handler = logging.getLogger("asyncckpt"), Failing(request.param)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.usefixtures("failing_log")
async def test_a_log_handler_that_fails_fails_no_claim_and_no_deletion(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, takeover=True) as ckpt:
        for step in range(4):
            await ckpt.save(step, TREE)
        await ckpt.delete(0)
        assert await ckpt.delete_after(1) == [2, 3]
        assert (await ckpt.inspect()).epoch == 1


@pytest.mark.usefixtures("failing_log")
async def test_a_log_handler_that_fails_fails_no_save_and_no_restore(tmp_path: Path) -> None:
    class Broken:
        def keep(self, *_: object) -> list[int]:
            raise ValueError("no policy")

    def progress(_: object) -> None:
        raise ValueError("no progress")

    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await ckpt.save(1, TREE, progress=progress)
        assert (await ckpt.save(2, TREE)).deleted_steps == (1,)
        assert (await ckpt.restore())["w"].tobytes() == TREE["w"].tobytes()
        Script(ckpt).fail("seal", StoreError("disk on fire"))
        with pytest.raises(StoreError, match="disk on fire"):
            await ckpt.save(3, TREE)
    async with asyncckpt.Checkpointer(tmp_path, keep=Broken()) as ckpt:
        assert (await ckpt.save(4, TREE)).step == 4


async def test_what_happens_to_steps_is_one_line_each(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(2)) as ckpt:
        for step in (1, 2):
            report = await ckpt.save(step, TREE)
            assert taken(lines) == [str(report)]
        await ckpt.save(3, TREE)
        assert taken(lines)[1:] == [f"deleted {tmp_path}/1 (KeepLast(n=2))"]
        await ckpt.restore()
        (line,) = taken(lines)
        assert line.startswith(f"restored {tmp_path}/3: 1 leaf, ")
        await ckpt.delete(2)
        assert taken(lines) == [f"deleted {tmp_path}/2"]
        await ckpt.save(4, TREE)
        taken(lines)
        await ckpt.delete_after(3)
        assert taken(lines) == [f"deleted {tmp_path}/4"]


async def test_a_save_that_is_given_up_is_one_line(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        script.fail("seal", StoreError("disk on fire"))
        with pytest.raises(StoreError):
            await ckpt.save(1, TREE)
        assert taken(lines) == [f"gave up saving {tmp_path}/1: disk on fire"]
        script.hold("write")
        options = asyncckpt.SaveOptions(deadline_s=0.05)
        with pytest.raises(asyncckpt.DeadlineExceededError) as caught:
            await ckpt.save(1, TREE, options=options)
        assert taken(lines) == [f"gave up saving {tmp_path}/1: {caught.value}"]


async def test_leftovers_that_are_removed_are_one_line(
    tmp_path: Path, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        taken(lines)

        async def swept() -> list[str]:
            return ["a", "b"]

        monkeypatch.setattr(ckpt._session.root.store, "sweep", swept)
        await ckpt._session.call(ckpt._session.root.sweep).wait()
        assert taken(lines) == [f"repaired {tmp_path}: removed leftovers a, b"]


async def test_a_root_that_has_become_another_directory_is_told_once(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    async with asyncckpt.Checkpointer(root) as ckpt:
        for step in range(2):
            await ckpt.save(step, TREE)
            await ckpt.wait()
        assert "not the directory" not in lines.text
        root.rename(tmp_path / "moved")
        for step in range(2, 4):
            await ckpt.save(step, TREE)
            await ckpt.wait()
        assert await ckpt.steps() == [2, 3]
    warned = [line for line in lines.records if line.levelno == logging.WARNING]
    assert [line.getMessage() for line in warned] == [
        f"{root} is not the directory of the previous save: a mount was lost, or it was moved "
        "or replaced; earlier steps are not in it"
    ]


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_note_of_an_earlier_job_forges_no_lines_and_controls_no_terminal(
    tmp_path: Path, lines: pytest.LogCaptureFixture, wrapped: bool
) -> None:
    """Notes are read through a wrapper that has the store's methods by `__getattr__`, too."""
    fields = {"process": 0, "host": "h\x1b[31m", "kind": "SaveError", "text": "é\r\nall\x07 good"}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        (tmp_path / ".asyncckpt").mkdir(exist_ok=True)
        (tmp_path / ".asyncckpt/error-0").write_text(json.dumps(fields))
        lines.clear()
        session = ckpt._session
        if wrapped:
            session.root.store = FaultStore(session.root.store)  # type: ignore[assignment]
        await session.call(session.root.log_notes).wait()
    told = r"in an earlier job, process 0 (h\x1b[31m): é\r\nall\x07 good"
    assert lines.messages == [f"{tmp_path}: {told}"]


async def test_notes_that_a_users_store_cannot_return_are_a_warning(
    tmp_path: Path, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> list[bytes]:
        raise LookupError("no such table")

    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        lines.clear()
        root = ckpt._session.root
        monkeypatch.setattr(root.store, "take_notes", broken)
        await ckpt._session.call(root.log_notes).wait()
    assert lines.messages == [
        f"{tmp_path}: the errors of earlier jobs cannot be read: no such table"
    ]
    (record,) = lines.records
    assert record.exc_info is not None and record.exc_info[0] is LookupError
