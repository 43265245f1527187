"""A process of JAX or torch dies at any stage of a save: all others learn of it, as promised.

jaxlib ends the others within milliseconds if process 0 dies, which serves the keys; of torch's they
live on. `runtimes.py` says how the processes are made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.faults import REPOSITORY, ForkServer
from tests.crash.runtimes import BATCH, COMMITTED, IMPORTS, OWN, Visit
from tests.ports import free_port

WIDTH = 8
"""Jobs at a time: most of them wait until a process is silent."""

LIMIT_S = 40.0
"""How long survivors may take. They wait for `silence_s`, then as long again for the record of
process 0, or for `arrival_s`; the rest is for a machine that is busy."""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    """A fork server that has imported both runtimes."""
    with ForkServer(IMPORTS) as running:
        yield running


def wrong_end(visit: Visit, end: Any) -> str:
    """Say what is wrong with how the survivor ended, if anything."""
    committed = visit.stage in COMMITTED
    if visit.victim == 0 and visit.kind != "torch":
        # jaxlib has ended it, or is about to. Only what it says must be true.
        return "" if end is None or committed or end["failure"] else "a success that was none"
    if end is None or "failure" not in end:
        return f"no end: {end}"
    if end["took_s"] > LIMIT_S:
        return "too late"
    if committed or end["failure"] is None:
        return "" if committed and end["failure"] is None else str(end)
    kind, text = end["failure"]
    if visit.victim == 0 and visit.stage in ("decision", "record"):
        return "" if kind == "SaveOutcomeUnknownError" else f"{kind}: {text}"
    # The other one may have written its part before process 0 died, wherever that was.
    told = f"process {visit.victim} " in text or (
        visit.victim == 0 and kind == "SaveOutcomeUnknownError"
    )
    return "" if told else f"{kind}: {text}"


@pytest.mark.parametrize("kind", ["jax", "recoverable", "torch"])
def test_a_death_at_any_stage_is_told_and_leaves_the_old_step_or_the_new_one(
    forks: ForkServer, tmp_path: Path, kind: str
) -> None:
    visits = [Visit(kind, victim, stage) for victim, stages in OWN.items() for stage in stages]
    args = {"root": str(tmp_path), "visits": visits, "width": WIDTH}
    outcome = forks.run(BATCH, args, arm=False, timeout_s=250.0)
    assert outcome.exit_status == 0, outcome.describe()
    wrong = []
    for found in outcome.result:
        visit = Visit(*found["visit"])
        survivor = 1 - visit.victim
        assert found["ends"][visit.victim] is None, (visit, found["ends"])
        if text := wrong_end(visit, found["ends"][survivor]):
            wrong.append((visit, text))
        if found["hung"]:
            wrong.append((visit, f"hung: {found['hung']}"))
        steps = [1, 2] if visit.stage in COMMITTED else [1]
        if found["again"] != {"steps": steps, "wrong": [], "left": []}:
            wrong.append((visit, f"afterwards: {found['again']}"))
    assert wrong == []


def test_a_job_that_torchrun_restarts_believes_no_key_of_its_first_life(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*command, str(REPOSITORY / "tests/crash/elastic.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lives = [
        [json.loads((tmp_path / f"{life}-{rank}.json").read_text()) for rank in range(2)]
        for life in range(2)
    ]
    assert [found["latest"] for found in (*lives[0], *lives[1])] == [None, None, 1, 1]
    for found in lives[1]:
        assert found["kept"], "the keys of the first life are gone, and this proves nothing"
        assert found["same_place"]
        assert found["restored"] == [1.0, 7]
        assert found["steps"] == [1, 2]
    runs = [{found["run"] for found in life} for life in lives]
    assert len(runs[0]) == len(runs[1]) == 1
    assert runs[0] != runs[1]
