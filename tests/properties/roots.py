"""A root with its trainers, beside the dict that says what should be in it."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hypothesis import assume

from asyncckpt import SaveReport, blocking
from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    UnsupportedFormatError,
)
from asyncckpt.ports import RECORD_NAME
from tests.crash.scenarios import same
from tests.properties.model import Keep, Saved, damage, scribble, tree
from tests.properties.trainers import Flight, Trainer

T = TypeVar("T")

NOTICED = (CorruptCheckpointError, CheckpointNotFoundError, UnsupportedFormatError)

visited: Counter[str] = Counter()
"""Operations that were carried out on all roots together, by kind and outcome."""


class Root:
    """See the module.

    Attributes:
        path: the directory.
        steps: what should be in it.
        trainers: the processes at work, one or two.
        turn: counts operations.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="asyncckpt-machine-"))
        self.steps: dict[int, Saved] = {}
        self.trainers: list[Trainer] = []
        self.turn = 0
        self._aside = 0

    # -------------------------------------------------------------------------------- choices

    def one_of(self, choices: Sequence[T], index: int) -> T:
        """A choice that depends on the turn too: Hypothesis draws small numbers far more often."""
        self.turn += 1
        return choices[(index + self.turn) % len(choices)]

    def pick(self, index: int) -> int:
        """One of the steps there are, or one that is not there."""
        absent = next(step for step in range(len(self.steps) + 1) if step not in self.steps)
        return self.one_of([*sorted(self.steps), absent], index)

    def trainer(self, who: int) -> Trainer:
        return self.trainers[who % len(self.trainers)]

    def idle(self, who: int) -> Trainer:
        """A trainer without a save in flight, for which the next one would have to wait."""
        trainer = self.trainer(who)
        assume(trainer.flight is None)
        return trainer

    def flying(self) -> list[tuple[Trainer, Flight]]:
        return [(trainer, trainer.flight) for trainer in self.trainers if trainer.flight]

    # ---------------------------------------------------------------------------------- steps

    def listed(self) -> list[int]:
        """The steps with a valid record."""
        return sorted(step for step, saved in self.steps.items() if saved.listed)

    def taken(self, step: int, overwrite: bool) -> bool:
        """Whether a save of this step has to fail."""
        return not overwrite and step in self.steps and self.steps[step].listed

    def published(self, step: int, saved: Saved) -> None:
        """A save has put its checkpoint in place."""
        if step in self.steps and not self.steps[step].listed:
            self._aside += 1  # what has no valid record is never removed by a save
        self.steps[step] = saved

    def committed(self, trainer: Trainer, step: int, saved: Saved, report: SaveReport) -> None:
        """A save has ended, and its retention has deleted what it should."""
        self.published(step, saved)
        expected = trainer.deletes(self.steps, step)
        assert list(report.deleted_steps) == expected
        self.gone(expected)
        visited["deleted by retention"] += len(expected)

    def gone(self, steps: Sequence[int]) -> None:
        """These steps were deleted."""
        for step in steps:
            del self.steps[step]

    # -------------------------------------------------------------------------------- trainers

    def replace_if_dead(self, trainer: Trainer) -> None:
        """A process that died is followed by one that does the same, and cleans up after it."""
        if trainer.store.down:
            trainer.end()
            self.trainers[self.trainers.index(trainer)] = Trainer(self.path, trainer.keep)
            assert len(self._leftovers()) == len(self.flying())

    def _leftovers(self) -> list[Path]:
        """What attempts and deletions, alive or dead, have in the control directory."""
        control = self.path / ".asyncckpt"
        trash = [path for path in control.glob("*") if path.name.startswith(("trash-", "old-"))]
        return trash + [path for path in control.glob("epoch-*/*") if path.suffix != ".owner"]

    # ------------------------------------------------------------------------------ assertions

    def check_listing(self) -> None:
        """A step is listed if and only if its record is valid."""
        for trainer in self.trainers:
            assert trainer.ckpt.latest_step() == max(self.listed(), default=None)
        for trainer in self.trainers[:1]:
            assert trainer.ckpt.steps() == self.listed()

    def check(self, trainer: Trainer, step: int) -> None:
        """Damage of a step is noticed, no other is reported, and it restores to what was saved."""
        saved = self.steps[step]
        try:
            intact = trainer.ckpt.verify(step).ok
        except NOTICED:
            intact = False
        assert intact == (not saved.damaged), (step, sorted(saved.damaged))
        visited["verify" if intact else "verify: damaged"] += 1
        self.read(trainer.ckpt, "restore", step)

    def read(self, ckpt: blocking.Checkpointer, how: str, step: int) -> None:
        """Reading gives what was saved; of a damaged step that, or an error which says so."""
        if how == "newest":
            step = max(self.listed(), default=-1)
        saved = self.steps.get(step, Saved.of(0, {}))
        try:
            assert _READ[how](ckpt, step, saved), f"{how} of step {step}: not what was saved"
            assert step in self.steps and saved.listed
            visited[how] += 1
        except CheckpointNotFoundError:
            assert step not in self.steps or saved.damaged
            visited[f"{how}: no such step"] += 1
        except (CorruptCheckpointError, UnsupportedFormatError):
            assert saved.damaged
            visited[f"{how}: damaged"] += 1

    def corrupt(self, step: int, path: str, kind: str, at: float, bit: int) -> None:
        """A file of a step is another one than was saved, which is noticed."""
        saved, file = self.steps[step], self.path / str(step) / path
        saved.damaged[path] = content = file.read_bytes()
        damaged = damage(content, kind, at, bit)
        if damaged is None:
            file.unlink()
            saved.record_is_gone |= path == RECORD_NAME
        else:
            file.write_bytes(damaged)
        self.check(self.trainers[0], step)

    def heal(self, step: int) -> None:
        """All files of a step are what was saved again."""
        saved = self.steps[step]
        for path, content in saved.damaged.items():
            (self.path / str(step) / path).write_bytes(content)
        saved.damaged.clear()
        saved.record_is_gone = False
        self.check(self.trainers[0], step)

    def end(self) -> None:
        """Every trainer has ended; the root holds what it should, and nothing else."""
        try:
            for trainer in self.trainers:
                trainer.end()
            last = Trainer(self.path, Keep())
            try:
                assert last.ckpt.steps() == self.listed()
                for step in self.steps:
                    self.check(last, step)
            finally:
                last.end()
            left = {path.name for path in self.path.glob(".asyncckpt/*")} - {"lock"}
            assert all(name.startswith("aside-") for name in left), left
            assert len(left) == self._aside
        finally:
            shutil.rmtree(self.path)


