"""What a root should hold after any sequence of calls: a dict from step to what was saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from asyncckpt import KeepBest, KeepEvery, KeepLast, Retention
from asyncckpt.ports import RECORD_NAME

STEPS = st.integers(0, 7)

Metrics = Mapping[str, float]
METRICS: st.SearchStrategy[Metrics] = st.sampled_from(
    [{}, {"acc": 1.0}, *({"loss": x} for x in (0.1, 0.5, 0.5, 2.0, math.nan, math.inf))]
)


@dataclass(eq=False)
class Saved:
    """One checkpoint of the model; two of them are never equal.

    Attributes:
        tree: what was saved, made from `seed`.
        damaged: content before the damage of each damaged file, by relative path.
        record_is_gone: its record is not only damaged.
    """

    seed: int
    tree: dict[str, Any]
    metrics: Metrics
    metadata: Mapping[str, Any]
    damaged: dict[str, bytes] = field(default_factory=dict)
    record_is_gone: bool = False

    @classmethod
    def of(cls, seed: int, metrics: Metrics) -> Saved:
        """What a save of the tree of this seed should leave."""
        return cls(seed, tree(seed), metrics, {"seed": seed})

    @property
    def listed(self) -> bool:
        """Whether its record is valid, which makes it a step."""
        return RECORD_NAME not in self.damaged


@dataclass(frozen=True)
class Keep:
    """A retention policy as numbers; zeros are policies left out."""

    last: int = 0
    every: int = 0
    best: int = 0
    mode: Literal["min", "max"] = "min"

    def policy(self) -> Retention | None:
        """The library's policy of these numbers."""
        parts: list[KeepLast | KeepEvery | KeepBest] = []
        if self.last:
            parts.append(KeepLast(self.last))
        if self.every:
            parts.append(KeepEvery(self.every))
        if self.best:
            parts.append(KeepBest(self.best, "loss", self.mode))
        policy: Retention | None = parts[0] if parts else None
        for part in parts[1:]:
            policy = part | policy if policy is not None else part
        return policy

    def kept(self, steps: Mapping[int, Saved]) -> set[int]:
        """The steps that such a policy should keep, of all steps, the newest last."""
        last = list(steps)[-self.last :] if self.last else []
        every = [step for step in steps if self.every and step % self.every == 0]
        with_loss = {
            step: saved.metrics["loss"]
            for step, saved in steps.items()
            if not math.isnan(saved.metrics.get("loss", math.nan))
        }
        best: list[int] = []
        for _ in range(min(self.best, len(with_loss))):
            extreme = (min if self.mode == "min" else max)(with_loss.values())
            best.append([step for step, loss in with_loss.items() if loss == extreme][-1])
            del with_loss[best[-1]]
        if self.best and not best:
            return set(steps)
        return {*last, *every, *best}


KEEPS = st.sampled_from(
    [
        Keep(),
        Keep(last=1),
        Keep(last=3),
        Keep(every=3),
        Keep(best=1),
        Keep(last=1, best=2, mode="max"),
        Keep(last=1, every=4, best=1),
    ]
)


def tree(seed: int) -> dict[str, Any]:
    """A small tree: two chunks, a packed array, inline values, tied arrays, scalars, containers."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal(400).astype(np.float32)
    return {
        "w": random.standard_normal((5, 256 + seed % 3)).astype(np.float32),
        "layers": [random.integers(0, 99, 600).astype(np.int16), {"scale": np.float64(seed)}],
        "a": shared,
        "b": shared,
        "bias": random.standard_normal(4).astype(np.float32),
        "step": seed,
        "lr": 0.1 * seed,
        "name": f"tree {seed}",
        **({"extra": [None, {}, True]} if seed % 2 else {}),
    }


def scribble(tree: dict[str, Any]) -> None:
    """Every array of the tree holds something else."""
    for leaf in (tree["w"], tree["layers"][0], tree["a"], tree["bias"]):
        leaf[...] = 99
    tree["layers"][1]["scale"] = np.float64(-1)
    tree["name"] = "overwritten"


DAMAGES = ("flip", "cut", "flip", "zeros", "flip", "longer", "flip", "gone")


def damage(content: bytes, kind: str, at: float, bit: int) -> bytes | None:
    """What a file holds after damage at a place from 0.0 to below 1.0; None if it is gone.

    It is never what it was.
    """
    place = int(len(content) * at)
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]
    if kind == "cut":
        return content[:place]
    if kind == "zeros":
        return bytes(len(content)) if any(content) else content + b"\1"
    return content + b"\0" if kind == "longer" else None
