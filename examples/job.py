"""Launcher of the examples of several processes: four save, one is killed, and two continue.

A job is a number of processes that run the same script, each with a `Part`. One process of the
first job is killed (SIGKILL) while all of them save; then the others are ended, as a scheduler
would do. A second job with half as many processes restores the newest checkpoint and trains to the
end. If the logs of the two jobs do not fit together, the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from asyncckpt import blocking

HERE = Path(__file__).resolve().parent
FIRST, SECOND = 4, 2
"""Processes before and after the kill."""
TIMEOUT_S = 150.0
"""Limit for one job: beyond it, the machine is too slow or something hangs."""
POLL_S = 0.0005
TOLERANCE = 0.01
"""Tolerance for losses of steps that both jobs computed: another mesh adds in another order."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The task of one process of a job.

    Attributes:
        process: its index.
        count: number of processes.
        port: port of the runtime's coordination service on this machine.
        root: directory of the checkpoints.
        log: file for the JSON lines of this process.
        hidden: width of the hidden layers.
        steps: steps to train in all, those of an earlier job included.
        save_every: steps between saves.
    """

    process: int
    count: int
    port: int
    root: str
    log: str
    hidden: int
    steps: int
    save_every: int

    def saves(self, step: int) -> bool:
        """Return whether the state is saved after this step."""
        return (step + 1) % self.save_every == 0 or step + 1 == self.steps

    def write(self, **values: Any) -> None:
        """Append a line to the log."""
        with Path(self.log).open("a") as log:
            log.write(json.dumps(values) + "\n")


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of the training run: the wider the network, the longer a save takes."""

    hidden: int
    steps: int
    save_every: int

    @property
    def saves(self) -> list[int]:
        """The steps that are saved."""
        every = range(self.save_every - 1, self.steps, self.save_every)
        return sorted({*every, self.steps - 1})


FULL = Scale(hidden=1024, steps=40, save_every=5)
QUICK = Scale(hidden=512, steps=24, save_every=3)


class JobError(Exception):
    """The example could not be carried out, or its checks failed."""


# ----------------------------------------------------------------------------------------- jobs


