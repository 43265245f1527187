"""A job is stopped in the middle of a commit, another one takes over, and the first one resumes.

The first job saves every step. It is stopped (SIGSTOP) while it commits a step, as if its machine
hung. A second job is started, as a scheduler would do. It continues from the newest checkpoint and
takes the run over with its first save. Then the first job resumes: its commit fails with a
`FencedError`, and it ends. If the logs of both jobs do not match the listed steps, the exit status
is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import FencedError, blocking

DEFAULT = Path(__file__).resolve().parent / "runs" / "takeover"
FENCED_STATUS = 3
"""Exit status of a job whose run another job has taken over."""
EARLIEST = 3
"""First step at which the first job may be stopped."""
AFTER = 4
"""Number of steps that the second job saves."""
TIMEOUT_S = 60.0
POLL_S = 0.0002
NBYTES = 32 << 20
"""Size of the state, so that a commit takes some time."""

Line = dict[str, Any]


class ExampleError(Exception):
    """The example could not be carried out, or its checks failed."""


# -------------------------------------------------------------------------------------- one job


def train(root: Path, log: Path, who: str, steps: int) -> int:
    """Save this number of steps after the newest one; return the exit status."""

    def write(**values: Any) -> None:
        with log.open("a") as lines:
            lines.write(json.dumps(values) + "\n")

    state: dict[str, Any] = {"w": np.zeros(NBYTES // 8), "who": who, "step": -1}
    # Jobs of several processes take over without takeover=True; a single process needs it.
    try:
        with blocking.Checkpointer(root, takeover=True) as ckpt:
            latest = ckpt.latest_step()
            if latest is not None:
                state = ckpt.restore(like=state)
                write(restored=latest)
            first = 0 if latest is None else latest + 1
            for step in range(first, first + steps):
                state["w"] += 1.0
                state |= {"who": who, "step": step}
                ckpt.save(step, state)
                write(saved=step)
    except FencedError as error:
        write(fenced=str(error))
        return FENCED_STATUS
    return 0


# ------------------------------------------------------------------------------------- both jobs


def start(root: Path, log: Path, who: str, steps: int) -> subprocess.Popen[bytes]:
    """Start a job in a process of its own."""
    job = json.dumps([str(root), str(log), who, steps])
    return subprocess.Popen([sys.executable, __file__, "--job", job])


def stop_in_a_commit(job: subprocess.Popen[bytes], root: Path) -> int:
    """Stop the job while it commits a step: everything is written, but nothing is published yet.

    Returns:
        The step.
    """
    end = time.monotonic() + TIMEOUT_S
    step = EARLIEST
    while time.monotonic() < end and job.poll() is None:
        index = f"epoch-*/{step}-*/default/manifest.ocdbt"
        while not (published := (root / str(step)).exists()):
            if any((root / ".asyncckpt").glob(index)) or time.monotonic() > end:
                break
            time.sleep(POLL_S)
        if not published:
            os.kill(job.pid, signal.SIGSTOP)
            os.waitpid(job.pid, os.WUNTRACED)
            # The job is stopped, so nothing changes any more.
            if not (root / str(step)).exists():
                return step
            os.kill(job.pid, signal.SIGCONT)
        step += 1
    raise ExampleError(f"no commit took long enough to be stopped within {TIMEOUT_S:.0f} s")


def read_log(path: Path) -> list[Line]:
    """Return the lines of a job's log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(root: Path, first: list[Line], second: list[Line], stopped: int) -> list[str]:
    """Return the contradictions between the logs of both jobs and the listed steps."""
    by_first = [line["saved"] for line in first if "saved" in line]
    by_second = [line["saved"] for line in second if "saved" in line]
    found = []
    if by_first != list(range(stopped)):
        found.append(f"the first job saved {by_first}, expected all steps before {stopped}")
    if by_second != list(range(stopped, stopped + AFTER)):
        found.append(f"the second job saved {by_second}, expected {AFTER} steps from {stopped} on")
    if not any("fenced" in line for line in first):
        found.append("the first job does not know that it was taken over")
    with blocking.Checkpointer(root) as ckpt:
        if ckpt.steps() != [*by_first, *by_second]:
            found.append(f"{root} lists {ckpt.steps()}, expected {[*by_first, *by_second]}")
        for step in ckpt.steps():
            state = ckpt.restore(step)
            who = "first" if step < stopped else "second"
            if (state["who"], state["step"], state["w"][0]) != (who, step, step + 1.0):
                found.append(f"step {step} is of the {state['who']} job, expected the {who} one")
    return found


def demonstrate(folder: Path) -> None:
    """Run both jobs and compare their logs with the listed steps.

    Raises:
        ExampleError: names what differs.
    """
    root, logs = folder / "checkpoints", [folder / "first.jsonl", folder / "second.jsonl"]
    print("1  A job saves every step.")
    job = start(root, logs[0], "first", 100_000)
    try:
        stopped = stop_in_a_commit(job, root)
        print(f"   It was stopped while it commits step {stopped}, which is not listed yet.")
        print("2  A second job takes over, and continues from the newest checkpoint.")
        with start(root, logs[1], "second", AFTER) as other:
            if other.wait(TIMEOUT_S) != 0:
                raise ExampleError(f"the second job ended with status {other.returncode}")
        print(f"   It has saved {AFTER} steps, from {stopped} on.")
        print("3  The first job resumes.")
        os.kill(job.pid, signal.SIGCONT)
        if job.wait(TIMEOUT_S) != FENCED_STATUS:
            raise ExampleError(f"the first job ended with status {job.returncode}")
    finally:
        job.kill()
        job.wait()
    first, second = map(read_log, logs)
    print(f"   It was fenced: {next(line['fenced'] for line in first if 'fenced' in line)}")
    if found := differences(root, first, second, stopped):
        raise ExampleError("\n".join(["this is not one history:", *found]))
    print(f"One history: steps 0 to {stopped - 1} of the first job, {stopped} to ", end="")
    print(f"{stopped + AFTER - 1} of the second. Nothing that was acknowledged is lost.")


def main() -> int:
    """Run the example, or one of its jobs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, help="a new or empty directory for everything")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is not None:
        root, log, who, steps = json.loads(given.job)
        return train(Path(root), Path(log), who, steps)
    if given.root is None:
        shutil.rmtree(DEFAULT, ignore_errors=True)
    elif given.root.exists() and any(given.root.iterdir()):
        parser.error(f"--root: {given.root} is not empty")
    folder = (given.root or DEFAULT).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        demonstrate(folder)
    except ExampleError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
