"""`ls` and `gc` know claims and epochs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from asyncckpt import FencedError, StoreError, blocking
from asyncckpt.cli import main
from asyncckpt.stores.local.store import LocalStore

TREE = {"w": np.zeros(3)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that was taken over, with leftovers of the first job."""
    place = tmp_path / "run"
    with blocking.Checkpointer(place) as run:
        run.save(1, TREE)
    with blocking.Checkpointer(place, takeover=True) as run:
        run.save(2, TREE)
        with blocking.Checkpointer(place, takeover=True) as later:
            later.save(3, TREE)
            with pytest.raises(FencedError):
                run.save(4, TREE)
    return place


def test_ls_shows_epochs_and_who_has_claimed_the_run(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert main(["ls", str(root)]) == 0
    head, first, second, third, _, claim = capsys.readouterr().out.splitlines()
    place = slice(head.index("epoch"), head.index("epoch") + 5)
    assert [line[place].strip() for line in (first, second, third)] == ["0", "1", "2"]
    assert re.fullmatch(
        rf"claim 2: process {os.getpid()} on \S+ at [\d :-]+ UTC by its clock", claim
    )
    assert main(["ls", str(root), "--json"]) == 0
    assert [step["epoch"] for step in json.loads(capsys.readouterr().out)] == [0, 1, 2]


def test_ls_shows_the_steps_even_if_the_claims_cannot_be_read(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(store: LocalStore) -> None:
        raise StoreError("the claims cannot be read")

    monkeypatch.setattr(LocalStore, "claims", fail)
    assert main(["ls", str(root)]) == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 4
    assert "the claims cannot be read" in shown.err


def test_ls_says_nothing_of_claims_where_nobody_made_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with blocking.Checkpointer(tmp_path) as run:
        run.save(1, TREE)
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "epoch" not in out and "claim" not in out


def test_gc_removes_what_was_taken_from_a_job_and_leaves_claims(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    control = root / ".asyncckpt"
    taken = control / "fenced-1-00000000" / "4-left"
    taken.mkdir(parents=True)
    (taken / "data").write_bytes(b"x" * 100)
    for path in (taken / "data", taken):
        os.utime(path, (1e9, 1e9))
    before = sorted(name for name in os.listdir(control) if not name.startswith("fenced"))
    assert main(["gc", str(root), "--dry-run"]) == 0
    assert "fenced-1-00000000/4-left" in capsys.readouterr().out
    assert main(["gc", str(root), "--yes"]) == 0
    assert not taken.exists()
    left = sorted(name for name in os.listdir(control) if not name.startswith("fenced"))
    assert {*left} - {"lock"} == {*before} - {"lock"} == {"claim-1", "claim-2", "epoch-2"}
    with blocking.Checkpointer(root) as run:
        assert run.steps() == [1, 2, 3]
