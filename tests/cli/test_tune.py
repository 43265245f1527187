"""`asyncckpt tune`: announces its plan, asks, and shows, draws or prints its results."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.cli import main
from asyncckpt.reports.picture import INSTALL_LINE
from tests.cli.ran import Ran, Run
from tests.simulator import Simulator, simulator


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def tune(sim: Simulator, run: Run) -> Run:
    sim.clear()
    words: list[str] = []
    for key, value in {"client": "fsspec", **sim.s3_options()}.items():
        words += ["--storage-option", f"{key}={json.dumps(value)}"]

    def tune(*arguments: object, answer: str = "", url: str = "s3://bucket/run") -> Ran:
        return run("tune", url, "--max-bytes", "65MiB", *arguments, *words, answer=answer)

    return tune


def test_help_says_how_much_it_moves_at_most(tune: Run) -> None:
    assert "16.0 GiB" in tune("--help").out


def test_what_it_will_move_is_said_and_asked_first(tune: Run, sim: Simulator) -> None:
    done = tune(answer="n\n")
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
    tune: Run, url: str, words: tuple[str, ...], text: str
) -> None:
    done = tune(*words, url=url, answer="n\n")
    assert (done.status, done.out) == (2, "") and text in done.err


def test_tables_recommendation_and_reason_are_printed(tune: Run, sim: Simulator) -> None:
    done = tune("--yes")
    assert done.status == 0, done.err
    assert "writing with s3fs:" in done.out
    assert "reading with s3fs:" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[1] == ["size", "1", "stream", "4", "streams"]
    assert lines[2][:2] == ["4.0", "MiB"]
    assert "target_data_file_nbytes=4194304 (4.0 MiB), concurrency=" in done.out
    assert "because " in done.out
    assert sim.objects("bucket") == {}


def test_json_parses_and_a_plot_is_saved(tune: Run, tmp_path: Path) -> None:
    plot = tmp_path / "tune.png"
    done = tune("--yes", "--json", "--plot", plot)
    assert done.status == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    assert report["client"] == "s3fs"
    assert {point["direction"] for point in report["points"]} == {"put", "get"}
    assert report["best_nbytes_per_s"] >= report["nbytes_per_s"] > 0
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_plot_that_cannot_be_written_loses_no_results(tune: Run, tmp_path: Path) -> None:
    plot = tmp_path / "tune.png"
    plot.mkdir()
    done = tune("--yes", "--plot", plot)
    assert done.status == 1
    assert "target_data_file_nbytes=" in done.out and "because " in done.out
    assert f"{plot}: writing the plot failed: Is a directory" in done.err


def test_json_does_not_ask(tune: Run, sim: Simulator) -> None:
    done = tune("--json")
    assert (done.status, done.out) == (2, "")
    assert "tune --json does not ask: pass --yes" in done.err
    assert sim.requests == []


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_sent(
    tune: Run, sim: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tune("--yes", "--plot", "tune.doc")
    assert (done.status, "pass a name in .png, .svg or .pdf" in done.err) == (2, True)
    done = tune("--yes", "--plot", tmp_path / "missing" / "tune.png")
    assert (done.status, "there is no such directory" in done.err) == (2, True)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    done = tune("--yes", "--plot", tmp_path / "tune.png")
    assert done.status == 2
    assert f"--plot needs the package matplotlib: {INSTALL_LINE}" in done.err
    assert sim.requests == []


def test_a_path_is_no_store_to_tune(tune: Run, tmp_path: Path) -> None:
    status = main(["tune", str(tmp_path), "--yes"])
    assert status == 2


def test_no_option_value_is_printed(tune: Run, sim: Simulator) -> None:
    done = tune("--yes", url="s3://no-such-bucket/run")
    assert done.status == 1
    assert "there is no such bucket" in done.err
    for value in map(str, sim.s3_options().values()):
        assert value not in done.err + done.out
