"""Any sequence of saves, restores, deletions, crashes and damage, against a dict.

Two trainers may work on one root. The invariant: a step is listed if and only if its record is
valid; what is listed and undamaged restores to exactly what was saved, whoever asks; what is
damaged is noticed; an acknowledged save is lost only to deletions that the model knows of too.
"""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    SaveAbortedError,
    StoreError,
)
from tests.properties.model import DAMAGES, KEEPS, METRICS, STEPS, Keep, Metrics, Saved
from tests.properties.roots import HOW_TO_READ, Root, visited
from tests.properties.trainers import Trainer

SEEDS = st.integers(1, 50)
WHO = st.integers(0, 1)
INDICES = st.integers(0, 7)


class CheckpointMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Root()

    @initialize(keep=KEEPS)
    def first_trainer(self, keep: Keep) -> None:
        self.root.trainers.append(Trainer(self.root.path, keep))
        self.save(who=0, step=3, seed=1, metrics={"loss": 1.0}, overwrite=False, packed=False)

    @rule(who=WHO, keep=KEEPS)
    def second_trainer_comes_or_goes(self, who: int, keep: Keep) -> None:
        if len(self.root.trainers) == 1:
            self.root.trainers.append(Trainer(self.root.path, keep))
            visited["second trainer"] += 1
        else:
            trainer = self.root.idle(who)
            trainer.end()
            self.root.trainers.remove(trainer)
            visited["trainer ends"] += 1

    # ---------------------------------------------------------------------------------- saves

    @rule(
        who=WHO,
        step=STEPS,
        seed=SEEDS,
        metrics=METRICS,
        overwrite=st.booleans(),
        packed=st.booleans(),
    )
    def save(
        self, who: int, step: int, seed: int, metrics: Metrics, overwrite: bool, packed: bool
    ) -> None:
        trainer = self.root.idle(who)
        saved = Saved.of(seed, metrics)
        taken = self.root.taken(step, overwrite)
        try:
            report = trainer.save(step, saved, overwrite, packed)
        except CheckpointExistsError:
            assert taken
            visited["save: the step exists"] += 1
        else:
            assert not taken
            self.root.committed(trainer, step, saved, report)
            visited["overwrite" if overwrite else "save"] += 1

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
        held = self.root.one_of(["create", "publish", "write", "seal", "publish", "put"], index)
        trainer = self.root.idle(who)
        overwrite |= self.root.taken(step, overwrite)
        trainer.start(step, seed, metrics, overwrite, held)
        visited["start_save"] += 1

    @precondition(lambda self: self.root.flying())
    @rule(index=INDICES)
    def flight_ends(self, index: int) -> None:
        how = self.root.one_of(["wait", "cancel", "crash"], index)
        trainer, flight = self.root.flying()[0]
        taken = self.root.taken(flight.step, flight.overwrite)
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
            self.root.committed(trainer, flight.step, flight.saved, report)
            visited["wait" if how == "wait" else "cancel: too late"] += 1
        self.root.replace_if_dead(trainer)

    # ------------------------------------------------------------------------------- deletions

    @rule(who=WHO, index=INDICES)
    def remove(self, who: int, index: int) -> None:
        if self.root.one_of([True, False], index):
            self._delete(who, self.root.pick(index))
        else:
            self._delete_after(who, self.root.pick(index))

    def _delete(self, who: int, step: int) -> None:
        trainer = self.root.trainer(who)
        # It would wait for a save of the same step, which ends when it is told to.
        assume(trainer.flight is None or trainer.flight.step != step)
        found = step in self.root.steps and not self.root.steps[step].record_is_gone
        try:
            trainer.ckpt.delete(step)
        except CheckpointNotFoundError:
            assert not found
            visited["delete: no such step"] += 1
        else:
            assert found
            self.root.gone([step])
            visited["delete"] += 1

    def _delete_after(self, who: int, step: int) -> None:
        above = [number for number in self.root.listed() if number > step]
        assert self.root.idle(who).ckpt.delete_after(step) == above
        self.root.gone(above)
        visited["delete_after"] += 1

    # -------------------------------------------------------------------- crashes and failures

    @rule(
        who=WHO,
        index=INDICES,
        seed=SEEDS,
        metrics=METRICS,
        overwrite=st.booleans(),
        at=st.integers(1, 34),
        after=st.booleans(),
    )
    def crash(
        self,
        who: int,
        index: int,
        seed: int,
        metrics: Metrics,
        overwrite: bool,
        at: int,
        after: bool,
    ) -> None:
        trainer, step = self.root.idle(who), self.root.pick(index)
        if self.root.one_of([True, True, True, False], index):
            self._crash_in_save(trainer, step, Saved.of(seed, metrics), overwrite, at, after)
        else:
            self._crash_in_delete_after(trainer, step, 1 + at % 12, after)
        self.root.replace_if_dead(trainer)

    def _crash_in_save(
        self, trainer: Trainer, step: int, saved: Saved, overwrite: bool, at: int, after: bool
    ) -> None:
        taken = self.root.taken(step, overwrite)
        with trainer.dying(at, after) as did:
            trainer.save(step, saved, overwrite)
        published = bool(did("publish"))
        if published:
            assert not taken
            self.root.published(step, saved)
            expected = trainer.deletes(self.root.steps, step)
            deleted = [int(name) for name in did("unlist")]
            assert deleted == expected[: len(deleted)]
            self.root.gone(deleted)
        if trainer.store.down:
            visited["crash in save" + (", committed" if published else "")] += 1

    def _crash_in_delete_after(self, trainer: Trainer, step: int, at: int, after: bool) -> None:
        above = [number for number in reversed(self.root.listed()) if number > step]
        with trainer.dying(at, after) as did:
            trainer.ckpt.delete_after(step)
        deleted = [int(name) for name in did("unlist")]
        assert deleted == above[: len(deleted)]
        self.root.gone(deleted)
        if trainer.store.down:
            visited["crash in delete_after"] += 1

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
        trainer = self.root.idle(who)
        # With retention, failures behind the commit are notes: tests/session/test_pruning.py.
        assume(trainer.keep == Keep())
        overwrite |= self.root.taken(step, overwrite)
        saved = Saved.of(seed, metrics)
        published = len(trainer.store.did("publish"))
        trainer.store.fail(at=at, error=StoreError("the disk is on fire"))
        try:
            report = trainer.save(step, saved, overwrite)
        except StoreError as error:
            assert str(error) == "the disk is on fire"
            assert len(trainer.store.did("publish")) == published
            visited["failing save"] += 1
        else:
            self.root.committed(trainer, step, saved, report)
        trainer.store.live()

    # ------------------------------------------------------------------------ damage and reading

    @precondition(lambda self: any(len(saved.damaged) < 2 for saved in self.root.steps.values()))
    @rule(index=INDICES, at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def corrupt(self, index: int, at: float, bit: int) -> None:
        root = self.root
        step = root.one_of([n for n, saved in root.steps.items() if len(saved.damaged) < 2], index)
        directory = root.path / str(step)
        files = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
        path = root.one_of([f for f in files if f not in root.steps[step].damaged], index)
        kind = root.one_of(DAMAGES, index)
        root.corrupt(step, path, kind, (at + 0.618 * root.turn) % 1, bit)
        visited[f"corrupt: {kind}"] += 1

    @precondition(lambda self: any(saved.damaged for saved in self.root.steps.values()))
    @rule(index=INDICES)
    def heal(self, index: int) -> None:
        sick = [step for step, saved in self.root.steps.items() if saved.damaged]
        self.root.heal(self.root.one_of(sick, index))
        visited["heal"] += 1

    @rule(who=WHO, index=INDICES)
    def read(self, who: int, index: int) -> None:
        how = self.root.one_of(HOW_TO_READ, index)
        self.root.read(self.root.trainer(who).ckpt, how, self.root.pick(index))

    @precondition(lambda self: self.root.steps)
    @rule(who=WHO, index=INDICES)
    def verify(self, who: int, index: int) -> None:
        step = self.root.one_of(sorted(self.root.steps), index)
        self.root.check(self.root.trainer(who), step)

    @invariant()
    def the_steps_are_those_with_a_valid_record(self) -> None:
        self.root.check_listing()

    def teardown(self) -> None:
        while self.root.flying():
            self.flight_ends(index=0)
        self.root.end()
