"""Bad input and deaths on one process: all others say which one, and the next save works."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.errors import (
    AsyncCheckpointError,
    MismatchError,
    ShapeMismatchError,
    UnsupportedLeafError,
)
from tests.processes import failure_cases as cases
from tests.processes import numpy_cases
from tests.processes.fixtures import Pools
from tests.processes.pool import Pool, ProcessDiedError
from tests.processes.values import differing

COUNT = 4


@pytest.fixture(scope="module")
def pool(pools: Pools) -> Pool:
    return pools("numpy", COUNT)


def left(root: Path) -> list[Path]:
    """Files of unfinished attempts."""
    control = root / ".asyncckpt"
    kept = ("lock", "claim-", "error-")
    files = (path for path in control.rglob("*") if path.is_file())
    return [path for path in files if not path.name.startswith(kept)]


async def works(pool: Pool, root: Path) -> None:
    """All save step 5, after which nothing is left of earlier attempts."""
    pool.all(numpy_cases.save, str(root), COUNT, 5)
    tree = await asyncckpt.restore(root / "5")
    assert differing(tree, numpy_cases.whole_state(5)) == []
    assert left(root) == []


SPOILED: list[tuple[str, int, str, type[AsyncCheckpointError], str]] = [
    ("another leaf", 0, "same", MismatchError, "more"),
    ("another leaf", 3, "same", MismatchError, "more"),
    ("another shape", 3, "union", ShapeMismatchError, "table"),
    ("another replica", 1, "union", MismatchError, "table"),
    ("another small replica", 0, "same", MismatchError, "small"),
    ("another scalar", 2, "union", MismatchError, "step"),
    ("not supported", 0, "union", UnsupportedLeafError, "odd"),
    ("not supported", 3, "union", UnsupportedLeafError, "odd"),
    ("a gap", 2, "union", MismatchError, "columns"),
]


@pytest.mark.parametrize(("kind", "process", "tree", "error", "leaf"), SPOILED)
async def test_bad_input_on_one_process_fails_on_all_by_name(
    pool: Pool,
    tmp_path: Path,
    kind: str,
    process: int,
    tree: str,
    error: type[AsyncCheckpointError],
    leaf: str,
) -> None:
    outcomes = pool.outcomes(cases.save_spoiled, str(tmp_path), kind, process, tree)
    for index, outcome in enumerate(outcomes):
        assert isinstance(outcome, error), outcome
        assert leaf in str(outcome)
        assert index == process or re.search(r"process(es)? \d", str(outcome)), outcome
    assert left(tmp_path) == []
    assert not (tmp_path / "1").exists()
    await works(pool, tmp_path)


async def test_a_save_on_one_process_alone_says_how_to_do_it(pool: Pool, tmp_path: Path) -> None:
    begun = time.monotonic()
    first, *others = pool.outcomes(cases.save_on_one, str(tmp_path))
    assert time.monotonic() - begun < 12
    assert isinstance(first, AsyncCheckpointError), first
    assert 'coordinator="single"' in str(first)
    assert others == [None] * 3, others
    assert left(tmp_path) == []
    await works(pool, tmp_path)


# ---------------------------------------------------------------------------------------- deaths

DEATHS = [
    ("call", 2),
    pytest.param("write", 3, marks=pytest.mark.long),
    ("settle", 1),
    ("publish", 0),
    pytest.param("outcome", 0, marks=pytest.mark.long),
]


@pytest.fixture
def doomed(pools: Pools) -> Iterator[Pool]:
    made = pools.new("numpy", COUNT)
    yield made
    made.close()


@pytest.mark.parametrize(("stage", "process"), DEATHS)
async def test_survivors_of_a_dead_process_name_it(
    doomed: Pool, pool: Pool, tmp_path: Path, stage: str, process: int
) -> None:
    root = str(tmp_path)
    doomed.all(cases.open_and_save, root)
    doomed.run(process, cases.die_at, stage)
    begun = time.monotonic()
    outcomes = doomed.outcomes(cases.save_again, timeout_s=30)
    taken_s = time.monotonic() - begun
    survivors = [outcome for index, outcome in enumerate(outcomes) if index != process]
    assert isinstance(outcomes[process], ProcessDiedError)
    committed = stage == "outcome"
    for outcome in survivors:
        if committed:
            assert outcome is None, outcome
            continue
        assert isinstance(outcome, AsyncCheckpointError), outcome
        assert f"process {process} " in str(outcome), outcome
    assert taken_s < cases.SILENCE_S + 8, taken_s
    doomed.close()
    # The next launch finds the old step, and the new one only where it was committed.
    assert (tmp_path / "2").exists() == committed
    assert (await asyncckpt.verify(tmp_path / "1")).ok
    await works(pool, tmp_path)
