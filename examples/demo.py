"""Demo: a training run is killed in the middle of a save, resumes and equals an uninterrupted one.

    make demo        or        python examples/demo.py [--root DIR] [--quick]

Three processes run train_jax.py. The first one is not interrupted. The second one is stopped
(SIGSTOP) while it saves a checkpoint, and killed (SIGKILL) if that checkpoint is not published yet.
The third one resumes from the newest checkpoint of the second. Every loss, the parameters and the
optimizer state must equal those of the first run bit by bit. Exit status: 0 if they do, 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncckpt import blocking

HERE = Path(__file__).resolve().parent
DEFAULT_ROOT = HERE / "runs" / "demo"
TIMEOUT_S = 300.0
"""Limit for one training process: beyond it, the machine is too slow or something hangs."""
POLL_S = 0.0005
KEPT = 3
"""Checkpoints that train_jax.py keeps."""

Line = Mapping[str, Any]


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


FULL = Scale(hidden=1536, steps=150, save_every=15)
QUICK = Scale(hidden=768, steps=24, save_every=3)


class DemoError(Exception):
    """The demo could not be carried out, or its runs differ."""


# ------------------------------------------------------------------------------- training runs


class Run:
    """One process of train_jax.py; leaving the block kills it if it is still running."""

    def __init__(self, name: str, folder: Path, root: Path, log: Path, scale: Scale) -> None:
        self.name = name
        self.output = folder / f"{name}.txt"
        command = [sys.executable, str(HERE / "train_jax.py"), "--root", str(root)]
        command += ["--log", str(log), "--hidden", str(scale.hidden)]
        command += ["--steps", str(scale.steps), "--save-every", str(scale.save_every)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # ends a stopped process, too
            self.process.wait()

    def finish(self) -> None:
        """Wait until the process has ended with status 0."""
        try:
            status = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"the {self.name} run takes more than {TIMEOUT_S:.0f} s") from None
        if status:
            raise self.failure()

    def failure(self) -> DemoError:
        """Return the error for a run that ended unexpectedly."""
        return DemoError(
            f"the {self.name} run ended with status {self.process.returncode}; its output:\n"
            + self.output.read_text()
        )

    def stop(self) -> bool:
        """Stop every thread of the process; return False if it has ended instead."""
        os.kill(self.process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return False


def attempt_of(root: Path, step: int) -> Path | None:
    """Return the directory of the attempt to save this step, once it has a data file, or None."""
    found = (root / ".asyncckpt").glob(f"epoch-*/{step}-*/default/d/*")
    return next((path.parents[2] for path in found), None)


def stop_in_a_save(run: Run, root: Path, steps: Sequence[int]) -> tuple[int, Path, int]:
    """Stop the process when the save of one of these steps has begun but is not published.

    Returns:
        The step, the directory of its attempt, and the number of earlier saves that were too quick.

    Raises:
        DemoError: all of these saves were too quick.
    """
    deadline = time.monotonic() + TIMEOUT_S
    for missed, step in enumerate(steps):
        attempt = None
        while attempt is None and not (root / str(step)).exists():
            if run.process.poll() is not None:
                raise run.failure()
            if time.monotonic() > deadline:
                raise DemoError(f"step {step} was not saved within {TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)
            attempt = attempt_of(root, step)
        if attempt is None:
            continue  # published between two checks
        if not run.stop():
            raise run.failure()
        # The process is stopped: the files that exist now are those that the kill leaves.
        if not (root / str(step)).exists() and attempt.exists():
            return step, attempt, missed
        run.process.send_signal(signal.SIGCONT)
    raise DemoError(
        f"all {len(steps)} saves were finished before the process could be stopped: try again, or "
        "give --root on a slower disk"
    )


# --------------------------------------------------------------------------------- comparisons


def read_log(path: Path) -> list[Line]:
    """Return the lines of a run's log; a killed process may have left the last one unfinished."""
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def compare_logs(reference: Sequence[Line], other: Sequence[Line]) -> list[str]:
    """Return the differences between the runs of `other` and the uninterrupted one.

    A step that both the killed and the resumed process have computed counts twice.
    """
    differences = []
    expected = {line["step"]: line["loss"] for line in reference if "step" in line}
    found = [(line["step"], line["loss"]) for line in other if "step" in line]
    for step, loss in found:
        if loss != expected.get(step):
            differences.append(
                f"step {step}: the bits of the loss are {loss}, expected {expected.get(step)}"
            )
    if missing := sorted(expected.keys() - dict(found).keys()):
        differences.append(f"steps without a loss: {', '.join(map(str, missing))}")
    ends = [[line for line in log if "end" in line] for log in (reference, other)]
    if not expected or not all(ends):
        differences.append("a run did not reach its end")
        return differences
    for key in ("end", "parameters", "optimizer"):
        wanted, got = (end[-1][key] for end in ends)
        if wanted != got:
            differences.append(f"{key}: {got}, expected {wanted}")
    return differences


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths and leaves of a restored tree."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, child in items:
            yield from leaves(child, f"{path}/{key}")
    else:
        yield path, tree


