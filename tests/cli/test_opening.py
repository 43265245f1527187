"""Locations on the command line: links in paths, and directories that the user may not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt import blocking
from tests.cli.ran import Run


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
