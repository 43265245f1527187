"""Boxes of a global array in tensors whose values NumPy cannot view."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncckpt.adapters.tensor_boxes import BoxesAdapter, TensorBoxes
from asyncckpt.spec import Box
from tests.adapters.fetching import fetch_box

adapter = BoxesAdapter()

VALUES = (np.arange(15) + 1j).astype(np.complex64).reshape(5, 3)


def boxes_of(*boxes: Box) -> TensorBoxes:
    tensors = [torch.from_numpy(VALUES[box.slices()]).conj() for box in boxes]
    return TensorBoxes((5, 3), boxes, tuple(tensors))


@pytest.mark.parametrize(
    "leaf",
    [
        boxes_of(Box((0, 0), (5, 3))),
        boxes_of(Box((3, 0), (2, 3)), Box((0, 2), (3, 1)), Box((0, 0), (3, 2))),
        boxes_of(Box((3, 0), (2, 3)), Box((0, 0), (3, 3)), Box((3, 0), (2, 3))),
    ],
    ids=["whole", "in another order than their offsets", "with a replica"],
)
def test_each_box_is_fetched_from_its_own_tensor(leaf: TensorBoxes) -> None:
    source = adapter.source("p", leaf)
    assert {source.view, *source.views} == {None}
    for box in (Box.whole((5, 3)), Box((2, 1), (2, 2)), Box((4, 2), (1, 1))):
        out = np.empty(box.shape, np.complex64)
        fetch_box(adapter, source, box, out)
        np.testing.assert_array_equal(out, VALUES[box.slices()].conj())