def _restore_into(ckpt: blocking.Checkpointer, step: int, saved: Saved) -> bool:
    target = tree(saved.seed)
    scribble(target)
    target.update(name=saved.tree["name"], layers=[target["layers"][0], saved.tree["layers"][1]])
    ckpt.restore_into(target, step=step)
    return same(target, saved.tree)


def _into_another_shape(ckpt: blocking.Checkpointer, step: int, saved: Saved) -> bool:
    target = {"w": saved.tree["w"][:2].copy()}
    try:
        ckpt.restore_into(target, step=step)
    except MismatchError:
        return same(target, {"w": saved.tree["w"][:2]})
    return False


def _inspect(ckpt: blocking.Checkpointer, step: int, saved: Saved) -> bool:
    info = ckpt.inspect(step)
    return repr(info.metrics) == repr(saved.metrics) and info.metadata == saved.metadata


Reads = Callable[[blocking.Checkpointer, int, Saved], bool]
_READ: dict[str, Reads] = {
    "newest": lambda ckpt, _, saved: same(ckpt.restore(), saved.tree),
    "restore": lambda ckpt, step, saved: same(ckpt.restore(step), saved.tree),
    # Six seeds on, a tree has the same shapes.
    "restore like": lambda ckpt, step, saved: same(
        ckpt.restore(step, like=tree(saved.seed + 6)), saved.tree
    ),
    "restore_into": _restore_into,
    "restore_into another shape": _into_another_shape,
    "inspect": _inspect,
}
HOW_TO_READ = tuple(_READ)
