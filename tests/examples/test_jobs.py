"""The examples of several processes: a job killed in the middle of a save goes on on fewer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
TIMEOUT_S = 280.0
QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""For XLA: six processes compile the same steps, which takes most of their time."""


def load_job() -> Any:
    spec = importlib.util.spec_from_file_location("job", EXAMPLES / "job.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


job = load_job()


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example), "--quick", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "XLA_FLAGS": QUICKLY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("example", ["jax_multiprocess.py", "torch_fsdp.py"])
def test_two_processes_continue_what_four_have_saved(example: str, tmp_path: Path) -> None:
    done = run(example, "--root", str(tmp_path / "here"))
    assert done.returncode == 0, done.stdout
    for text in (
        "Process 3 was killed in the middle of saving step",
        "2 processes restore step",
        "Restored, bit by bit what 4 processes had",
        "All 24 steps are accounted for",
        "The leftovers were removed, and all 8 saves are listed",
    ):
        assert text in done.stdout


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run("torch_fsdp.py", "--root", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty" in done.stdout
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


FIRST: list[dict[str, Any]] = [
    {"step": 0, "loss": 2.0},
    {"step": 1, "loss": 1.5},
    {"saved": 1, "sha256": "aa"},
    {"step": 2, "loss": 1.25},
]
SECOND: list[dict[str, Any]] = [
    {"restored": 1, "sha256": "aa"},
    {"step": 2, "loss": 1.251},
    {"step": 3, "loss": 1.0},
]


@pytest.mark.parametrize(
    ("line", "change", "expected"),
    [
        (0, {"sha256": "ab"}, "process 0 restored [(1, 'ab')], expected [(1, 'aa')]"),
        (0, {"restored": 0}, "process 0 restored [(0, 'aa')], expected [(1, 'aa')]"),
        (1, {"loss": 1.5}, "step 2: the loss is 1.5, and was 1.25 before the kill"),
        (2, {"step": 2, "loss": 1.25}, "steps that nobody computed: 3"),
        (1, {"step": 1, "loss": 1.5}, "steps computed again, though they were saved: [1]"),
    ],
)
def test_whatever_does_not_fit_together_is_named(
    line: int, change: dict[str, Any], expected: str
) -> None:
    assert job.differences(FIRST, [SECOND, SECOND], newest=1, steps=4) == []
    other = [dict(entry) for entry in SECOND]
    other[line].update(change)
    assert expected in job.differences(FIRST, [other, SECOND], newest=1, steps=4)


def test_an_example_whose_proof_fails_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def demonstrate(script: Path, folder: Path, scale: object) -> None:
        raise job.JobError("the jobs do not fit together")

    monkeypatch.setattr(job, "demonstrate", demonstrate)
    monkeypatch.setattr(sys, "argv", ["example", "--root", str(tmp_path / "here")])
    assert job.main(str(tmp_path / "example.py"), lambda part: None, "An example.") == 1
    assert "FAILED: the jobs do not fit together" in capsys.readouterr().out
