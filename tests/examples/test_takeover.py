"""The example of a takeover proves what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 200.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "takeover.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_a_job_that_was_stopped_in_a_commit_is_taken_over(tmp_path: Path) -> None:
    done = run("--root", str(tmp_path / "here"))
    assert done.returncode == 0, done.stdout
    for text in (
        "It was stopped while it commits step",
        "It was fenced:",
        "(epoch 1) has ended: the run was taken over by claim 2, made by process",
        "Nothing that was acknowledged is lost.",
    ):
        assert text in done.stdout


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run("--root", str(tmp_path))
    assert done.returncode == 2 and "is not empty" in done.stdout