def compare_trees(reference: Any, other: Any) -> list[str]:
    """Return the paths whose dtype, shape or bits differ."""

    def bits(leaf: Any) -> Any:
        return (leaf.dtype, leaf.shape, leaf.tobytes()) if hasattr(leaf, "tobytes") else leaf

    one, two = (dict(leaves(tree)) for tree in (reference, other))
    differences = [
        f"{path}: only one run has this leaf" for path in sorted(one.keys() ^ two.keys())
    ]
    return differences + [
        f"{path}: the bits differ"
        for path in one
        if path in two and bits(one[path]) != bits(two[path])
    ]


def require_equal(differences: Sequence[str]) -> None:
    """Check that there are no differences.

    Raises:
        DemoError: lists them.
    """
    if differences:
        raise DemoError("the runs differ:\n" + "\n".join(differences))


# ------------------------------------------------------------------------------------- the demo


def command_line(*arguments: str) -> tuple[int, str]:
    """Return exit status and output of `asyncckpt …`."""
    command = [sys.executable, "-m", "asyncckpt", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout.rstrip()


def indent(text: str) -> str:
    """Return the text with every line indented."""
    return "\n".join(f"     {line}".rstrip() for line in text.splitlines())


def say(text: str = "") -> None:
    """Print the text without buffering."""
    print(text, flush=True)


def published(root: Path) -> list[int]:
    """Return the published steps."""
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


def leftovers(root: Path) -> list[str]:
    """Return the files of attempts, with their sizes on disk."""
    found = sorted(path for path in (root / ".asyncckpt").rglob("*") if path.is_file())
    return [
        f"{path.relative_to(root)}  {path.stat().st_blocks * 512 / 1e6:.1f} MB on disk"
        for path in found
        if path.name != "lock" and path.suffix != ".owner"
    ]


def stall(log: Sequence[Line]) -> str:
    """Describe how long saving blocked the training loop."""
    blocked = [line["blocked_s"] * 1e3 for line in log if "save" in line]
    (end,) = (line for line in log if "end" in line)
    share = end["blocked_s"] / end["busy_s"]
    return (
        f"{len(blocked)} saves blocked training for {statistics.median(blocked):.1f} ms each "
        f"(median; {max(blocked):.1f} ms at most),\n"
        f"{share:.1%} of its {end['busy_s']:.1f} s. A step took {end['step_s'] * 1e3:.1f} ms, and "
        f"{end['step_while_saving_s'] * 1e3:.1f} ms while a save was in flight."
    )


def demonstrate(folder: Path, scale: Scale) -> None:
    """Run the three processes and compare them.

    Raises:
        DemoError: names what differs.
    """
    whole, broken = folder / "uninterrupted", folder / "interrupted"
    whole_log, broken_log = folder / "uninterrupted.jsonl", folder / "interrupted.jsonl"

    say(f"1  Training {scale.steps} steps without interruption, a save every {scale.save_every}.")
    with Run("uninterrupted", folder, whole, whole_log, scale) as run:
        run.finish()
    reference = read_log(whole_log)
    info = blocking.inspect(whole / str(scale.saves[-1]))
    say(indent(f"{len(info.leaves)} leaves, {info.nbytes / 1e6:.1f} MB per checkpoint."))
    say(indent(stall(reference)))

    say("\n2  The same again, to be killed in the middle of a save.")
    with Run("killed", folder, broken, broken_log, scale) as run:
        step, attempt, missed = stop_in_a_save(run, broken, scale.saves[2:])
        run.process.kill()
        run.process.wait()
    if missed:
        say(indent(f"{missed} saves finished too quickly, so the run was continued."))
    say(indent(f"Stopped while saving step {step}, which was not published, and killed."))
    status, listing = command_line("ls", str(broken))
    if status:
        raise DemoError(f"asyncckpt ls ended with status {status}:\n{listing}")
    say(indent(f"\n$ asyncckpt ls {os.path.relpath(broken)}\n{listing}\n"))
    say(indent("Leftovers of the killed save:"))
    say(indent("\n".join(leftovers(broken)) or "nothing but its directory"))
    before = [save for save in scale.saves if save < step]
    if published(broken) != before[-KEPT:]:
        raise DemoError(f"{broken} holds {published(broken)}, expected {before[-KEPT:]}")

    say("\n3  Resuming in a new process.")
    with Run("resumed", folder, broken, broken_log, scale) as run:
        run.finish()
    log = read_log(broken_log)
    start = [line["start"] for line in log if "start" in line][-1]
    say(indent(f"It resumed from step {start - 1} and reached the end, step {scale.steps - 1}."))
    if start - 1 != before[-1]:
        raise DemoError(f"it resumed from step {start - 1}; the newest was {before[-1]}")
    if attempt.exists() or leftovers(broken):
        raise DemoError(f"leftovers of the killed save were not removed: {leftovers(broken)}")
    say(indent("The leftovers of the killed save were removed."))
    for kept in published(broken):
        status, output = command_line("verify", str(broken / str(kept)))
        if status:
            raise DemoError(f"asyncckpt verify found damage in step {kept}:\n{output}")
    say(indent(f"asyncckpt verify read every byte of steps {published(broken)}: no damage."))

    twice = sum("step" in line for line in log) - scale.steps
    differences = compare_logs(reference, log)
    last = str(scale.steps - 1)
    trees = [blocking.restore(root / last) for root in (whole, broken)]
    differences += compare_trees(*trees)
    require_equal(differences)
    (end,) = (line for line in reference if "end" in line)
    say("\nIdentical, bit by bit:")
    say(indent(f"{scale.steps} losses ({twice} steps were computed twice)"))
    say(indent(f"parameters       sha256 {end['parameters']}"))
    say(indent(f"optimizer state  sha256 {end['optimizer']}"))
    say(indent(f"all {len(info.leaves)} leaves of the last checkpoints"))
    say(indent(f"accuracy on held-out digits: {end['accuracy']:.1%}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--root",
        type=Path,
        help="where checkpoints and logs are written: a new or empty directory (default: "
        f"{os.path.relpath(DEFAULT_ROOT)}, emptied first)",
    )
    parser.add_argument("--quick", action="store_true", help="a smaller network and fewer steps")
    given = parser.parse_args(arguments)
    if given.root is None:
        shutil.rmtree(DEFAULT_ROOT, ignore_errors=True)
    elif given.root.exists() and any(given.root.iterdir()):
        parser.error(f"--root: {given.root} is not empty")
    folder: Path = (given.root or DEFAULT_ROOT).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        demonstrate(folder, QUICK if given.quick else FULL)
    except DemoError as error:
        say(f"\nFAILED: {error}")
        say(f"\nCheckpoints, logs and the runs' output are in {folder}")
        return 1
    say(f"\nCheckpoints, logs and the runs' output are in {folder}")
    say(f"The demo took {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
