"""One trainer on a root: its `Checkpointer`, and what its retention has seen of the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncckpt import RestoreOptions, SaveOptions, SaveReport, blocking
from asyncckpt.errors import AsyncCheckpointError, CheckpointExistsError
from asyncckpt.testing.faults import Fault, Gate
from tests.properties.crashes import CrashStore
from tests.properties.model import Keep, Metrics, Saved, scribble, tree

OPTIONS = {
    False: SaveOptions(chunk_nbytes=4096),
    True: SaveOptions(chunk_nbytes=4096, compression="zstd"),
}
SHARED = SaveOptions(host_memory_nbytes=64 << 20)
# A restore that hangs ends with an error that is not expected.
DEADLINE = RestoreOptions(deadline_s=60.0)

Did = Callable[[str], list[str]]
"""Kind of operation -> the subjects of those that took effect."""


@dataclass(eq=False)
class Flight:
    """A save that is held at one of its operations."""

    pending: blocking.PendingSave
    gate: Gate
    step: int
    saved: Saved
    overwrite: bool


class Trainer:
    """See the module."""

    def __init__(self, root: Path, keep: Keep) -> None:
        self.keep = keep
        self.flight: Flight | None = None
        self.ckpt = blocking.Checkpointer(
            root, keep=keep.policy(), save_options=SHARED, restore_options=DEADLINE
        )
        self.store = CrashStore(self.ckpt._session.root.store)  # type: ignore[arg-type]
        self.ckpt._session.root.store = self.store
        self.ckpt.__enter__()
        self._known: dict[int, Saved] = {}
        self._there: set[int] | None = None  # those of this run, and those it found
        self._left: list[int] = []  # those from before it went back

    def save(self, step: int, saved: Saved, overwrite: bool, packed: bool = False) -> SaveReport:
        try:
            return self.ckpt.save(
                step,
                saved.tree,
                metrics=saved.metrics,
                metadata=saved.metadata,
                overwrite=overwrite,
                options=OPTIONS[packed],
            )
        finally:
            # Bytes of deleted steps go in the background: the same operations in every run.
            self.ckpt.wait()

    def start(self, step: int, seed: int, metrics: Metrics, overwrite: bool, held: str) -> None:
        """A save is in flight, held at its first operation of a kind; what it took has changed."""
        gate = Gate()
        self.store.script.append(Fault(held, self.store.counts[held] + 1, gate=gate))
        saved, taken = Saved.of(seed, metrics), tree(seed)
        pending = self.ckpt.start_save(
            step,
            taken,
            metrics=metrics,
            metadata=saved.metadata,
            overwrite=overwrite,
            options=OPTIONS[False],
        )
        scribble(taken)
        self.ckpt._session.call(gate.reached.wait).result()
        self.flight = Flight(pending, gate, step, saved, overwrite)

    def release(self, flight: Flight) -> None:
        """The held operation goes on."""
        self.ckpt._session.runtime.engine.post(flight.gate.release.set)
        self.flight = None

    @contextlib.contextmanager
    def dying(self, at: int, after: bool) -> Iterator[Did]:
        """The process may die at an operation in the block; gives what it did there."""
        begin = len(self.store.applied)

        def did(kind: str) -> list[str]:
            return [op.subject for op in self.store.applied[begin:] if op.kind == kind]

        self.store.die(at=at, after=after)
        try:
            yield did
        except AsyncCheckpointError as error:
            assert self.store.down or isinstance(error, CheckpointExistsError)
        self.store.live()

    def end(self) -> None:
        """The process has ended; if it had died, as the kernel ends it."""
        self.ckpt.close()
        if self.store.down:
            self.store.bury()

    def deletes(self, steps: Mapping[int, Saved], saved: int) -> list[int]:
        """The steps that its retention deletes after a save, by what it has seen of them.

        A step counts as it was seen first. It goes only if it is still the same.
        """
        self._known.pop(saved, None)
        if self.keep == Keep():
            return []
        seen = {
            step: self._known.get(step, entry)
            for step, entry in sorted(steps.items())
            if step in self._known or entry.listed
        }
        there = set(seen) if self._there is None else self._there & set(steps)
        # What has appeared above the step saved is another writer's, and does not count.
        others = {step for step in seen if step > saved and step not in there}
        self._left = [step for step in self._left if step in there and step != saved]
        since = {step for step in there if step != saved and step not in self._left}
        if any(step > saved for step in since):  # it goes back
            self._left += sorted(since)
        self._there = {step for step in {*there, *seen} if step not in others}
        mine = [step for step in seen if step not in others and step not in self._left]
        view = {step: seen[step] for step in [*self._left, *mine] if step in seen}
        self._known = dict(seen)
        deleted = []
        for step in set(view) - self.keep.kept(view) - {saved}:
            del self._known[step]
            if steps[step] is view[step] and steps[step].listed:
                deleted.append(step)
            else:
                self._there.discard(step)
                if steps[step].listed:  # another one than it had seen
                    self._known[step] = steps[step]
        return sorted(deleted)
