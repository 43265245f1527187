"""`asyncckpt tune`: announces its plan, asks, and shows, draws or prints its results."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncckpt.cli import main
from asyncckpt.reports.picture import INSTALL_LINE
from tests.simulator import Simulator, simulator


class Ran(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


Run = Callable[..., Ran]


@pytest.fixture
def run(sim: Simulator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    sim.clear()
    words: list[str] = []
    for key, value in {"client": "fsspec", **sim.s3_options()}.items():
        words += ["--storage-option", f"{key}={json.dumps(value)}"]

    def run(*arguments: object, answer: str = "", url: str = "s3://bucket/run") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        given = [str(argument) for argument in arguments]
        status = main(["tune", url, "--max-bytes", "65MiB", *given, *words])
        return Ran(status, *capsys.readouterr())

    return run


def test_help_says_how_much_it_moves_at_most(run: Run) -> None:
    assert "16.0 GiB" in run("--help").out


def test_what_it_will_move_is_said_and_asked_first(run: Run, sim: Simulator) -> None:
    done = run(answer="n\n")
    assert done.status == 1
    assert done.out.splitlines()[0] == (
        "s3://bucket/run: objects below asyncckpt-tune-… are written, read and removed: "
        "at most 65.0 MiB in total, within 120 s"
    )
    assert "nothing was measured" in done.out
    assert sim.requests == []


@pytest.mark.parametrize(
    ("url", "words", "text"),
    [
        ("/data/run", (), "tune measures object stores"),
        ("s3://bucket/run", ("--memory", "much"), "--memory much"),
        ("s3://bucket/run", ("--max-bytes", "0"), "--max-bytes 0"),
    ],
)
def test_nothing_is_asked_about_what_is_refused(
    run: Run, url: str, words: tuple[str, ...], text: str
) -> None:
    done = run(*words, url=url, answer="n\n")
    assert (done.status, done.out) == (2, "") and text in done.err


def test_tables_recommendation_and_reason_are_printed(run: Run, sim: Simulator) -> None:
    done = run("--yes")
    assert done.status == 0, done.err
    assert "writing with s3fs:" in done.out
    assert "reading with s3fs:" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[1] == ["size", "1", "stream", "4", "streams"]
    assert lines[2][:2] == ["4.0", "MiB"]
    assert "target_data_file_nbytes=4194304 (4.0 MiB), concurrency=" in done.out
    assert "because " in done.out
    assert sim.objects("bucket") == {}


def test_json_parses_and_a_plot_is_saved(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "tune.png"
    done = run("--yes", "--json", "--plot", plot)
    assert done.status == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    assert report["client"] == "s3fs"
    assert {point["direction"] for point in report["points"]} == {"put", "get"}
    assert report["best_nbytes_per_s"] >= report["nbytes_per_s"] > 0
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_plot_that_cannot_be_written_loses_no_results(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "tune.png"
    plot.mkdir()
    done = run("--yes", "--plot", plot)
    assert done.status == 1
    assert "target_data_file_nbytes=" in done.out and "because " in done.out
    assert f"{plot}: writing the plot failed: Is a directory" in done.err


def test_json_does_not_ask(run: Run, sim: Simulator) -> None:
    done = run("--json")
    assert (done.status, done.out) == (2, "")
    assert "tune --json does not ask: pass --yes" in done.err
    assert sim.requests == []


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_sent(
    run: Run, sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("--yes", "--plot", "tune.doc")
    assert (done.status, "pass a name in .png, .svg or .pdf" in done.err) == (2, True)
    done = run("--yes", "--plot", tmp_path / "missing" / "tune.png")
    assert (done.status, "there is no such directory" in done.err) == (2, True)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    done = run("--yes", "--plot", tmp_path / "tune.png")
    assert done.status == 2
    assert f"--plot needs the package matplotlib: {INSTALL_LINE}" in done.err
    assert sim.requests == []


def test_a_path_is_no_store_to_tune(run: Run, tmp_path: Path) -> None:
    status = main(["tune", str(tmp_path), "--yes"])
    assert status == 2


def test_no_option_value_is_printed(run: Run, sim: Simulator) -> None:
    done = run("--yes", url="s3://no-such-bucket/run")
    assert done.status == 1
    assert "there is no such bucket" in done.err
    for value in map(str, sim.s3_options().values()):
        assert value not in done.err + done.out
