"""Many inputs to one decoder: it returns, or says that the input is damaged or not supported."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from tests.fuzz.guard import Guard, TooLongError, guarded
from tests.fuzz.mutate import Mutator, mutate_bytes

MAX_CORPUS = 400
"""Inputs of each kind that mutations start from; accepted ones replace each other."""

MAX_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder under test.

    Attributes:
        name: what people call it.
        seeds: inputs that it accepts.
        decode: puts the input into what surrounds it (lengths, checksums) and decodes that.
        mutate: what changes an input, behind its first `head` bytes.
        head: bytes at the start of an input that say how to surround it.
        hostile: makes inputs that are to take time or memory.
    """

    name: str
    seeds: tuple[bytes, ...]
    decode: Callable[[bytes], object]
    mutate: Mutator = mutate_bytes
    head: int = 0
    hostile: Callable[[], Sequence[bytes]] = tuple

    def mutated(self, data: bytes, random: Random, corpus: list[bytes]) -> bytes:
        """The next input."""
        head, body = data[: self.head], data[self.head :]
        if self.head and random.random() < 0.1:
            head = random.randbytes(self.head)
        return head + self.mutate(body, random, (random.choice(corpus)[self.head :],))


@dataclass(slots=True)
class Outcome:
    """What became of the inputs.

    Attributes:
        inputs: how many there were.
        accepted: those that were decoded.
        corrupt: those refused as damaged.
        unsupported: those refused as not supported.
        paths: how often inputs were refused along each path through the code.
        failures: inputs that led to any other error, or took too long or too much, and how.
        slowest_s: CPU seconds of the input that took longest.
        total_s: seconds for all.
    """

    inputs: int = 0
    accepted: int = 0
    corrupt: int = 0
    unsupported: int = 0
    paths: Counter[tuple[int, ...]] = field(default_factory=Counter)
    failures: list[tuple[bytes, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    total_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.inputs:8} inputs {self.accepted:7} accepted {self.corrupt:8} corrupt "
            f"{self.unsupported:7} unsupported {len(self.paths):4} paths {self.slowest_s:6.3f} s "
            f"slowest {self.total_s:7.1f} s {len(self.failures)} failures"
        )


def fuzz(target: Target, inputs: int, *, seed: int = 0) -> Outcome:
    """Seeds, hostile inputs and mutations, `inputs` in all, were decoded in this process."""
    random = Random(f"{target.name} {seed}")
    good, bad = list(target.seeds), list(target.seeds)
    outcome = Outcome()
    begun = time.perf_counter()
    with guarded() as guard:
        for data in target.seeds:
            target.decode(data)  # a target that refuses its own seeds tests nothing
            _try(target, guard, data, outcome)
        for data in target.hostile():
            _try(target, guard, data, outcome)
        while outcome.inputs < inputs and len(outcome.failures) < MAX_FAILURES:
            # What is refused may be refused elsewhere after another change, but mostly is not.
            corpus = good if random.random() < 0.8 else bad
            data = target.mutated(random.choice(corpus), random, corpus)
            accepted = outcome.accepted
            if _try(target, guard, data, outcome):
                corpus = good if outcome.accepted > accepted else bad
                if len(corpus) < MAX_CORPUS:
                    corpus.append(data)
                else:
                    corpus[len(target.seeds) + int(random.random() * MAX_CORPUS) // 2] = data
        outcome.slowest_s = guard.slowest_s
    outcome.total_s = time.perf_counter() - begun
    return outcome


def _try(target: Target, guard: Guard, data: bytes, outcome: Outcome) -> bool:
    """Whether the input is one to go on from: accepted, or refused along a new path."""
    outcome.inputs += 1
    try:
        guard.call(target.decode, data)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        outcome.corrupt += isinstance(error, CorruptCheckpointError)
        outcome.unsupported += isinstance(error, UnsupportedFormatError)
        path = _path(error.__traceback__)
        outcome.paths[path] += 1
        return outcome.paths[path] == 1
    except (Exception, TooLongError):
        outcome.failures.append((data, traceback.format_exc(limit=-4)))
        return False
    outcome.accepted += 1
    return True


def _path(trace: TracebackType | None) -> tuple[int, ...]:
    """The lines that led to the refusal, which say what was refused better than its text does."""
    lines = []
    while trace is not None:
        lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return tuple(lines)


def keep(target: Target, outcome: Outcome, directory: Path) -> list[Path]:
    """The failures stand in files, each named after its target and content."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for data, _ in outcome.failures:
        path = directory / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        paths.append(path)
    return paths
