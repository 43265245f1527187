"""Locations on the command line: links in paths, and directories that the user may not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncckpt import blocking
from tests.cli.ran import Run, closed, without_rights


def test_rm_removes_the_step_to_which_a_link_leads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "other" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to("../other/sub")
    for place in ("here", "other"):
        with blocking.Checkpointer(tmp_path / place / "run") as steps:
            steps.save(3, {"place": place})
    monkeypatch.chdir(tmp_path / "here")
    assert run("rm", "--yes", "link/../run/3").status == 0
    assert (tmp_path / "here" / "run" / "3").exists()
    assert not (tmp_path / "other" / "run" / "3").exists()


def test_rm_of_an_empty_path_removes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocking.Checkpointer(tmp_path) as steps:
        steps.save(3, {"a": 1})
    monkeypatch.chdir(tmp_path / "3")
    done = run("rm", "--yes", "")
    assert (done.status, done.out) == (2, "") and "pass the path of a directory" in done.err
    assert (tmp_path / "3" / "checkpoint.json").exists()


def test_a_step_that_the_user_may_not_enter_does_not_hide_the_others(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path) as steps:
        for step in (1, 2, 3):
            steps.save(step, {"step": step})
    with closed(tmp_path / "2"):
        shown = without_rights("show", tmp_path, "--json")
        listed = without_rights("ls", tmp_path, "--json")
        verified = without_rights("verify", tmp_path, "--json")
    assert (shown.status, shown.err, json.loads(shown.out)["step"]) == (0, "", 3)
    for done in (listed, verified):
        assert done.status == 1
        assert done.err.startswith(f"asyncckpt: {tmp_path}/2") and done.err.count("\n") == 1
        assert "Permission denied (EACCES)" in done.err
    for entries in (json.loads(listed.out), json.loads(verified.out)["checkpoints"]):
        assert [entry["step"] for entry in entries] == [1, 3]


def test_links_to_where_the_user_may_not_go_do_not_hide_the_steps(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "closed"
    for root in (run, other):
        with blocking.Checkpointer(root) as steps:
            for step in (1, 3):
                steps.save(step, {"step": step})
    (run / "best").symlink_to(other / "1")
    (run / "2").symlink_to(other / "1")
    with closed(other):
        shown = without_rights("show", run, "--json")
        listed = without_rights("ls", run, "--json")
    assert (shown.status, shown.err, json.loads(shown.out)["step"]) == (0, "", 3)
    assert listed.status == 1 and [entry["step"] for entry in json.loads(listed.out)] == [1, 3]
    assert listed.err.startswith(f"asyncckpt: {run}/2") and listed.err.count("\n") == 1


def test_a_directory_that_the_user_may_not_enter_is_not_said_to_be_missing(tmp_path: Path) -> None:
    root = tmp_path / "closed" / "run"
    with blocking.Checkpointer(root) as steps:
        steps.save(3, {"step": 3})
    with closed(root.parent):
        for command in ("ls", "show", "verify", "gc", "rm"):
            location = root / "3" if command == "rm" else root
            done = without_rights(command, location)
            assert (done.status, done.out) == (1, "")
            assert done.err.startswith(f"asyncckpt: {location}") and done.err.count("\n") == 1
            assert "Permission denied (EACCES)" in done.err
