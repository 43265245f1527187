"""Data, batches and log of the training scripts.

A batch depends only on seed and step, so a resumed run gets the same batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

BATCH = 64
HELD_OUT = 297
"""Number of the 1797 digits that are held out to measure the accuracy."""


class Digits(NamedTuple):
    """Images of 8 × 8 pixels from 0 to 1 as float32 (n, 64), and the digits that they show."""

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]

    def batch(self, seed: int, step: int) -> Digits:
        """Return the batch of a step."""
        rows = np.random.default_rng([seed, step]).integers(len(self.labels), size=BATCH)
        return Digits(self.images[rows], self.labels[rows])


def load() -> tuple[Digits, Digits]:
    """Return the digits to train on and those held out; scikit-learn's data are shuffled."""
    bunch = load_digits()
    images = (bunch.data / 16).astype(np.float32)
    labels = bunch.target.astype(np.int32)
    return (
        Digits(images[:-HELD_OUT], labels[:-HELD_OUT]),
        Digits(images[-HELD_OUT:], labels[-HELD_OUT:]),
    )


def arguments(description: str, *, hidden: int) -> argparse.Namespace:
    """Parse the command line of a training script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=200, help="steps in all, earlier runs' too")
    parser.add_argument("--save-every", type=int, default=20, help="steps between saves")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--hidden", type=int, default=hidden, help="width of the hidden layers")
    parser.add_argument("--log", type=Path, help="JSON lines to append to: the bits of each loss")
    given = parser.parse_args()
    if given.steps < 1 or given.save_every < 1 or given.hidden < 1:
        parser.error("--steps, --save-every and --hidden are at least 1")
    return given


def bits(loss: Any) -> str:
    """Return the 32 bits of a loss in hex: two losses are equal if and only if these are."""
    return f"{int(np.float32(loss).view(np.uint32)):08x}"


def sha256(tree: Any) -> str:
    """Return the SHA-256 of a tree of arrays: keys, dtypes, shapes and bytes."""
    digest = hashlib.sha256()

    def add(path: str, node: Any) -> None:
        if isinstance(node, dict):
            for key, child in node.items():
                add(f"{path}/{key}", child)
        elif isinstance(node, (list, tuple)):
            for number, child in enumerate(node):
                add(f"{path}/{number}", child)
        elif node is None or isinstance(node, (bool, int, float, str)):
            digest.update(f"{path}={node!r};".encode())
        else:
            array = np.asarray(node)
            digest.update(f"{path}={array.dtype}{array.shape};".encode() + array.tobytes())

    add("", tree)
    return digest.hexdigest()


class RunLog:
    """Log of a run: text for people, and one JSON object per line in a file.

    Each line is written before the next step begins, so a killed run loses none.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", buffering=1)
        self._blocked_s: list[float] = []
        self._step_s: dict[bool, list[float]] = {False: [], True: []}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")

    def start(self, start: int, root: Path) -> None:
        """Log the first step of the run."""
        if start:
            print(f"resuming from step {start - 1} in {root}", flush=True)
        else:
            print(f"starting; checkpoints go to {root}", flush=True)
        self._line(start=start)

    def step(self, step: int, loss: Any, step_s: float, *, saving: bool) -> None:
        """Log a step that took `step_s` seconds, with or without a save in flight."""
        self._step_s[saving].append(step_s)
        self._line(step=step, loss=bits(loss))

    def save(self, step: int, loss: Any, blocked_s: float) -> None:
        """Log a save that blocked training for `blocked_s` seconds."""
        self._blocked_s.append(blocked_s)
        print(
            f"step {step:4}  loss {float(loss):.4f}  save started, training was blocked for "
            f"{blocked_s * 1e3:.1f} ms",
            flush=True,
        )
        self._line(save=step, blocked_s=blocked_s)

    def end(self, step: int, accuracy: float, parameters: Any, optimizer: Any) -> None:
        """Log the end of the run, its last step and state."""
        blocked_s, steps = sum(self._blocked_s), self._step_s
        busy_s = blocked_s + sum(map(sum, steps.values()))
        medians = {saving: float(np.median(s)) if s else 0.0 for saving, s in steps.items()}
        if busy_s:
            print(
                f"{len(self._blocked_s)} saves blocked training for {blocked_s * 1e3:.1f} ms in "
                f"all, {blocked_s / busy_s:.1%} of {busy_s:.1f} s"
            )
        sums = {"parameters": sha256(parameters), "optimizer": sha256(optimizer)}
        print(f"accuracy {accuracy:.1%} on {HELD_OUT} held-out digits")
        for name, value in sums.items():
            print(f"{name:10}  sha256 {value}")
        self._line(
            end=step,
            accuracy=accuracy,
            **sums,
            blocked_s=blocked_s,
            busy_s=busy_s,
            step_s=medians[False],
            step_while_saving_s=medians[True],
        )
