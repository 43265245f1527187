"""`asyncckpt verify` on a run whose steps come and go meanwhile."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import blocking
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.format.record import seal
from tests.cli.ran import Run, closed, without_rights

Act = Callable[[], object]


@pytest.fixture(params=["directory", "url"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run with the steps 1, 3 and 20."""
    place = str(tmp_path) if request.param == "directory" else f"memory://{uuid.uuid4().hex}/run"
    with blocking.Checkpointer(place) as steps:
        for step in (1, 3, 20):
            steps.save(step, {"w": np.arange(1000.0) + step})
    return place


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Act]]:
    """Actions that run once, just before the verification of a step."""
    acts: dict[int, Act] = {}
    verify = blocking.Checkpointer.verify

    def verified(self: blocking.Checkpointer, step: int, **arguments: Any) -> Any:
        acts.pop(step, lambda: None)()
        return verify(self, step, **arguments)

    monkeypatch.setattr(blocking.Checkpointer, "verify", verified)
    yield acts
    assert not acts


def delete(root: str, *steps: int) -> None:
    with blocking.Checkpointer(root) as ckpt:
        for step in steps:
            ckpt.delete(step)


def test_a_step_deleted_meanwhile_is_skipped_with_a_note(
    run: Run, root: str, before: dict[int, Act]
) -> None:
    before[3] = lambda: delete(root, 3)
    done = run("verify", root, "--json")
    assert done.status == 0
    found = json.loads(done.out)
    assert found["ok"] and [one["step"] for one in found["checkpoints"]] == [1, 20]
    assert done.err == (f"asyncckpt: {root}/3: deleted since the steps were listed; skipped\n")


def test_damage_of_the_others_is_still_found(run: Run, tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as steps:
        for step in (1, 2):
            steps.save(step, {"w": np.arange(1000.0) + step})
    (tmp_path / "2" / "checkpoint.json").write_bytes(b"{}")
    done = run("verify", tmp_path)
    assert done.status == 1 and done.err == ""
    assert "intact" in done.out.splitlines()[0] and "checkpoint.json" in done.out


def test_steps_of_a_newer_release_are_named_after_the_others(run: Run, tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as steps:
        for step in (1, 2, 3):
            steps.save(step, {"w": np.arange(1000.0) + step})
    record = tmp_path / "1" / "checkpoint.json"
    text, _ = record.read_text().replace('"version":2', '"version":3', 1).rsplit(',"crc32c":', 1)
    record.write_bytes(seal(text + "}"))
    for path, intact in ((tmp_path, ["2", "3"]), (tmp_path / "1", [])):
        done = run("verify", path)
        assert done.status == 2
        assert [line.split(":")[0] for line in done.out.splitlines()] == [
            str(tmp_path / step) for step in intact
        ]
        assert done.err.startswith(f"asyncckpt: {tmp_path}/1: the commit record has version 3, ")
    found = json.loads(run("verify", tmp_path, "--json").out)
    assert not found["ok"] and [one["step"] for one in found["checkpoints"]] == [2, 3]
    (tmp_path / "2" / "checkpoint.json").write_bytes(b"{}")
    done = run("verify", tmp_path)
    assert done.status == 1 and "version 3" in done.err


def test_damage_of_the_others_is_found_though_a_later_step_cannot_be_read(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as steps:
        for step in (1, 2, 3):
            steps.save(step, {"w": np.arange(300_000.0) + step})
    data = next((tmp_path / "1" / "default" / "d").glob("*-0"))
    data.write_bytes(b"X" + data.read_bytes()[1:])
    with closed(tmp_path / "2" / "default"):
        done = without_rights("verify", tmp_path)
        found = json.loads(without_rights("verify", tmp_path, "--json").out)
    assert done.status == 1
    first, last, *_ = done.out.splitlines()
    assert first == f"{tmp_path}/1: damaged in 1 place"
    assert last.startswith(f"{tmp_path}/3: 1 leaf") and last.endswith("intact")
    assert done.err.startswith(f"asyncckpt: {tmp_path}/2/") and done.err.count("\n") == 1
    assert "Permission denied (EACCES)" in done.err
    assert not found["ok"] and [one["step"] for one in found["checkpoints"]] == [1, 3]


def test_when_all_steps_go_nothing_was_verified(
    run: Run, root: str, before: dict[int, Act]
) -> None:
    before[1] = lambda: delete(root, 1, 3, 20)
    done = run("verify", root)
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[-1] == (
        f"asyncckpt: {root}: all steps were deleted during the verification"
    )


def test_a_step_that_is_named_and_gone_is_an_error(
    run: Run, root: str, before: dict[int, Act]
) -> None:
    before[3] = lambda: delete(root, 3)
    done = run("verify", f"{root}/3")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(f"asyncckpt: {root}/3")


def test_a_step_replaced_meanwhile_is_verified_again(
    run: Run, root: str, before: dict[int, Act]
) -> None:
    def replaced() -> None:
        raise CheckpointNotFoundError("the checkpoint was replaced while being verified")

    before[3] = replaced
    done = run("verify", root)
    assert (done.status, done.err) == (0, "")
    assert [line.partition(": ")[0] for line in done.out.splitlines()] == [
        f"{root}/{step}" for step in (1, 3, 20)
    ]


def test_a_step_that_is_there_and_no_checkpoint_is_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "notes.txt").write_text("nothing")
    done = run("verify", tmp_path)
    assert done.status == 1
    assert "there is no checkpoint here" in done.err


def test_a_directory_without_checkpoint_does_not_hide_the_other_steps(
    run: Run, tmp_path: Path
) -> None:
    blocking.save(tmp_path / "saved", {"w": np.arange(3.0)})
    (tmp_path / "run" / "1").mkdir(parents=True)
    blocking.convert(tmp_path / "saved", tmp_path / "run" / "1" / "model.safetensors")
    (tmp_path / "run" / "7").mkdir()
    done = run("verify", tmp_path / "run")
    assert done.status == 1 and done.out.startswith(f"{tmp_path}/run/1: 1 leaf")
    assert done.err.startswith(f"asyncckpt: {tmp_path}/run/7: ") and done.err.count("\n") == 1


def test_a_directory_that_only_looks_like_a_step_of_orbax_is_not_damaged(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "etc" / "default").mkdir(parents=True)  # the name of an item of Orbax
    (tmp_path / "etc" / "java" / "security" / "policy" / "limited").mkdir(parents=True)
    done = run("verify", tmp_path / "etc")
    assert (done.status, done.out) == (1, "")
    assert f"{tmp_path}/etc: this is not a checkpoint: no tree was found in 'java/" in done.err
