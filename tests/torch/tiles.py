"""Planners for arrays in padded tiles over emulated devices, as PyTorch/XLA's SPMD planners work.

Every device holds a tile of size ceil(n / m) per axis, padded at the far edge. Padding is neither
saved nor loaded, tiles of nothing but padding give no items, and a device gets its tiles when the
whole tensor has arrived.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import (
    _create_read_items,
    create_read_items_for_chunk_list,
)

import asyncckpt

PADDING = -1.0


class Tiles:
    """An array over a mesh of emulated devices.

    Attributes:
        shape: of the whole array.
        tiles: per device the offset of its tile, its shape without padding, and its padded values.
    """

    def __init__(self, values: np.ndarray[Any, Any], mesh: tuple[int, ...]) -> None:
        self.shape = values.shape
        self.tiles = []
        for offset, held in asyncckpt.ShardedArray.tiles(values, mesh).shards:
            ends = zip(offset, held.shape, values.shape, strict=True)
            inside = [max(0, min(n, stop - o)) for o, n, stop in ends]
            tile = torch.full(held.shape, PADDING)
            tile[_index(inside)] = torch.from_numpy(held)[_index(inside)]
            self.tiles.append((offset, tuple(inside), tile))

    def whole(self) -> torch.Tensor:
        values = torch.full(self.shape, float("nan"))
        for offset, inside, tile in self.tiles:
            stop = [o + n for o, n in zip(offset, inside, strict=True)]
            values[tuple(map(slice, offset, stop))] = tile[_index(inside)]
        return values

    def padding(self) -> torch.Tensor:
        """All values of the padding."""
        found = []
        for _, inside, tile in self.tiles:
            mask = torch.ones(tile.shape, dtype=torch.bool)
            mask[_index(inside)] = False
            found.append(tile[mask])
        return torch.cat(found)

    def chunks(self) -> list[tuple[int, ChunkStorageMetadata]]:
        """Number and place of the tiles that hold something."""
        return [
            (number, ChunkStorageMetadata(torch.Size(offset), torch.Size(inside)))
            for number, (offset, inside, _) in enumerate(self.tiles)
            if 0 not in inside
        ]


def _index(lengths: Any) -> tuple[slice, ...]:
    return tuple(map(slice, lengths))


class TileSavePlanner(SavePlanner):
    """Saves `Tiles` and values; a tile that was resolved is given up."""

    def set_up_planner(self, state_dict: Any, *_: Any, **__: Any) -> None:
        self.state_dict = state_dict
        self.left = {
            (key, number): value.tiles[number][2]
            for key, value in state_dict.items()
            if isinstance(value, Tiles)
            for number, _ in value.chunks()
        }

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, value in self.state_dict.items():
            if not isinstance(value, Tiles):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            for number, chunk in value.chunks():
                items.append(
                    WriteItem(
                        MetadataIndex(key, chunk.offsets, number),
                        WriteItemType.SHARD,
                        tensor_data=TensorWriteData(
                            chunk, TensorProperties(torch.float32), torch.Size(value.shape)
                        ),
                    )
                )
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans, rewrite_index_hints=False)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save(self.state_dict[index.fqn], data)
            return data
        assert index.index is not None
        tile = self.left.pop((index.fqn, index.index))  # a second call is a KeyError
        return tile[_index(write_item.tensor_data.chunk.sizes)]  # type: ignore[union-attr]


class TileLoadPlanner(LoadPlanner):
    """Loads `Tiles` and values; a tensor goes to its devices when all of its elements are there."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        tiles = {key: value for key, value in state_dict.items() if isinstance(value, Tiles)}
        self.host = {key: [t.clone() for *_, t in value.tiles] for key, value in tiles.items()}
        self.missing = {key: int(np.prod(value.shape)) for key, value in tiles.items()}
        self.events: list[tuple[str, str]] = []

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, value in self.state_dict.items():
            described: Any = self.metadata.state_dict_metadata[key]
            if isinstance(value, Tiles):
                numbers, chunks = zip(*value.chunks(), strict=True)
                self.numbers = {**getattr(self, "numbers", {}), key: numbers}
                items += create_read_items_for_chunk_list(key, described, list(chunks))
            else:
                items += _create_read_items(key, described, value)
        self.items = items
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        self.events.append(("resolve", index.fqn))
        assert index.index is not None
        tile = self.host[index.fqn][self.numbers[index.fqn][index.index]]
        stop = [o + n for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True)]
        return tile[tuple(map(slice, read_item.dest_offsets, stop))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        key = read_item.dest_index.fqn
        self.events.append(("commit", key))
        self.missing[key] -= tensor.numel()
        if self.missing[key] < 0:
            raise ValueError(f"{key}: more elements were committed than it has")
        if self.missing[key] == 0:
            self.events.append(("device", key))
            for (*_, tile), arrived in zip(self.state_dict[key].tiles, self.host[key], strict=True):
                tile.copy_(arrived)
