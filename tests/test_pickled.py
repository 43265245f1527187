"""Pickles of reports and options: another release finds each value in its field."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

import asyncckpt
from asyncckpt import KeepBest, KeepLast, LeafOptions, RestoreOptions, SaveOptions
from asyncckpt.pickled import PickledByName


@dataclasses.dataclass(frozen=True, slots=True)
class Older(PickledByName):
    location: str
    orbax: bool
    dropped: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Newer(PickledByName):
    location: str
    added: int = 7
    orbax: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Wants(PickledByName):
    location: str
    other: int


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_release_with_other_fields_loads_what_both_know(protocol: int) -> None:
    stored = pickle.dumps(Older("/run", True, 3), protocol)
    assert pickle.loads(stored.replace(b"Older", b"Newer")) == Newer("/run", 7, True)
    with pytest.raises(TypeError, match="'other'"):
        pickle.loads(stored.replace(b"Older", b"Wants"))


def test_every_public_dataclass_is_pickled_by_name() -> None:
    public = [getattr(asyncckpt, name) for name in asyncckpt.__all__]
    kinds = [kind for kind in public if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    assert len(kinds) > 20
    assert not [kind for kind in kinds if not issubclass(kind, PickledByName)]


async def test_reports_options_and_policies_survive_copies_and_pickles(tmp_path: Path) -> None:
    tree = {"w": np.ones(3), "n": 2}
    report = await asyncckpt.save(tmp_path / "x", tree, metadata={"a": 1})
    for value in (
        report,
        await asyncckpt.inspect(tmp_path / "x", timeline=True),
        await asyncckpt.verify(tmp_path / "x"),
        await asyncckpt.restore_into(tmp_path / "x", tree),
        await asyncckpt.diff(tmp_path / "x", tmp_path / "x"),
        SaveOptions(compression="zstd", deadline_s=3.0),
        RestoreOptions(atomic=True),
        LeafOptions(dtype="bfloat16"),
        KeepLast(3) | KeepBest(1, "loss"),
    ):
        assert pickle.loads(pickle.dumps(value)) == copy.copy(value) == copy.deepcopy(value)
        assert copy.copy(value) == value
