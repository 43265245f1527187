"""Any sequence of saves, restores, deletions, crashes and damage, against a dict.

Two trainers may work on one root. The invariant: a step is listed if and only if its record is
valid; what is listed and undamaged restores to exactly what was saved, whoever asks; what is
damaged is noticed; an acknowledged save is lost only to deletions that the model knows of too.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asyncckpt import RestoreOptions, SaveOptions, SaveReport, blocking
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    SaveAbortedError,
    StoreError,
    UnsupportedFormatError,
)
from asyncckpt.ports import RECORD_NAME
from asyncckpt.testing.faults import Fault, Gate
from tests.crash.scenarios import same
from tests.properties.crashes import CrashStore
from tests.properties.model import (
    DAMAGES,
    KEEPS,
    METRICS,
    STEPS,
    Keep,
    Metrics,
    Saved,
    damage,
    scribble,
    tree,
)

T = TypeVar("T")

NOTICED = (CorruptCheckpointError, CheckpointNotFoundError, UnsupportedFormatError)
OPTIONS = {
    None: SaveOptions(chunk_nbytes=4096, host_memory_nbytes=64 << 20),
    "zstd": SaveOptions(chunk_nbytes=4096, host_memory_nbytes=64 << 20, compression="zstd"),
}
# A restore that hangs ends with an error that is not expected.
DEADLINE = RestoreOptions(deadline_s=60.0)

visited: Counter[str] = Counter()
"""Operations that all machines together have carried out, by kind and outcome."""

COMPRESSIONS = st.sampled_from([None, None, "zstd"])
SEEDS = st.integers(1, 50)
WHO = st.integers(0, 1)
INDICES = st.integers(0, 7)


@dataclass(eq=False)
class Flight:
    """A save of a trainer that is held at one of its operations."""

    pending: blocking.PendingSave
    gate: Gate
    step: int
    saved: Saved
    overwrite: bool


class Trainer:
    """One `Checkpointer` on the root, and what its retention has seen of the steps."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self.keep = keep
        self.known: dict[int, Saved] = {}
        self.flight: Flight | None = None
        self.ckpt = blocking.Checkpointer(root, keep=keep.policy(), restore_options=DEADLINE)
        self.store = CrashStore(self.ckpt._core.store)  # type: ignore[arg-type]
        self.ckpt._core.store = self.store
        self.ckpt.__enter__()

    def release(self, flight: Flight) -> None:
        """The held operation goes on."""
        self.ckpt._core.runtime.engine.post(flight.gate.release.set)
        self.flight = None


class CheckpointMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="asyncckpt-machine-"))
        self.steps: dict[int, Saved] = {}
        self.aside = 0
        self.turns = 0
        self.trainers: list[Trainer] = []

    @initialize(
        keep=KEEPS,
        saves=st.lists(st.tuples(STEPS, SEEDS, METRICS), min_size=1, max_size=2),
    )
    def first_trainer(self, keep: Keep, saves: list[tuple[int, int, Metrics]]) -> None:
        self.trainers = [Trainer(self.root, keep)]
        for step, seed, metrics in saves:
            self.save(
                who=0, step=step, seed=seed, metrics=metrics, overwrite=True, compression=None
            )

    # ------------------------------------------------------------------------------- trainers

    def trainer(self, who: int) -> Trainer:
        return self.trainers[who % len(self.trainers)]

    def idle(self, who: int) -> Trainer:
        """A trainer without a save in flight, for which the next one would have to wait."""
        trainer = self.trainer(who)
        assume(trainer.flight is None)
        return trainer

    @precondition(lambda self: len(self.trainers) == 1)
    @rule(keep=KEEPS)
    def second_trainer(self, keep: Keep) -> None:
        self.trainers.append(Trainer(self.root, keep))
        visited["second trainer"] += 1

    @precondition(lambda self: len(self.trainers) == 2)
    @rule(who=WHO)
    def trainer_ends(self, who: int) -> None:
        trainer = self.idle(who)
        trainer.ckpt.close()
        self.trainers.remove(trainer)
        visited["trainer ends"] += 1

    def one_of(self, choices: Sequence[T], index: int) -> T:
        """A choice that depends on the turn too: Hypothesis draws small numbers far more often."""
        self.turns += 1
        return choices[(index + self.turns) % len(choices)]

    def pick(self, index: int) -> int:
        """One of the steps there are, or one that is not there."""
        absent = next(step for step in range(len(self.steps) + 1) if step not in self.steps)
        return self.one_of([*sorted(self.steps), absent], index)

    # ---------------------------------------------------------------------------------- saves

    @rule(
        who=WHO,
        step=STEPS,
        seed=SEEDS,
        metrics=METRICS,
        overwrite=st.booleans(),
        compression=COMPRESSIONS,
    )
    def save(
        self,
        who: int,
        step: int,
        seed: int,
        metrics: Metrics,
        overwrite: bool,
        compression: str | None,
    ) -> None:
        trainer = self.idle(who)
        saved = Saved(tree(seed), metrics, {"seed": seed})
        taken = self._taken(step, overwrite)
        try:
            report = self._save(trainer, step, saved, overwrite, compression)
        except CheckpointExistsError:
            assert taken
            visited["save: the step exists"] += 1
        else:
            assert not taken
            self._committed(trainer, step, saved, report)
            visited["overwrite" if overwrite else "save"] += 1

    def _save(
        self,
        trainer: Trainer,
        step: int,
        saved: Saved,
        overwrite: bool,
        compression: str | None = None,
    ) -> SaveReport:
        return trainer.ckpt.save(
            step,
            saved.tree,
            metrics=saved.metrics,
            metadata=saved.metadata,
            overwrite=overwrite,
            options=OPTIONS[compression],
        )

    def _taken(self, step: int, overwrite: bool) -> bool:
        return not overwrite and step in self.steps and self.steps[step].listed

    def _committed(self, trainer: Trainer, step: int, saved: Saved, report: SaveReport) -> None:
        self._published(step, saved)
        expected = self._retention(trainer, step)
        assert list(report.deleted_steps) == expected
        for gone in expected:
            del self.steps[gone]
            visited["deleted by retention"] += 1

    def _published(self, step: int, saved: Saved) -> None:
        if step in self.steps and not self.steps[step].listed:
            self.aside += 1
        self.steps[step] = saved

    def _retention(self, trainer: Trainer, saved: int) -> list[int]:
        """The steps that the trainer deletes, by what it has seen of them."""
        trainer.known.pop(saved, None)
        if trainer.keep == Keep():
            return []
        view = {
            step: trainer.known.get(step, entry)
            for step, entry in sorted(self.steps.items())
            if step in trainer.known or entry.listed
        }
        trainer.known = dict(view)
        deleted = []
        for step in set(view) - trainer.keep.kept(view) - {saved}:
            del trainer.known[step]
            if self.steps[step] is view[step] and self.steps[step].listed:
                deleted.append(step)
            elif self.steps[step].listed:  # another one than it had seen: looked at again
                trainer.known[step] = self.steps[step]
        return sorted(deleted)

    @rule(
        who=WHO,
        step=STEPS,
        seed=SEEDS,
        metrics=METRICS,
        overwrite=st.booleans(),
        index=INDICES,
    )
    def start_save(
        self, who: int, step: int, seed: int, metrics: Metrics, overwrite: bool, index: int
    ) -> None:
        kind = self.one_of(["create", "write", "publish", "seal", "put", "publish"], index)
        trainer = self.idle(who)
        assume(not self._taken(step, overwrite))
        core, store = trainer.ckpt._core, trainer.store
        gate = Gate()
        store.script.append(Fault(kind, store.counts[kind] + 1, gate=gate))
        taken = tree(seed)
        saved = Saved(tree(seed), metrics, {"seed": seed})
        pending = trainer.ckpt.start_save(
            step,
            taken,
            metrics=metrics,
            metadata=saved.metadata,
            overwrite=overwrite,
            options=OPTIONS[None],
        )
        scribble(taken)  # it was taken
        core.call(gate.reached.wait).result()
        trainer.flight = Flight(pending, gate, step, saved, overwrite)
        visited["start_save"] += 1

    @precondition(lambda self: any(trainer.flight for trainer in self.trainers))
    @rule(index=INDICES)
    def flight_ends(self, index: int) -> None:
        how = self.one_of(["wait", "cancel", "crash"], index)
        trainer, flight = self._flying()
        taken = self._taken(flight.step, flight.overwrite)
        published = len(trainer.store.did("publish"))
        if how == "cancel":
            assert flight.pending.cancel()
        trainer.store.down = how == "crash"
        trainer.release(flight)
        try:
            report = flight.pending.result()
        except CheckpointExistsError:
            assert taken  # the other trainer was faster
            visited["start_save: the step appeared"] += 1
        except AsyncCheckpointError as error:
            assert how == "crash" or (how == "cancel" and isinstance(error, SaveAbortedError))
            assert len(trainer.store.did("publish")) == published
            visited[f"{how} in flight"] += 1
        else:
            assert not taken and how != "crash"
            self._committed(trainer, flight.step, flight.saved, report)
            visited["wait" if how == "wait" else "cancel: too late"] += 1
        self._bury(trainer)

    def _flying(self) -> tuple[Trainer, Flight]:
        return next((t, t.flight) for t in self.trainers if t.flight is not None)

    # ------------------------------------------------------------------------------- deletions

    @rule(who=WHO, index=INDICES)
    def delete(self, who: int, index: int) -> None:
        step = self.pick(index)
        found = step in self.steps and not self.steps[step].record_is_gone
        try:
            self.trainer(who).ckpt.delete(step)
        except CheckpointNotFoundError:
            assert not found
            visited["delete: no such step"] += 1
        else:
            assert found
            del self.steps[step]
            visited["delete"] += 1

    @rule(who=WHO, index=INDICES)
    def delete_after(self, who: int, index: int) -> None:
        step = self.pick(index)
        above = [number for number in self._listed() if number > step]
        assert self.idle(who).ckpt.delete_after(step) == above
        for number in above:
            del self.steps[number]
        visited["delete_after"] += 1

    # ------------------------------------------------------------------- crashes and failures

    @rule(
        who=WHO,
        step=STEPS,
        seed=SEEDS,
        metrics=METRICS,
        overwrite=st.booleans(),
        at=st.integers(1, 34),
        after=st.booleans(),
    )
    def crash_in_save(
        self,
        who: int,
        step: int,
        seed: int,
        metrics: Metrics,
        overwrite: bool,
        at: int,
        after: bool,
    ) -> None:
        trainer = self.idle(who)
        taken = self._taken(step, overwrite)
        saved = Saved(tree(seed), metrics, {"seed": seed})
        with self._dying(trainer, at, after) as did:
            self._save(trainer, step, saved, overwrite)
        if did("publish"):
            assert not taken
            self._published(step, saved)
            expected = self._retention(trainer, step)
            deleted = [int(name) for name in did("delete")]
            assert deleted == expected[: len(deleted)]
            for gone in deleted:
                del self.steps[gone]
        visited["crash in save" + (", committed" if did("publish") else "")] += trainer.store.down
        self._bury(trainer)

    @rule(who=WHO, index=INDICES, at=st.integers(1, 12), after=st.booleans())
    def crash_in_delete_after(self, who: int, index: int, at: int, after: bool) -> None:
        trainer, step = self.idle(who), self.pick(index)
        above = [number for number in reversed(self._listed()) if number > step]
        with self._dying(trainer, at, after) as did:
            trainer.ckpt.delete_after(step)
        deleted = [int(name) for name in did("delete")]
        assert deleted == above[: len(deleted)]
        for gone in deleted:
            del self.steps[gone]
        visited["crash in delete_after"] += trainer.store.down
        self._bury(trainer)

    @contextlib.contextmanager
    def _dying(self, trainer: Trainer, at: int, after: bool) -> Any:
        """The process may die in the block; gives what it did there, by kind of operation."""
        store, begin = trainer.store, len(trainer.store.applied)

        def did(kind: str) -> list[str]:
            return [op.subject for op in store.applied[begin:] if op.kind == kind]

        store.die(at=at, after=after)
        try:
            yield did
        except AsyncCheckpointError as error:
            assert store.down or isinstance(error, CheckpointExistsError)
        store.live()

    def _bury(self, trainer: Trainer) -> None:
        """A process that died is followed by one that does the same; a living one lives on."""
        if trainer.store.down:
            trainer.ckpt.close()
            trainer.store.bury()
            self.trainers[self.trainers.index(trainer)] = Trainer(self.root, trainer.keep)
            assert self._leftovers() == []

    @rule(
        who=WHO,
        step=STEPS,
        seed=SEEDS,
        metrics=METRICS,
        overwrite=st.booleans(),
        at=st.integers(1, 26),
    )
    def failing_save(
        self, who: int, step: int, seed: int, metrics: Metrics, overwrite: bool, at: int
    ) -> None:
        trainer = self.idle(who)
        assume(trainer.keep == Keep() and not self._taken(step, overwrite))
        saved = Saved(tree(seed), metrics, {"seed": seed})
        trainer.store.fail(at=at, error=StoreError("the disk is on fire"))
        published = len(trainer.store.did("publish"))
        try:
            report = self._save(trainer, step, saved, overwrite)
        except StoreError as error:
            assert str(error) == "the disk is on fire"
            assert len(trainer.store.did("publish")) == published
            visited["failing save"] += 1
        else:
            self._committed(trainer, step, saved, report)
        trainer.store.live()

    # -------------------------------------------------------------------------------- damage

    @precondition(lambda self: any(len(saved.damaged) < 2 for saved in self.steps.values()))
    @rule(index=INDICES, at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def corrupt(self, index: int, at: float, bit: int) -> None:
        step = self.one_of([s for s, saved in self.steps.items() if len(saved.damaged) < 2], index)
        saved, directory = self.steps[step], self.root / str(step)
        files = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
        path = self.one_of([file for file in files if file not in saved.damaged], index)
        kind = self.one_of(DAMAGES, index)
        content = (directory / path).read_bytes()
        damaged = damage(content, kind, (at + 0.618 * self.turns) % 1, bit)
        if damaged is None:
            (directory / path).unlink()
            saved.record_is_gone |= path == RECORD_NAME
        else:
            (directory / path).write_bytes(damaged)
        saved.damaged[path] = content
        self._check(self.trainers[0], step)
        visited[f"corrupt: {kind}"] += 1

    @precondition(lambda self: any(saved.damaged for saved in self.steps.values()))
    @rule(index=INDICES)
    def heal(self, index: int) -> None:
        step = self.one_of([s for s, saved in self.steps.items() if saved.damaged], index)
        saved = self.steps[step]
        for path, content in saved.damaged.items():
            (self.root / str(step) / path).write_bytes(content)
        saved.damaged.clear()
        saved.record_is_gone = False
        self._check(self.trainers[0], step)
        visited["heal"] += 1

    # -------------------------------------------------------------------------------- reading

    @rule(who=WHO, index=INDICES)
    def read(self, who: int, index: int) -> None:
        how = self.one_of(["newest", "restore", "restore like", "restore_into", "inspect"], index)
        ckpt, step = self.trainer(who).ckpt, self.pick(index)

        def matches(saved: Saved) -> bool:
            if how == "inspect":
                info = ckpt.inspect(step)
                return repr(info.metrics) == repr(saved.metrics) and info.metadata == saved.metadata
            if how == "restore_into":
                target = tree(saved.tree["step"])
                for leaf in (target["w"], target["layers"][0], target["a"], target["bias"]):
                    leaf[...] = 99
                ckpt.restore_into(target, step=step)
                return same(target, saved.tree)
            like = tree(saved.tree["step"] + 6) if how == "restore like" else None
            return same(ckpt.restore(None if how == "newest" else step, like=like), saved.tree)

        self._read(how, None if how == "newest" else step, matches)

    @rule(who=WHO, index=INDICES)
    def restore_into_another_shape(self, who: int, index: int) -> None:
        step = self.pick(index)
        target = {"w": np.full((3, 3), 7.0)}
        try:
            self.trainer(who).ckpt.restore_into(target, step=step)
        except MismatchError:
            assert step in self.steps and self.steps[step].listed
        except NOTICED:
            assert step not in self.steps or self.steps[step].damaged
        else:
            raise AssertionError("the target does not fit")
        assert (target["w"] == 7.0).all()
        visited["restore_into another shape"] += 1

    def _read(self, what: str, step: int | None, matches: Callable[[Saved], bool]) -> None:
        """Reading gives what was saved; of a damaged step that, or an error which says so."""
        if step is None:
            step = max(self._listed(), default=-1)
        saved = self.steps.get(step, Saved({"step": 0}, {}, {}))
        try:
            assert matches(saved), f"{what} of step {step} gave other values than were saved"
            assert step in self.steps and saved.listed
            visited[what] += 1
        except CheckpointNotFoundError:
            assert step not in self.steps or saved.damaged
            visited[f"{what}: no such step"] += 1
        except (CorruptCheckpointError, UnsupportedFormatError):
            assert saved.damaged
            visited[f"{what}: damaged"] += 1

    @precondition(lambda self: bool(self.steps))
    @rule(who=WHO, index=INDICES)
    def verify(self, who: int, index: int) -> None:
        self._check(self.trainer(who), self.one_of(sorted(self.steps), index))

    def _check(self, trainer: Trainer, step: int) -> None:
        """Damage is noticed, and nothing else is reported."""
        saved = self.steps[step]
        try:
            intact = trainer.ckpt.verify(step).ok
        except NOTICED:
            intact = False
        assert intact == (not saved.damaged), (step, sorted(saved.damaged))
        visited["verify" if intact else "verify: damaged"] += 1
        self._read("restore", step, lambda saved: same(trainer.ckpt.restore(step), saved.tree))

    # ------------------------------------------------------------------------------ invariants

    def _listed(self) -> list[int]:
        return sorted(step for step, saved in self.steps.items() if saved.listed)

    @invariant()
    def the_steps_are_those_with_a_valid_record(self) -> None:
        for trainer in self.trainers:
            assert trainer.ckpt.latest_step() == max(self._listed(), default=None)
        if self.trainers:
            assert self.trainers[0].ckpt.steps() == self._listed()

    def _leftovers(self) -> list[str]:
        """What dead attempts and deletions have left, beside what was never ours to remove."""
        control = self.root / ".asyncckpt"
        flying = [t.flight.pending for t in self.trainers if t.flight is not None]
        found = [p for p in control.glob("*") if p.name.startswith(("trash-", "old-"))]
        found += [p for p in control.glob("epoch-*/*") if p.suffix != ".owner"]
        return sorted(map(str, found)) if len(found) > len(flying) else []

    def teardown(self) -> None:
        try:
            for trainer in self.trainers:
                if trainer.flight is not None:
                    trainer.release(flight := trainer.flight)
                    flight.pending.cancel()
                    with contextlib.suppress(AsyncCheckpointError):
                        self._committed(trainer, flight.step, flight.saved, flight.pending.result())
                trainer.ckpt.close()
            last = Trainer(self.root, Keep())
            try:
                assert last.ckpt.steps() == self._listed()
                for step in self.steps:
                    self._check(last, step)
            finally:
                last.ckpt.close()
            left = {path.name for path in self.root.glob(".asyncckpt/*")} - {"lock"}
            assert all(name.startswith("aside-") for name in left), left
            assert len(left) == self.aside
        finally:
            shutil.rmtree(self.root)
