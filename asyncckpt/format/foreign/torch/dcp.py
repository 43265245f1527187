"""Checks of the metadata of `torch.distributed.checkpoint`.

`.metadata` has every key of the flattened state dict, its path in the nested one (`planner_data`),
whether it is a tensor, and for every shard the file, offset and length of an archive of
`torch.save`. Source: `metadata.py`, `filesystem.py` and `default_planner.py` of torch 2.13.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncckpt.format.damage import corrupt, path_fault, unsupported
from asyncckpt.format.foreign.torch.strided import Layout, dense_axes
from asyncckpt.format.foreign.torch.torch_pickle import (
    DTYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Dtype,
    Metadata,
    MetadataIndex,
    SavedTensor,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
    extents,
)
from asyncckpt.format.foreign.torch.torch_zip import Archive
from asyncckpt.spec import ITEMSIZES, Box, nonempty_size
from asyncckpt.tree import MAX_DEPTH, Key

METADATA_NAME = ".metadata"
VERSION = 1
"""Major version of the format, as in `Metadata.version`; torch before 2.6 writes none."""

MAX_METADATA_NBYTES = 1 << 30
MAX_FILE_NBYTES = 1 << 62
MAX_ELEMENTS = 1 << 58
"""Most elements of a tensor; an element has at most 16 bytes."""

_WHAT = "the metadata of torch.distributed.checkpoint"

_extents = partial(extents, below=MAX_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Item:
    """Location of one archive."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Key of the flattened state dict.

    Attributes:
        path: its path in the nested state dict; integers are indices of lists.
        shape: shape of a tensor; None for other values.
        dtype: torch dtype of a tensor, without its module.
        boxes: nonempty shards of a tensor; not yet checked to tile it.
        items: the archive of every box; for other values, a single archive.
    """

    key: str
    path: tuple[Key, ...]
    shape: tuple[int, ...] | None
    dtype: str
    boxes: tuple[Box, ...]
    items: tuple[Item, ...]


def decode_entries(value: object, *, file: str) -> list[Entry]:
    """Return the entries of a checkpoint, from the unpickled `.metadata`."""
    try:
        return _entries(value, file)
    except ValueError as error:
        raise corrupt(_WHAT, str(error), file=file) from None


def _entries(value: object, file: str) -> list[Entry]:
    if not isinstance(value, Metadata):
        raise ValueError(f"it is a {type(value).__name__}")
    version, paths = value.version, value.planner_data
    if version is not None and (
        type(version) is not str or version.partition(".")[0] != str(VERSION)
    ):
        raise unsupported(
            f"{_WHAT} has version {_shown(version)}, this release reads version {VERSION}",
            file=file,
            expected=VERSION,
            found=_shown(version),
        )
    described = _dict(value.state_dict_metadata, "state_dict_metadata")
    places = _places(value.storage_data)
    paths = _dict({} if paths is None else paths, "planner_data")
    # Ranks append their shards, but planner_data has the order of the state dict.
    order = [key for key in paths if key in described]
    order += [key for key in described if key not in paths]
    # A pickle may name one list of shards many times: each is looked at once.
    known: dict[tuple[int, int], tuple[Box, ...]] = {}
    entries = [
        _entry(key, described[key], paths.get(key, (key,)), places, known, file) for key in order
    ]
    _check_places(entries)
    return entries


def _places(value: object) -> dict[tuple[str, object], StorageInfo]:
    places: dict[tuple[str, object], StorageInfo] = {}
    for index, info in _dict(value, "storage_data", MetadataIndex).items():
        fqn, offset = index.fqn, index.offset
        if type(fqn) is not str:
            raise ValueError("an index of storage_data has no name")
        if offset is not None:
            offset = _extents(offset, f"the offset of a shard of {fqn[:200]!r}")
        if not isinstance(info, StorageInfo):
            raise ValueError(f"storage_data of {fqn[:200]!r} is a {type(info).__name__}")
        places[fqn, offset] = info
    return places


def _entry(
    key: str,
    value: object,
    path: object,
    places: Mapping[tuple[str, object], StorageInfo],
    known: dict[tuple[int, int], tuple[Box, ...]],
    file: str,
) -> Entry:
    where = f"{key[:200]!r}"
    if type(path) is not tuple or not path or set(map(type, path[:MAX_DEPTH])) - {str, int}:
        raise ValueError(f"planner_data of {where} is not a path of strings and integers")
    if len(path) > MAX_DEPTH or any(type(p) is int and not 0 <= p < 1 << 31 for p in path):
        raise ValueError(f"planner_data of {where} is too deep, or has an index out of range")
    if isinstance(value, BytesStorageMetadata):
        item = _item(places.get((key, None)), where, file)
        return Entry(key, path, None, "", (), (item,))
    if not isinstance(value, TensorStorageMetadata):
        raise ValueError(f"{where} is a {type(value).__name__}")
    properties = value.properties
    if not isinstance(properties, TensorProperties) or not isinstance(properties.dtype, Dtype):
        raise ValueError(f"{where} has no dtype")
    dtype = properties.dtype.name
    if properties.layout != "torch.strided":
        raise unsupported(
            f"{where} has the layout {_shown(properties.layout)}; save it as a dense tensor",
            file=file,
            expected="torch.strided",
            found=_shown(properties.layout),
        )
    shape = _extents(value.size, f"the size of {where}")
    if nonempty_size(shape) >= MAX_ELEMENTS:
        raise ValueError(f"the size of {where} is {list(shape)}, which no tensor has")
    if dtype not in DTYPES and 0 in shape:
        reason = f"{where} has the dtype {dtype}"
        raise unsupported(reason, file=file, expected=DTYPES, found=dtype)
    list_of_rank = id(value.chunks), len(shape)
    if list_of_rank not in known:
        known[list_of_rank] = _boxes(value.chunks, len(shape), where)
    boxes = known[list_of_rank]
    items = [_item(places.get((key, box.offset)), where, file) for box in boxes]
    return Entry(key, path, shape, dtype, boxes, tuple(items))


def _boxes(chunks: object, rank: int, where: str) -> tuple[Box, ...]:
    """Return the nonempty shards."""
    if type(chunks) is not list:
        raise ValueError(f"{where} has no list of shards")
    boxes: dict[tuple[int, ...], Box] = {}
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            raise ValueError(f"a shard of {where} is a {type(chunk).__name__}")
        offset = _extents(chunk.offsets, f"the offset of {where}")
        sizes = _extents(chunk.sizes, f"the size of a shard of {where}")
        if not len(offset) == len(sizes) == rank:
            raise ValueError(f"a shard of {where} is not of rank {rank}")
        if all(sizes):
            # Before a box is made of each: a pickle may name one shard many times.
            if offset in boxes:
                raise ValueError(f"two shards of {where} are at {list(offset)}")
            boxes[offset] = Box(offset, sizes)
    return tuple(boxes.values())


def _item(info: StorageInfo | None, where: str, file: str) -> Item:
    if info is None:
        raise ValueError(f"storage_data does not locate a shard of {where}")
    path, offset, nbytes = info.relative_path, info.offset, info.length
    if type(path) is not str or type(offset) is not int or type(nbytes) is not int:
        raise ValueError(f"the location of {where} has no file, offset and length")
    if not 0 <= offset <= MAX_FILE_NBYTES or not 0 < nbytes <= MAX_FILE_NBYTES:
        raise ValueError(f"the location of {where} is bytes {offset} to {offset + nbytes}")
    extensions = info.transform_descriptors
    if extensions:
        first = _shown(extensions[0] if type(extensions) is list else extensions)
        raise unsupported(
            f"{where} is stored through the extension {first}; save it without extensions",
            file=file,
            expected="no extensions",
            found=first,
        )
    return Item(sys.intern(path), offset, nbytes)


def _check_places(entries: Sequence[Entry]) -> None:
    """Raise if a path is unsafe, or if archives overlap, which would multiply the bytes to read."""
    items = sorted(
        (item.file, item.offset, item.nbytes, entry.key)
        for entry in entries
        for item in entry.items
    )
    faults = {file: path_fault(file) for file, *_ in items}
    for file, _, _, key in items:
        if faults[file] is not None:
            raise ValueError(f"{key[:200]!r} is in the file {file[:200]!r}, which {faults[file]}")
    for (file, offset, nbytes, key), (other, start, _, next_key) in itertools.pairwise(items):
        if file == other and offset + nbytes > start:
            raise ValueError(
                f"{key[:200]!r} and {next_key[:200]!r} share bytes of {file} from byte {start}"
            )


def _dict(value: object, name: str, kind: type = str) -> dict[Any, Any]:
    if type(value) is not dict or any(type(key) is not kind for key in value):
        raise ValueError(f"{name} is not a dict with keys of type {kind.__name__}")
    return value


def _shown(value: object) -> str:
    """Return the `repr` of a string, or the type of any other value, which may be nested deeply."""
    return repr(value[:80]) if isinstance(value, str) else f"a {type(value).__name__}"


def layout_of(archive: Archive, saved: SavedTensor, shape: tuple[int, ...], dtype: str) -> Layout:
    """Return the layout of a shard, which the archive describes as the tensor `saved`.

    `shape` and `dtype` come from the metadata. It is an error if `saved` differs, reaches past its
    storage, or is not dense.
    """
    if saved.dtype != dtype or saved.shape != shape:
        raise archive.corrupt(
            f"the metadata says {dtype}{list(shape)}, the archive {saved.dtype}{list(saved.shape)}"
        )
    itemsize = ITEMSIZES[dtype]
    stored = saved.storage.count // (1 if saved.storage.dtype else itemsize)
    last = sum((n - 1) * stride for n, stride in zip(shape, saved.strides, strict=True))
    if saved.storage.dtype not in ("", dtype) or saved.offset + last >= stored:
        raise archive.corrupt(f"the tensor reaches past the {stored} elements of its storage")
    if (saved.conj and "complex" not in dtype) or (
        saved.neg and dtype.startswith(("bool", "uint"))
    ):
        raise archive.corrupt(f"a {dtype} tensor cannot be conjugated or negated")
    axes = dense_axes(shape, saved.strides)
    if axes is None:
        raise unsupported(
            f"{archive.what} holds a tensor that is not dense: elements with strides "
            f"{list(saved.strides)} share or skip bytes; save tensor.contiguous()",
            file=archive.file,
            offset=archive.base,
            expected="a dense tensor",
            found=saved.strides,
        )
    return Layout(axes, saved.conj, saved.neg)
