"""The training scripts resume bit by bit, and the demo shows it and notices when it is not so."""

from __future__ import annotations

import copy
import fcntl
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.preloaded import Forked, preloaded

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
KILLED, HALF, STEPS = 50, 80, 120
SAVE_EVERY, HIDDEN = 10, 32
TIMEOUT_S = 200.0
POLL_S = 1.0

# A pipe this small holds the log of fewer steps than are left when the process is killed, so that
# it cannot come to its end before.
PIPE_NBYTES = 4096


PRELOADED = {
    "jax": ("asyncckpt.checkpointer", "asyncckpt.adapters.jax", "optax", "sklearn.datasets"),
    "torch": ("asyncckpt.checkpointer", "asyncckpt.adapters.torch", "sklearn.datasets"),
}
"""What the scripts import."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def output_of(log: Path) -> Path:
    """Where a run prints that writes this log."""
    return log.with_suffix(".output")


def start(
    framework: str, root: Path, log: Path, steps: int, *, program: bool = False
) -> Forked | subprocess.Popen[bytes]:
    """Start a training script: as a `program`, or in a process that has its imports."""
    script = str(EXAMPLES / f"train_{framework}.py")
    options = ["--root", str(root), "--log", str(log), "--steps", str(steps)]
    options += ["--save-every", str(SAVE_EVERY), "--hidden", str(HIDDEN)]
    with output_of(log).open("wb") as output:
        if sys.platform == "linux" and not program:
            server = preloaded(PRELOADED[framework], (("PYTHONPATH", str(REPOSITORY)),))
            return server.start(script, *options, stdout=output, stderr=output)
        command = [sys.executable, script, *options]
        return subprocess.Popen(command, env=environment(), stdout=output, stderr=output)


def finish(process: Forked | subprocess.Popen[bytes], log: Path) -> str:
    """The run has ended well; returns what it printed."""
    try:
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
    printed = output_of(log).read_text()
    assert process.returncode == 0, printed
    return printed


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(log: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(line["step"], line["loss"]) for line in log if "step" in line]


def end(log: list[dict[str, Any]]) -> tuple[int, str, str]:
    (line,) = (line for line in log if "end" in line)
    return line["end"], line["parameters"], line["optimizer"]


def killed_at(framework: str, root: Path, fifo: Path, step: int) -> list[dict[str, Any]]:
    """The run was killed (SIGKILL) once it had logged this step; returns its log."""
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    if sys.platform == "linux":
        fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
    # As long as there is a writer, an empty pipe is not taken for the end of the log.
    holding = os.open(fifo, os.O_WRONLY)
    process = start(framework, root, fifo, STEPS)
    data = b""
    try:
        while f'"step": {step},'.encode() not in data and process.poll() is None:
            if select.select([reading], [], [], POLL_S)[0]:
                data += os.read(reading, PIPE_NBYTES)
    finally:
        process.kill()
        os.close(holding)
        process.wait(TIMEOUT_S)
    assert process.returncode == -signal.SIGKILL, output_of(fifo).read_text()
    with open(reading, "rb") as log:
        data += log.read() or b""
    return [json.loads(line) for line in data.splitlines()]


@dataclass(frozen=True)
class Runs:
    """Logs of one run without interruption, and of one that went on twice in one root."""

    whole: list[dict[str, Any]]
    killed: list[dict[str, Any]]
    resumed: list[dict[str, Any]]
    resumed_output: str
    longer: list[dict[str, Any]]
    longer_output: str
    root: Path


@pytest.fixture(scope="module", params=["jax", "torch"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    framework: str = request.param
    folder = tmp_path_factory.mktemp(framework)
    root = folder / "interrupted"
    logs = {name: folder / f"{name}.log" for name in ("whole", "resumed", "longer")}
    whole = start(framework, folder / "whole", logs["whole"], STEPS, program=True)
    try:
        killed = killed_at(framework, root, folder / "fifo", KILLED)
        resumed = start(framework, root, logs["resumed"], HALF)
        resumed_output = finish(resumed, logs["resumed"])
        longer_output = finish(start(framework, root, logs["longer"], STEPS), logs["longer"])
        finish(whole, logs["whole"])
    finally:
        whole.kill()
    return Runs(
        whole=lines(logs["whole"]),
        killed=killed,
        resumed=lines(logs["resumed"]),
        resumed_output=resumed_output,
        longer=lines(logs["longer"]),
        longer_output=longer_output,
        root=root,
    )


def test_killed_run_resumes_with_equal_losses(runs: Runs) -> None:
    expected = losses(runs.whole)
    assert [step for step, _ in expected] == list(range(STEPS))
    start = runs.resumed[0]["start"]
    assert KILLED - 2 * SAVE_EVERY <= start <= losses(runs.killed)[-1][0] + 1
    assert f"resuming from step {start - 1}" in runs.resumed_output
    assert losses(runs.killed) == expected[: len(losses(runs.killed))]
    assert losses(runs.resumed) == expected[start:HALF]


def test_second_run_against_the_same_root_goes_on(runs: Runs) -> None:
    assert f"resuming from step {HALF - 1}" in runs.longer_output
    assert "training was blocked for" in runs.longer_output
    assert losses(runs.longer) == losses(runs.whole)[HALF:]


def test_parameters_and_optimizer_of_a_run_killed_and_resumed_are_equal(runs: Runs) -> None:
    assert end(runs.longer) == end(runs.whole)
    assert end(runs.resumed) != end(runs.whole)
    assert "end" not in runs.killed[-1]


def test_resumed_run_keeps_the_newest_three_and_nothing_else(runs: Runs) -> None:
    newest = range(STEPS - 1 - 2 * SAVE_EVERY, STEPS, SAVE_EVERY)
    assert sorted(path.name for path in runs.root.iterdir() if path.name != ".asyncckpt") == sorted(
        map(str, newest)
    )
    assert not list(runs.root.glob(".asyncckpt/epoch-*/*"))


def test_run_that_is_complete_trains_no_further(tmp_path: Path) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    for log in logs:
        finish(start("jax", tmp_path / "root", log, SAVE_EVERY), log)
    first, second = map(lines, logs)
    assert len(losses(first)) == SAVE_EVERY
    assert losses(second) == []
    assert end(second) == end(first)


# -------------------------------------------------------------------------------------- the demo


def load_demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


demo = load_demo()

LOG: list[dict[str, Any]] = [
    {"start": 0},
    {"step": 0, "loss": "40163a5c"},
    {"step": 1, "loss": "3fe2d2f1"},
    {"save": 1, "blocked_s": 0.001},
    {"end": 1, "parameters": "aa", "optimizer": "bb"},
]
RESUMED = [*LOG[:4], {"start": 1}, LOG[2], LOG[4]]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--quick", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_demo_kills_resumes_and_compares(tmp_path: Path) -> None:
    done = run_demo("--root", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stdout
    for text in (
        "saves blocked training for",
        "which was not published, and killed",
        "$ asyncckpt ls",
        "Leftovers of the killed save:",
        "Resuming in a new process",
        "no damage",
        "Identical, bit by bit",
        str(tmp_path / "demo"),
    ):
        assert text in done.stdout
    assert {path.name for path in (tmp_path / "demo").iterdir() if path.is_dir()} == {
        "interrupted",
        "uninterrupted",
    }


def test_demo_leaves_a_directory_alone_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run_demo("--root", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty" in done.stdout
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("loss", "step 1: the bits of the loss are 3fe2d2f0, expected 3fe2d2f1"),
        ("parameters", "parameters: ab, expected aa"),
        ("optimizer", "optimizer: ab, expected bb"),
        ("missing", "steps without a loss: 1"),
        ("unfinished", "a run did not reach its end"),
        ("beyond", "step 2: the bits of the loss are 00000000, expected None"),
    ],
)
def test_demo_fails_on_logs_that_differ(
    fault: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [dict(line) for line in RESUMED]
    if fault == "loss":
        found[5]["loss"] = "3fe2d2f0"
    elif fault == "missing":
        found = [line for line in found if line.get("step") != 1]
    elif fault == "unfinished":
        del found[-1]
    elif fault == "beyond":
        found.insert(6, {"step": 2, "loss": "00000000"})
    else:
        found[-1][fault] = "ab"
    assert demo.compare_logs(LOG, RESUMED) == []
    assert demo.compare_logs(LOG, found) == [expected]

    def demonstrate(folder: Path, scale: object) -> None:
        demo.require_equal(demo.compare_logs(LOG, found))

    monkeypatch.setattr(demo, "demonstrate", demonstrate)
    assert demo.main(["--root", str(tmp_path / "demo")]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: the runs differ" in printed
    assert expected in printed
    assert str(tmp_path / "demo") in printed


class StandIn:
    """A training process as the demo sees it, whose saves take as long as the test says."""

    def __init__(self, root: Path, publishes: set[int]) -> None:
        self.process = self
        self.signals: list[int] = []
        self.root, self.publishes = root, publishes

    def poll(self) -> None:
        return None

    def begin(self, step: int) -> Path:
        attempt = self.root / ".asyncckpt" / "epoch-0" / f"{step}-abc"
        (attempt / "default" / "d").mkdir(parents=True)
        (attempt / "default" / "d" / "abc-0").write_bytes(b"payload")
        return attempt

    def stop(self) -> bool:
        begun = [step for step in (1, 2) if demo.attempt_of(self.root, step)]
        if begun[0] in self.publishes:
            demo.attempt_of(self.root, begun[0]).rename(self.root / str(begun[0]))
        return True

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_demo_continues_a_process_whose_save_was_published_in_time(tmp_path: Path) -> None:
    run = StandIn(tmp_path, publishes={1})
    run.begin(1)
    attempt = run.begin(2)
    assert demo.stop_in_a_save(run, tmp_path, [1, 2]) == (2, attempt, 1)
    assert run.signals == [signal.SIGCONT]


def test_demo_gives_up_when_every_save_was_published_in_time(tmp_path: Path) -> None:
    run = StandIn(tmp_path, publishes={1, 2})
    run.begin(1)
    run.begin(2)
    with pytest.raises(demo.DemoError, match="all 2 saves were finished before"):
        demo.stop_in_a_save(run, tmp_path, [1, 2])
    assert run.signals == [signal.SIGCONT, signal.SIGCONT]


def test_demo_compares_leaves_by_their_bits() -> None:
    one = {"a": [np.float32(0.0), np.arange(3)], "step": 3}
    assert demo.compare_trees(one, copy.deepcopy(one)) == []
    assert demo.compare_trees(one, {"a": [np.float32(-0.0), np.arange(3)], "step": 4}) == [
        "/a/0: the bits differ",
        "/step: the bits differ",
    ]
    assert demo.compare_trees(one, {"a": [np.float32(0.0), np.arange(3.0)]}) == [
        "/step: only one run has this leaf",
        "/a/1: the bits differ",
    ]
