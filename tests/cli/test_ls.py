"""`asyncckpt ls`: the steps of a run with their metrics and metadata."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import KeepBest, KeepEvery, KeepLast, blocking
from asyncckpt.cli import main
from asyncckpt.cli.tables import SHORT, metrics_text
from tests.checkpoint.foreign import orbax_writers

WIDE = {"notes": "long " * 100, "config": {"layers": list(range(200))}}
METRICS = {"loss": 0.123456789, "accuracy": 1.0, "steps_per_s": 1e9, "grad_norm": 0.25, "late": 2.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with steps of every kind of metrics and metadata."""
    tree = {"w": np.zeros(3)}
    with blocking.Checkpointer(tmp_path / "run") as run:
        run.save(1, tree)
        run.save(2, tree, metrics={"loss": math.nan, "best": -math.inf}, metadata={"a": [1, None]})
        run.save(3, tree, metrics=METRICS, metadata=WIDE)
    return tmp_path / "run"


def listed(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["ls", *map(str, arguments)]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    return done.out


def test_metrics_and_metadata_stand_in_columns(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    head, first, second, third = listed(capsys, root).splitlines()
    metrics, metadata = head.index("metrics"), head.index("metadata")
    assert first[metrics:] == ""
    assert second[metrics:metadata].rstrip() == "loss=nan best=-inf"
    assert second[metadata:] == '{"a":[1,null]}'
    assert third[metrics:metadata].rstrip() == "loss=0.123457 accuracy=1 steps_per_s=1e+09 …"
    assert third[metadata:].startswith('{"notes":"long long ') and third.endswith("…")
    assert len(third) == metadata + SHORT


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_step_is_one_line_of_any_terminal(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", listed(capsys, root))
    lines = [line.rstrip() for line in shown.splitlines()]
    assert len(lines) == 4 and max(map(len, lines)) <= width
    if width >= 80:
        assert "loss=nan best=-inf" in lines[2]
        assert "loss=0.123457 " in lines[3] and "…" in lines[3]
    assert ('{"a":[1,null]}' in lines[2]) == (width >= 120)


def test_the_steps_of_an_orbax_root_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    with orbax.PyTreeCheckpointer() as checkpointer:
        for step in (1, 20):
            checkpointer.save(tmp_path / str(step), {"w": np.arange(9.0)})
    (tmp_path / "7").mkdir()  # which is no checkpoint
    head, *steps = listed(capsys, tmp_path).splitlines()
    assert "format" in head.split()
    assert [(line.split()[0], "orbax" in line.split()) for line in steps] == [
        ("1", True),
        ("20", True),
    ]
    entries = json.loads(listed(capsys, tmp_path, "--json"))
    assert [(entry["step"], entry["format"]) for entry in entries] == [(1, "orbax"), (20, "orbax")]


@pytest.mark.parametrize("options", [orbax_writers.PADDED, orbax_writers.PREFIXED])
def test_steps_of_orbax_with_other_names_are_said_to_be_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: dict[str, Any]
) -> None:
    newest = orbax_writers.manager(tmp_path, {"w": np.ones(2)}, **options)
    said = listed(capsys, tmp_path)
    assert said.startswith(f"no steps in {tmp_path}: ")
    assert f", {newest.name} are steps of Orbax" in said and f"restore({str(newest)!r})" in said
    assert main(["show", str(tmp_path)]) == 1
    assert f"newest step is {newest.name}: pass {newest}\n" in capsys.readouterr().err


def test_a_file_is_said_to_be_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK")
    assert main(["ls", str(tmp_path / "a.npz")]) == 1
    assert "this is a file, not the root of a run; try `asyncckpt show" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
@pytest.mark.parametrize("words", [("ls",), ("ls", "--json"), ("show",), ("--help",)])
def test_output_that_cannot_be_written_is_an_error_without_a_traceback(
    root: Path, words: tuple[str, ...]
) -> None:
    place = [] if words == ("--help",) else [str(root)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "asyncckpt", *words, *place],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "asyncckpt: output: No space left on device\n")


def test_json_is_complete(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    first, second, third = json.loads(listed(capsys, root, "--json"))
    assert (first["metrics"], first["metadata"]) == ({}, {})
    assert second["metrics"] == {"loss": "nan", "best": "-inf"}
    assert (third["metrics"], third["metadata"]) == (METRICS, WIDE)


@pytest.mark.parametrize("count", range(8))
def test_a_metric_is_shown_whole_or_not_at_all(count: int) -> None:
    metrics = {f"metric{number}": number + 0.5 for number in range(count)}
    text = metrics_text(metrics)
    assert len(text) <= SHORT + 1
    shown = text.removesuffix("…").split()
    assert shown == [f"{name}={value}" for name, value in metrics.items()][: len(shown)]
    assert text.endswith("…") == (len(shown) < count)


def test_a_name_longer_than_the_column_is_left_out() -> None:
    assert metrics_text({"m" * 100: 1.0}) == "…"


def test_what_retention_kept_is_listed_with_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keep = KeepLast(1) | KeepEvery(10) | KeepBest(1, "loss")
    with blocking.Checkpointer(tmp_path, keep=keep) as run:
        for step in range(0, 30, 5):
            run.save(step, {"w": np.zeros(3)}, metrics={"loss": abs(step - 14) / 4})
    entries = json.loads(listed(capsys, tmp_path, "--json"))
    assert {entry["step"]: entry["metrics"]["loss"] for entry in entries} == {
        0: 3.5,
        10: 1.0,
        15: 0.25,
        20: 1.5,
        25: 2.75,
    }
