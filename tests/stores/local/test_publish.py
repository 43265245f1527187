"""Entries at the place of a checkpoint that is to be published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import UsageError
from tests.convert.trees import listed


@pytest.mark.parametrize("name", ["copy", "default", "default/x.safetensors", "default/d/new"])
@pytest.mark.parametrize("linked", [False, True])
async def test_nothing_is_written_inside_a_checkpoint(
    tmp_path: Path, name: str, linked: bool
) -> None:
    tree = {"w": np.ones(3)}
    await asyncckpt.save(tmp_path / "src", tree)
    await asyncckpt.save(tmp_path / "run" / "1", tree)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = listed(tmp_path)
    inside = tmp_path / ("link" if linked else "run") / "1" / name
    text = rf"{name}: this location is inside the checkpoint {tmp_path}/run/1, which"
    with pytest.raises(UsageError, match=text):
        await asyncckpt.convert(tmp_path / "src", inside, overwrite=True)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=text):
            await asyncckpt.save(inside, tree, overwrite=overwrite)
    async with asyncckpt.Checkpointer(inside) as ckpt:
        with pytest.raises(UsageError, match="5: this location is inside the checkpoint"):
            await ckpt.save(5, tree)
    assert listed(tmp_path) == before
    await asyncckpt.save(inside.parents[name.count("/")], tree, overwrite=True)


async def test_a_file_that_only_has_the_name_of_a_record_makes_no_checkpoint(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoint.json").write_text("{}")
    await asyncckpt.save(tmp_path / "final", {"w": np.ones(3)})
    assert (await asyncckpt.verify(tmp_path / "final")).ok
