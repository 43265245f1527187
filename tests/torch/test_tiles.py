"""Padded tiles over emulated devices, as PyTorch/XLA's SPMD has them, loaded onto other meshes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt import blocking
from asyncckpt.torch import StorageReader, StorageWriter
from tests.processes.values import array
from tests.torch.cases import read, write
from tests.torch.tiles import PADDING, TileLoadPlanner, Tiles, TileSavePlanner

Mesh = tuple[int, int]

ITEMS: dict[tuple[int, int], dict[tuple[Mesh, Mesh], int]] = {
    (128, 64): {
        ((4, 1), (2, 2)): 8,
        ((2, 2), (4, 1)): 8,
        ((4, 4), (2, 2)): 16,
        ((2, 2), (4, 4)): 16,
    },
    (10, 6): {
        ((4, 1), (2, 2)): 10,
        ((2, 2), (4, 1)): 10,
        ((4, 4), (2, 2)): 20,
        ((2, 2), (4, 4)): 20,
    },
    (5, 3): {
        ((4, 1), (2, 2)): 8,
        ((2, 2), (4, 1)): 8,
        ((4, 4), (2, 2)): 12,
        ((2, 2), (4, 4)): 12,
    },
}

CASES = [(shape, *meshes) for shape, found in ITEMS.items() for meshes in found]


@pytest.mark.parametrize(("shape", "saved", "loaded"), CASES)
def test_any_mesh_to_any_mesh(
    tmp_path: Path, shape: tuple[int, int], saved: Mesh, loaded: Mesh
) -> None:
    values = array("tiles", shape)
    path = str(tmp_path / "1")
    write("save", {"w": Tiles(values, saved), "n": [1, 2]}, StorageWriter(path), TileSavePlanner())
    np.testing.assert_array_equal(blocking.restore(path)["w"], values)

    target = {"w": Tiles(np.zeros(shape, np.float32), loaded), "n": None}
    planner = TileLoadPlanner()
    read(target, StorageReader(path), planner)
    tiles = target["w"]
    assert isinstance(tiles, Tiles)
    assert torch.equal(tiles.whole(), torch.from_numpy(values))
    assert (tiles.padding() == PADDING).all()
    assert target["n"] == [1, 2]
    count = ITEMS[shape][saved, loaded]
    expected = [("resolve", "w")] * count + [("commit", "w")] * count + [("device", "w")]
    assert planner.events == expected


def test_nothing_is_committed_before_every_checksum_has_passed(tmp_path: Path) -> None:
    path = tmp_path / "1"
    tree = {"a": Tiles(array("a", (512, 512)), (2, 2)), "b": Tiles(array("b", (512, 512)), (2, 2))}
    write("save", tree, StorageWriter(path), TileSavePlanner())
    largest = max((path / "default" / "d").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[1000] ^= 1
    largest.write_bytes(data)
    target = {key: Tiles(np.zeros((512, 512), np.float32), (4, 1)) for key in tree}
    planner = TileLoadPlanner()
    with pytest.raises(CheckpointException, match="CorruptCheckpointError"):
        read(target, StorageReader(path), planner)
    assert {event for event, _ in planner.events} == {"resolve"}
    assert all((tiles.whole() == 0).all() for tiles in target.values())


def test_more_elements_than_a_tensor_has_are_an_error(tmp_path: Path) -> None:
    class Twice(TileLoadPlanner):
        def create_local_plan(self):  # type: ignore[no-untyped-def]
            plan = super().create_local_plan()
            plan.items.append(plan.items[-1])
            return plan

    path = tmp_path / "1"
    write("save", {"w": Tiles(array("w", (10, 6)), (4, 1))}, StorageWriter(path), TileSavePlanner())
    with pytest.raises(CheckpointException, match="more elements were committed"):
        read({"w": Tiles(np.zeros((10, 6), np.float32), (2, 2))}, StorageReader(path), Twice())
