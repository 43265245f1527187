"""DCP's metadata: a JSON object in the metadata of a checkpoint's record.

::

    {"version": 1,
     "paths":  {key: path in the nested state dict}, without keys that equal their path; or null
     "shards": {key: {"cell": shape} or [[offset, shape], ...]}, without single-shard tensors
     "opaque": [key, ...]}

Shapes and dtypes are not repeated here: the arrays have them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.errors import CorruptCheckpointError, UsageError
from asyncckpt.format.fields import check_form
from asyncckpt.planning.tiling import claimed_tiling_fault
from asyncckpt.spec import Box, ChunkGrid

NAME = "torch.distributed.checkpoint"
"""Key of the JSON object."""

VERSION = 1
_FORM = {"version": object, "paths": (dict,), "shards": dict, "opaque": [str]}

MAX_SHARDS = 1 << 22
"""Maximum number of shards of a tensor: damaged or hostile metadata must not exhaust memory."""

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """DCP's metadata in a record.

    Attributes:
        paths: path in the nested state dict of each key that differs from its path; None if the
            planner flattens nothing.
        opaque: keys whose values are the bytes of a pickle.
    """

    paths: Mapping[str, Path] | None
    opaque: Collection[str]
    _shards: Mapping[str, Any]
    _location: str

    def shards(self, key: str, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Return the saved boxes of a tensor, in C order.

        Raises:
            CorruptCheckpointError: the boxes do not tile the tensor.
        """
        stored = self._shards.get(key)
        if stored is None:
            return (Box.whole(shape),)
        try:
            return _decoded(stored, shape)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(self._location, f"the shards of {key!r:.200}: {error}") from None


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """Return the box of a shard."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def check_written(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
    """Check that exactly one rank wrote every item of the global plan.

    Raises:
        UsageError: no rank or several wrote an item; names its key and the ranks.
    """
    ranks: dict[MetadataIndex, list[int]] = {}
    for rank, written in enumerate(results):
        for result in written:
            ranks.setdefault(result.index, []).append(rank)
    for index in _items(metadata):
        found = ranks.get(index, [])
        if len(found) == 1:
            continue
        where = "" if index.offset is None else f" at {list(index.offset)}"
        who = f"ranks {', '.join(map(str, found))} have all" if found else "no rank has"
        raise UsageError(
            f"{index.fqn}{where}: {who} written this item of the planner's global plan; nothing "
            "was committed. create_global_plan must give every item to one rank, as "
            "DefaultSavePlanner does",
            path=index.fqn,
            expected="one rank",
            found=found,
        )


def _items(metadata: Metadata) -> Iterator[MetadataIndex]:
    """Yield the index of every non-empty item."""
    for key, value in metadata.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            yield MetadataIndex(key)
            continue
        for chunk in value.chunks:
            if 0 not in chunk.sizes:
                yield MetadataIndex(key, chunk.offsets)


def encode_layout(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> dict[str, dict[str, Any]]:
    """Return the metadata for the record.

    `WriteResult.storage_data` is True for opaque items.

    Raises:
        UsageError: the planner's data do not map keys to paths.
    """
    shards: dict[str, Any] = {}
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            boxes = [box for box in map(box_of, value.chunks) if box.size]
            if len(boxes) > 1:
                shards[key] = _encoded(tuple(value.size), boxes)
    opaque = [
        result.index.fqn for written in results for result in written if result.storage_data is True
    ]
    paths = _encoded_paths(metadata.planner_data)
    return {NAME: {"version": VERSION, "paths": paths, "shards": shards, "opaque": opaque}}


def decode_layout(metadata: Mapping[str, Any], location: str) -> Layout | None:
    """Return DCP's metadata in a record, None if it was not written through DCP.

    Raises:
        CorruptCheckpointError: the metadata are malformed or have another version.
    """
    stored = metadata.get(NAME)
    if stored is None:
        return None
    try:
        check_form(stored, dict)
        version = stored.get("version")  # checked first: other versions may have other members
        if version != VERSION:
            raise ValueError(f"version {version!r:.40}, this release reads {VERSION}")
        check_form(stored, _FORM)
        _, paths, shards, opaque = (stored[name] for name in _FORM)
        if paths is not None:
            paths = {key: _path(path) for key, path in paths.items()}
    except (TypeError, ValueError) as error:
        raise damaged(location, str(error)) from None
    return Layout(paths, frozenset(opaque), shards, location)


def _encoded(shape: tuple[int, ...], boxes: Sequence[Box]) -> Any:
    """Return the boxes as JSON: the cell of a regular grid, else a list."""
    boxes = sorted(boxes, key=lambda box: box.offset)
    cell = boxes[0].shape
    grid = ChunkGrid(shape, cell)
    if grid.chunk_count == len(boxes) and tuple(boxes) == _cells(grid):
        return {"cell": list(cell)}
    return [[list(box.offset), list(box.shape)] for box in boxes]


def _decoded(stored: Any, shape: tuple[int, ...]) -> tuple[Box, ...]:
    if isinstance(stored, dict):
        grid = ChunkGrid(shape, _lengths(stored["cell"], shape))
        if 0 in grid.chunk_shape or grid.chunk_count > MAX_SHARDS:
            raise ValueError(f"{len(shape)} axes cut into cells of {grid.chunk_shape}")
        return _cells(grid)
    boxes = tuple([Box(_lengths(o, shape), _lengths(n, shape)) for o, n in stored])
    if not all(box.size for box in boxes):
        raise ValueError("a shard without elements")
    fault = claimed_tiling_fault(Box.whole(shape), boxes)
    if fault is not None:
        raise ValueError(fault)
    return boxes


def _cells(grid: ChunkGrid) -> tuple[Box, ...]:
    return tuple(map(grid.box, grid.cells()))


def _lengths(values: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) != len(shape):
        raise TypeError(f"{values!r:.80} for shape {shape}")
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in values):
        raise ValueError(f"{values!r:.80} for shape {shape}")
    return tuple(values)


def _encoded_paths(planner_data: Any) -> dict[str, list[str | int]] | None:
    if planner_data is None:
        return None
    try:
        paths = {key: _path(list(path)) for key, path in planner_data.items()}
    except (AttributeError, TypeError):
        raise UsageError(
            f"planner_data: the metadata of this planner holds a {type(planner_data).__name__}, "
            "which cannot be stored; nothing was committed. create_global_plan must return "
            "metadata whose planner_data is None or maps each key to its path in the nested state "
            "dict, as DefaultSavePlanner does",
            expected="a dict of tuples of str and int",
            found=type(planner_data).__name__,
        ) from None
    return {key: list(path) for key, path in paths.items() if path != (key,)}


def _path(path: Any) -> Path:
    if not isinstance(path, list) or not path or set(map(type, path)) - {str, int}:
        raise TypeError(f"{path!r:.80} is not a path")
    return tuple(path)


def damaged(location: str, reason: str) -> CorruptCheckpointError:
    """Return the error for metadata of DCP that are malformed or do not fit the checkpoint."""
    return CorruptCheckpointError(
        f"{location}: {NAME!r} in the metadata of the record is malformed ({reason}); restore an "
        "older checkpoint, or this one with asyncckpt.restore",
        location=location,
        found=reason,
    )
