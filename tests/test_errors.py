"""Errors hold what a handler needs, and nothing of the caller's."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import SaveError, UsageError


@pytest.mark.parametrize(
    "found",
    ["text", b"torn", 3, 2.5, True, None, np.int64(3), (1, 2), ["a", (1, None)], list(range(5000))],
)
def test_an_error_keeps_plain_values(found: Any) -> None:
    error = SaveError("x", expected=found, found=found)
    assert error.found == found == error.expected and type(error.found) is type(found)


def test_an_error_holds_a_text_instead_of_an_object_and_can_be_pickled() -> None:
    class Local:
        pass

    for found, text in (
        ({"w": np.zeros(1 << 20)}, "{'w': array("),
        (threading.Lock(), "<unlocked _thread.lock object at"),
        (threading, "<module 'threading'"),
        (lambda: None, "<function test_an_error_holds_a_text"),
        (Local, "Local"),
        (Local(), "<tests.test_errors.test_an_"),
        ([Local()], "['<tests.test_errors.test_an_"),
        ([0] * 100_000, "[0, 0, 0, 0, 0, 0, ...]"),
    ):
        error = UsageError("x", path="a", expected=found, found=found)
        assert str(error.found).startswith(text)
        stored = pickle.dumps(error)
        assert len(stored) < 1000
        assert vars(pickle.loads(stored)) == vars(error)


async def test_the_error_about_arguments_in_the_wrong_order_is_small(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    tree: Any = {"w": np.zeros(1 << 20)}
    with pytest.raises(UsageError, match="a step is a non-negative integer, not dict") as caught:
        await ckpt.save(tree, 5)
    assert len(pickle.dumps(caught.value)) < 1000


def test_the_place_of_all_values_survives_copies_and_pickles() -> None:
    place = asyncckpt.PerProcess.all
    assert copy.copy(place) is place and copy.deepcopy({"rng": place})["rng"] is place
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(place, protocol)) is place
