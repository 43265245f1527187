"""Entries at the place of a checkpoint that is to be published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import CheckpointExistsError


async def test_a_directory_of_a_checkpoint_is_not_moved_out_of_it(tmp_path: Path) -> None:
    whole, inside = tmp_path / "final", tmp_path / "final" / "default"
    await asyncckpt.save(whole, {"w": np.ones(3)})
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError, match="exists here and was left untouched"):
            await asyncckpt.save(inside, {"w": np.zeros(3)}, overwrite=overwrite)
    assert (await asyncckpt.verify(whole)).ok
    await asyncckpt.save(whole, {"w": np.zeros(3)}, overwrite=True)
    assert (await asyncckpt.restore(whole))["w"].sum() == 0
