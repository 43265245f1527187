"""`asyncckpt ls`: the steps of a run with their metrics and metadata."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import KeepBest, KeepEvery, KeepLast, blocking
from asyncckpt.cli import main
from asyncckpt.cli.tables import SHORT, metrics_text

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
