"""After each save of a run: the steps that its policy lets go are deleted."""

# Rule 1: the save that called is durable already; whatever goes wrong here is a note in its report,
#   and a policy that fails, or answers with anything but steps, deletes nothing.
# Rule 2: a step is deleted only if its record is still the one that the decision was made on.
# Rule 3: what has no record that this release reads is no step, and is left alone.

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import RECORD_NAME, decode_record
from asyncckpt.options import MAX_RECORD_NBYTES
from asyncckpt.ports import Store
from asyncckpt.retention import Retention, concerns, uses_metrics
from asyncckpt.stages.opened import RECORD_TAIL_NBYTES, is_record

logger = logging.getLogger("asyncckpt")


@dataclass(frozen=True, slots=True)
class Seen:
    """A step as its record described it: the record's checksum, and the metrics in it."""

    seal: bytes
    metrics: Mapping[str, float]


class History:
    """The steps of one run as its policy sees them.

    A record is read when its step is new, was saved anew by this run, or is about to be deleted,
    so that a save costs a few reads however many steps are kept. Other processes' deletions are
    seen at once; that another process replaced a step, when its turn to be deleted comes.
    """

    def __init__(self, policy: Retention, compute: Workers) -> None:
        self._policy = policy
        self._compute = compute
        self._uses_metrics = uses_metrics(policy)
        self._seen: dict[int, Seen] = {}
        self._told: set[str] = set()

    async def retain(
        self, store: Store, candidates: list[int], saved: int, reading: Mapping[str, int]
    ) -> tuple[list[int], list[str]]:
        """The steps that were deleted, and what a person should know.

        Args:
            store: where they are.
            candidates: names in it that may be steps, ascending.
            saved: the step just saved, which stays.
            reading: names that are being read at any time meanwhile, which stay, with their counts.
        """
        deleted: list[int] = []
        steps, notes = await self._decide(store, candidates, saved)
        for step in steps:
            try:
                # Who reads it is asked last: somebody may begin while the record is looked at.
                if not await self._unchanged(store, step) or reading.get(str(step)):
                    continue
                await store.delete(str(step))
                deleted.append(step)
                del self._seen[step]
            except CheckpointNotFoundError:
                continue
            except AsyncCheckpointError as error:
                # Tried again after the next save.
                notes.append(f"step {step} could not be deleted: {error}")
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                logger.warning("%s", note)
        return deleted, notes

    async def _decide(
        self, store: Store, candidates: list[int], saved: int
    ) -> tuple[list[int], list[str]]:
        self._seen.pop(saved, None)
        seen: dict[int, Seen] = {}
        for step in candidates:
            found = self._seen.get(step) or await self._read(store, step)
            if found is not None:
                seen[step] = found
        self._seen = seen
        steps = list(seen)
        metrics = {step: found.metrics for step, found in seen.items()}
        try:
            kept = _steps(self._policy.keep(tuple(steps), metrics))
            notes = concerns(self._policy, steps, metrics)
        except Exception as error:
            name = _name(self._policy)
            logger.exception("the retention policy %s failed", name)
            return [], [f"no step was deleted, because {name} failed: {error!r}"]
        return [step for step in steps if step not in kept and step != saved], notes

    async def _unchanged(self, store: Store, step: int) -> bool:
        found = await self._read(store, step)
        if found is None:
            del self._seen[step]
            return False
        unchanged = found.seal == self._seen[step].seal
        self._seen[step] = found
        return unchanged

    async def _read(self, store: Store, step: int) -> Seen | None:
        files = store.files(str(step))
        try:
            data = await files.read(RECORD_NAME, max_nbytes=MAX_RECORD_NBYTES)
            if not is_record(data):
                return None
            metrics: Mapping[str, float] = {}
            if self._uses_metrics:
                record = await self._compute.run(decode_record, data, location=files.location)
                metrics = record.metrics
            return Seen(data[-RECORD_TAIL_NBYTES:], metrics)
        except (CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
            return None
        finally:
            await files.close()


def _steps(answer: Any) -> set[int]:
    """The steps that a policy named, in a container of any kind or one by one.

    Raises:
        TypeError: these are no steps (None, text, a mask), so that nobody knows what is to stay.
    """
    if not isinstance(answer, Iterable):
        raise TypeError(f"keep() returned {answer!r:.80}, not the steps to keep")
    steps = list(answer)
    for step in steps:
        if not isinstance(step, Integral) or isinstance(step, bool):
            raise TypeError(f"keep() returned {step!r:.80} among the steps to keep")
    return set(map(int, steps))


def _name(policy: Retention) -> str:
    """What the policy calls itself, if it can."""
    try:
        return repr(policy)
    except Exception:
        return type(policy).__name__
