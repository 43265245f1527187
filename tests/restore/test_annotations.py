"""Annotations with names that exist only for type checkers.

From Python 3.14 on, annotations are evaluated when something reads them. For the tests to show that
nothing does, this module has no `from __future__ import annotations`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import blocking
from tests.restore.loader import Loader

OnlyForTypeCheckers = Any


class Annotated(Loader):
    def load_state_dict(self, state: OnlyForTypeCheckers, strict: bool = True) -> None:
        super().load_state_dict({**state, "strict": strict})


class Params:
    w: OnlyForTypeCheckers


del OnlyForTypeCheckers
Params = dataclass(Params)  # type: ignore[misc]  # now, so that it does not keep what they mean


def test_annotations_of_load_state_dict_need_not_be_defined(tmp_path: Path) -> None:
    blocking.save(tmp_path / "c", {"x": Annotated(a=1)})
    target = Annotated(a=0)
    blocking.restore_into(tmp_path / "c", {"x": target}, strict=False)
    assert target.state == {"a": 1, "strict": False}


def test_annotations_of_dataclasses_need_not_be_defined(tmp_path: Path) -> None:
    blocking.save(tmp_path / "c", Params(np.ones(2)))
    restored = blocking.restore(tmp_path / "c", like=Params(np.zeros(2)))
    assert type(restored) is Params and restored.w.tolist() == [1, 1]
