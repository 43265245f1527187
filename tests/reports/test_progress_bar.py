"""The progress bar: where it shows, when it closes, and that it cannot break the work."""

from __future__ import annotations

import gc
import io
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import Progress, UsageError, blocking, progress_bar
from asyncckpt.reports import progress as module
from tests.watch import nothing_left_behind

TREE = {"w": np.arange(300_000.0), "step": 1}
MIB = 1 << 20

SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"  # the cursor


class Screen:
    """All that has been written to standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def err(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", "100")
    return Screen(capsys)


def test_nothing_is_printed_where_there_is_no_terminal(err: Screen) -> None:
    with progress_bar("save") as bar:
        for done in (0, 5, 10):
            bar(Progress("upload", done, 10))
    assert err.getvalue() == ""


def test_a_bar_without_standard_error_draws_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar(always=True) as bar:
        bar(Progress("upload", 10, 10))
    assert capsys.readouterr().out == ""


def test_it_closes_itself_at_100_percent(err: Screen) -> None:
    bar = progress_bar(always=True)
    bar(Progress("upload", 1 * MIB, 4 * MIB))
    assert "upload" in err.getvalue() and "1.0/4.0 MiB" in err.getvalue()
    assert SHOWN not in err.getvalue()
    bar(Progress("upload", 4 * MIB, 4 * MIB))
    text = err.getvalue()
    assert "4.0/4.0 MiB" in text and text.count(HIDDEN) == text.count(SHOWN) == 1
    bar(Progress("upload", 4 * MIB, 4 * MIB))  # some work says so twice
    assert err.getvalue() == text
    bar._drawn = 0.0
    bar(Progress("verify", 1 * MIB, 8 * MIB))  # further work
    assert "verify" in err.getvalue()[len(text) :]
    bar.close()
    assert err.getvalue().count(SHOWN) == 2


def test_it_draws_ten_times_a_second_at_most(err: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    bar = progress_bar(always=True)
    drawn = []
    for number in range(1000):
        now = 100.0 + number / 1000
        before = len(err.getvalue())
        bar(Progress("upload", number, 2000))
        drawn.append(len(err.getvalue()) > before)
    assert 9 <= sum(drawn) <= 11
    bar.close()


def test_the_block_ends_the_bar_for_good(err: Screen) -> None:
    with progress_bar("x", always=True) as bar:
        bar(Progress("upload", 1, 4))
    text = err.getvalue()
    assert text.count(HIDDEN) == text.count(SHOWN) == 1
    bar(Progress("upload", 2, 4))
    bar.close()
    assert err.getvalue() == text


def test_a_bar_that_is_dropped_gives_the_cursor_back(err: Screen) -> None:
    bar = progress_bar(always=True)
    bar(Progress("upload", 1, 4))
    del bar
    gc.collect()
    assert err.getvalue().count(HIDDEN) == err.getvalue().count(SHOWN) == 1


def test_a_transient_bar_is_gone_at_the_end(err: Screen) -> None:
    bar = progress_bar(always=True, transient=True)
    bar(Progress("upload", 4, 4))
    assert err.getvalue().endswith("\x1b[2K") or "\x1b[1A" in err.getvalue()


def test_text_is_no_markup(err: Screen) -> None:
    progress_bar("[red]a[/red]", always=True)(Progress("upload", 4, 4))
    assert "[red]a[/red]" in err.getvalue()


def test_without_rich_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(UsageError, match=r'pip install "asyncckpt\[cli\]"'):
        progress_bar()


async def test_every_long_operation_takes_one(tmp_path: Path, err: Screen) -> None:
    def bar(name: str) -> Any:
        return progress_bar(name, always=True)

    one, two = tmp_path / "one", tmp_path / "two"
    await asyncckpt.save(tmp_path / "zero", TREE)  # makes what a process makes once, and keeps
    with nothing_left_behind():
        await asyncckpt.save(one, TREE, progress=bar("saving"))
        await asyncckpt.restore(one, progress=bar("restoring"))
        await asyncckpt.restore_into(one, dict(TREE), progress=bar("filling"))
        await asyncckpt.verify(one, progress=bar("verifying"))
        await asyncckpt.convert(one, two, progress=bar("converting"))
        await asyncckpt.diff(one, two, progress=bar("comparing"))
        async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
            await (await ckpt.start_save(1, TREE, progress=bar("starting")))
    text = err.getvalue()
    for name in ("saving", "restoring", "filling", "verifying", "converting", "comparing"):
        assert name in text
    assert "starting" in text
    assert text.count(HIDDEN) == text.count(SHOWN) == 7


def test_the_blocking_facade_takes_one(tmp_path: Path, err: Screen) -> None:
    before = threading.active_count()
    blocking.save(tmp_path / "c", TREE, progress=progress_bar("saving", always=True))
    with blocking.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.start_save(1, TREE, progress=progress_bar("starting", always=True)).result()
    assert "saving" in err.getvalue() and "starting" in err.getvalue()
    assert threading.active_count() <= before


async def test_a_bar_that_fails_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "the terminal is gone")

    monkeypatch.setattr(sys, "stderr", Broken())
    bar = progress_bar(always=True)
    report = await asyncckpt.save(tmp_path / "c", TREE, progress=bar)
    assert any("the terminal is gone" in note for note in report.notes)
    assert (await asyncckpt.verify(tmp_path / "c")).ok
    bar.close()  # quietly


def test_the_pause_between_two_drawings_is_that_of_ten_a_second() -> None:
    assert module.REFRESH_S == 0.1