class Job:
    """Processes of one script; leaving the block kills those that are still running."""

    def __init__(self, script: Path, folder: Path, name: str, count: int, scale: Scale) -> None:
        self.name = name
        self.logs = [folder / f"{name}-{process}.jsonl" for process in range(count)]
        self._outputs = [log.with_suffix(".txt") for log in self.logs]
        port = free_port()
        self.processes = []
        for process, (log, printed) in enumerate(zip(self.logs, self._outputs, strict=True)):
            root = str(folder / "checkpoints")
            part = Part(process, count, port, root, str(log), **asdict(scale))
            command = [sys.executable, str(script), "--part", json.dumps(asdict(part))]
            with printed.open("wb") as output:
                self.processes.append(
                    subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # ends a stopped process, too
        for process in self.processes:
            process.wait()

    def finish(self) -> None:
        """Wait until all processes have ended with status 0."""
        end = time.monotonic() + TIMEOUT_S
        while any(process.poll() is None for process in self.processes):
            self.check()
            if time.monotonic() > end:
                raise JobError(f"the {self.name} job takes more than {TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        self.check()

    def check(self) -> None:
        """Check that no process has failed.

        Raises:
            JobError: one has; shows what it printed.
        """
        for process, printed in zip(self.processes, self._outputs, strict=True):
            if process.poll():
                raise JobError(
                    f"a process of the {self.name} job ended with status {process.returncode}; "
                    f"{printed} says:\n{printed.read_text()}"
                )

    def signal(self, number: int) -> None:
        """Send a signal to all processes; on return, those that SIGSTOP stops have stopped."""
        for process in self.processes:
            os.kill(process.pid, number)
        if number == signal.SIGSTOP:
            for process in self.processes:
                _, status = os.waitpid(process.pid, os.WUNTRACED)
                if not os.WIFSTOPPED(status):
                    process.returncode = os.waitstatus_to_exitcode(status)
        self.check()


def free_port() -> int:
    """Return a free port of this machine, below those that connections take by themselves."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listening, contextlib.suppress(OSError):
            listening.bind(("localhost", port))
            return port


def stop_in_a_save(job: Job, root: Path, steps: Sequence[int], victim: int) -> int:
    """Stop all processes when the victim has written part of a save that is not published yet.

    Returns:
        The step.

    Raises:
        JobError: all of these saves were too quick.
    """
    end = time.monotonic() + TIMEOUT_S
    for step in steps:
        written = f"epoch-*/{step}-*/default/d/*-{victim}-0"
        while not any((root / ".asyncckpt").glob(written)) and not (root / str(step)).exists():
            job.check()
            if time.monotonic() > end:
                raise JobError(f"step {step} was not saved within {TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
        job.signal(signal.SIGSTOP)
        # All processes are stopped: the files that exist now are those that the kill leaves.
        if not (root / str(step)).exists():
            return step
        job.signal(signal.SIGCONT)
    raise JobError(
        f"all {len(steps)} saves were finished before the processes could be stopped: try again, "
        "or give --root on a slower disk"
    )


# --------------------------------------------------------------------------------------- proofs


def read_log(path: Path) -> list[Line]:
    """Return the lines of a log; a killed process may have left the last one unfinished."""
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def differences(
    first: Sequence[Line], second: Sequence[Sequence[Line]], newest: int, steps: int
) -> list[str]:
    """Return the contradictions between the log of the first job and those of the second.

    Args:
        first: log of process 0 of the first job.
        second: logs of all processes of the second job.
        newest: the newest checkpoint that the first job has left.
        steps: number of steps in all.
    """
    found = []
    (wanted,) = (line["sha256"] for line in first if line.get("saved") == newest)
    for process, log in enumerate(second):
        restored = [(line["restored"], line["sha256"]) for line in log if "restored" in line]
        if restored != [(newest, wanted)]:
            found.append(f"process {process} restored {restored}, expected {[(newest, wanted)]}")
    before = {line["step"]: line["loss"] for line in first if "step" in line}
    after = {line["step"]: line["loss"] for line in second[0] if "step" in line}
    if missing := sorted(set(range(steps)) - {s for s in before if s <= newest} - after.keys()):
        found.append(f"steps that nobody computed: {', '.join(map(str, missing))}")
    if early := sorted(step for step in after if step <= newest):
        found.append(f"steps computed again, though they were saved: {early}")
    found += [
        f"step {step}: the loss is {after[step]}, and was {before[step]} before the kill"
        for step in sorted(before.keys() & after.keys())
        if not math.isclose(before[step], after[step], rel_tol=TOLERANCE)
    ]
    return found


def published(root: Path) -> list[int]:
    """Return the steps that are listed."""
    with blocking.Checkpointer(root, coordinator="single") as ckpt:
        return list(ckpt.steps())


def leftovers(root: Path) -> list[Path]:
    """Return the files of unfinished saves."""
    found = sorted(path for path in (root / ".asyncckpt").rglob("*") if path.is_file())
    kept = ("lock", "claim-")
    return [path for path in found if not path.name.startswith(kept) and ".owner" not in path.name]


# ------------------------------------------------------------------------------------ the example


def say(text: str = "", indent: str = "     ") -> None:
    """Print the text without buffering."""
    print("\n".join(f"{indent}{line}".rstrip() for line in text.splitlines()), flush=True)


def demonstrate(script: Path, folder: Path, scale: Scale) -> None:
    """Run both jobs and compare them.

    Raises:
        JobError: names what differs.
    """
    root = folder / "checkpoints"
    victim = FIRST - 1
    say(f"1  {FIRST} processes train, and save every {scale.save_every} steps.", "")
    with Job(script, folder, "first", FIRST, scale) as first:
        step = stop_in_a_save(first, root, scale.saves[2:], victim)
        first.processes[victim].kill()
    say(f"Process {victim} was killed in the middle of saving step {step}; the rest was ended.")
    unfinished = leftovers(root)
    say(f"The unfinished save has left {len(unfinished)} files:")
    say("\n".join(f"  {path.relative_to(root)}" for path in unfinished))
    before = [save for save in scale.saves if save < step]
    listed = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
    if listed != before:
        raise JobError(f"{root} lists the steps {listed}, expected {before}")
    say(f"Listed steps: {listed}. Step {step} is not among them.")

    say(
        f"\n2  {SECOND} processes restore step {before[-1]} and train to step {scale.steps - 1}.",
        "",
    )
    with Job(script, folder, "second", SECOND, scale) as second:
        second.finish()
    logs = [read_log(log) for log in second.logs]
    log = read_log(first.logs[0])
    found = differences(log, logs, before[-1], scale.steps)
    if published(root) != scale.saves:
        found.append(f"{root} lists the steps {published(root)}, expected {scale.saves}")
    if leftovers(root):
        found.append(f"files of unfinished saves: {', '.join(map(str, leftovers(root)))}")
    for save in (before[-1], scale.saves[-1]):
        report = blocking.verify(root / str(save))
        if not report.ok:
            found.append(f"step {save} is damaged: {report}")
    if found:
        raise JobError("\n".join(["the jobs do not fit together:", *found]))

    digest = next(line["sha256"] for line in logs[0] if "restored" in line)
    twice = sum("step" in line and line["step"] > before[-1] for line in log)
    say(f"Restored, bit by bit what {FIRST} processes had: sha256 {digest[:32]}…")
    say(f"All {scale.steps} steps are accounted for; {twice} were computed again.")
    say(f"The leftovers were removed, and all {len(scale.saves)} saves are listed.")
    (accuracy,) = (line["accuracy"] for line in logs[0] if "accuracy" in line)
    say(f"Accuracy on held-out digits: {accuracy:.1%}")


def main(script: str, train: Callable[[Part], None], description: str) -> int:
    """Train a part, or launch the jobs; return the exit status."""
    path = Path(script).resolve()
    default = HERE / "runs" / path.stem
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--root",
        type=Path,
        help="where checkpoints and logs are written: a new or empty directory (default: "
        f"{os.path.relpath(default)}, emptied first)",
    )
    parser.add_argument("--quick", action="store_true", help="a smaller network and fewer steps")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        train(Part(**json.loads(given.part)))
        return 0
    if given.root is None:
        shutil.rmtree(default, ignore_errors=True)
    elif given.root.exists() and any(given.root.iterdir()):
        parser.error(f"--root: {given.root} is not empty")
    folder: Path = (given.root or default).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        demonstrate(path, folder, QUICK if given.quick else FULL)
    except JobError as error:
        say(f"\nFAILED: {error}", "")
        say(f"\nCheckpoints, logs and the processes' output are in {folder}", "")
        return 1
    say(f"\nCheckpoints, logs and the processes' output are in {folder}", "")
    say(f"The example took {time.monotonic() - began:.0f} s.", "")
    return 0
