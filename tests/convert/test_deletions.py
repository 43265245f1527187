"""A source that is deleted or replaced while it is converted or compared is not called damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import CheckpointNotFoundError, CorruptCheckpointError, blocking
from asyncckpt.stores.local.files import LocalFiles
from tests.convert.trees import numbers

CALLS: dict[str, Callable[[Path], Any]] = {
    "convert": lambda root: blocking.convert(root / "run" / "1", root / "out"),
    "compare": lambda root: blocking.diff(root / "run" / "1", root / "other"),
}


def before_reading_data(patch: pytest.MonkeyPatch, path: Path, action: Callable[[], None]) -> None:
    """Call the action once, before data of the checkpoint are read."""
    read, actions = LocalFiles._read_into, [action]

    def acting(self: LocalFiles, name: str, *more: Any) -> None:
        if actions and self.location == str(path) and name.endswith("-0"):
            actions.pop()()
        read(self, name, *more)

    patch.setattr(LocalFiles, "_read_into", acting)


@pytest.mark.parametrize("what", ["deleted", "replaced"])
@pytest.mark.parametrize("verb", list(CALLS))
def test_a_source_that_goes_away_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, what: str
) -> None:
    tree, step = {"w": numbers(5000)}, tmp_path / "run" / "1"
    for path in (step, tmp_path / "other"):
        blocking.save(path, tree)

    def action() -> None:
        shutil.rmtree(step)
        if what == "replaced":
            blocking.save(step, tree)

    before_reading_data(monkeypatch, step, action)
    again = f"{verb} another step" if what == "deleted" else f"{verb} it again"
    with pytest.raises(CheckpointNotFoundError, match=rf"was {what} while .*; {again}$") as caught:
        CALLS[verb](tmp_path)
    assert caught.value.location == str(step)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", list(CALLS))
def test_a_source_that_lacks_a_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    tree, step = {"w": numbers(5000)}, tmp_path / "run" / "1"
    for path in (step, tmp_path / "other"):
        blocking.save(path, tree)
    before_reading_data(monkeypatch, step, lambda: shutil.rmtree(step / "default" / "d"))
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        CALLS[verb](tmp_path)
