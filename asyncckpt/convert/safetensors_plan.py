"""Plan of a conversion to safetensors: tensors, files and offsets.

Refuses names, dtypes and sizes that do not fit the format, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.convert.destination import Target
from asyncckpt.convert.reader import LeafReader
from asyncckpt.errors import UnsupportedLeafError, UsageError
from asyncckpt.format.fields import excess
from asyncckpt.format.foreign.safetensors import (
    CODES,
    INDEX_SUFFIX,
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    MAX_NAME_CHARS,
    METADATA_KEY,
    SUFFIX,
    encode_header,
    encode_index,
)
from asyncckpt.format.foreign.safetensors_tree import TREE_KEY, SavedTree, encode_tree
from asyncckpt.format.record_values import LeafTable
from asyncckpt.format.scalars import is_unicode
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.planning.pack import Window, cut_windows
from asyncckpt.save.plan_cache import options_of_leaf, stored_spec, untie
from asyncckpt.save.snapshot import Snapshot
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import Key, where

STEM = "model"
"""Stem of the file names of a set, which other libraries expect."""

FRAMEWORK_KEY = "format"
"""Metadata key that Hugging Face's libraries require."""

CASTS = {
    "int2": "int8",
    "int4": "int8",
    "float4_e2m1fn": "float8_e4m3fn",
    "float8_e3m4": "bfloat16",
    "float8_e4m3b11fnuz": "bfloat16",
    "complex128": "complex64",
}
"""Suggested cast for each dtype that safetensors lacks, to one that holds all or most values."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: number of its array in the snapshot, stored name and spec, file and offset.

    A `tiled` one is written tile by tile after all windows of its file.
    """

    number: int
    name: str
    spec: ArraySpec
    file: int
    offset: int
    tiled: bool


@dataclass(frozen=True, slots=True, eq=False)
class FilesPlan:
    """Files of a conversion.

    Attributes:
        headers: the first bytes of each file.
        tensors: all tensors, by file and offset.
        windows: the files cut into slots, without tiled tensors. A piece's `array` is an index into
            `tensors`; negative for a header.
        index: name and content of the index of a set, or None.
    """

    names: tuple[str, ...]
    headers: tuple[bytes, ...]
    file_nbytes: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    windows: tuple[Window, ...]
    index: tuple[str, bytes] | None


def tensor_names(parts: Sequence[tuple[Key, ...]], paths: Sequence[str]) -> list[str]:
    """Return a name for every leaf: its keys joined by ``.``, as in the state dicts of torch.

    Raises:
        UsageError: two leaves would share a name, or a name does not fit the format; names them.
    """
    names: list[str] = []
    first: dict[str, str] = {}
    for path, keys in zip(paths, parts, strict=True):
        name = ".".join(map(str, keys)) or "root"
        if name in first:
            raise UsageError(
                f"{where(path)} and {where(first[name])} would both be the tensor {name!r} in a "
                "safetensors file; rename one of them",
                path=path,
                expected="different names",
                found=name,
            )
        fault = ""
        if name == METADATA_KEY:
            fault = "is the key of the metadata"
        elif len(name) > MAX_NAME_CHARS:
            fault = f"has {len(name)} characters, of which {MAX_NAME_CHARS} are allowed"
        elif not is_unicode(name):
            fault = "is not valid Unicode"
        if fault:
            raise UsageError(
                f"{where(path)}: the name {name[:80]!r} of its tensor in a safetensors file "
                f"{fault}; rename it",
                path=path,
                found=name,
            )
        first[name] = path
        names.append(name)
    return names


def plan_files(target: Target, reader: LeafReader, snapshot: Snapshot) -> FilesPlan:
    """Plan the files at the target for the tree of a snapshot. Blocking.

    Raises:
        UsageError: names, dtypes or sizes do not fit the format; names the leaf.
    """
    untie(snapshot, target.options)
    specs: dict[int, ArraySpec] = {}
    for number, leaf in enumerate(snapshot.array_leaf):
        if number not in snapshot.tied:
            path, source = snapshot.paths[leaf], snapshot.sources[number]
            own = options_of_leaf(target.options, path, source.spec)
            specs[number] = source.spec if own is None else stored_spec(path, source, own)
    leaf_names = tensor_names(snapshot.structure.parts(), snapshot.paths)
    for number, spec in specs.items():
        _check_dtype(snapshot.paths[snapshot.array_leaf[number]], spec.dtype)
    files = _share(specs, target.max_file_nbytes)
    texts = _metadata(target, reader, snapshot, leaf_names)
    names = _file_names(len(files), None if target.max_file_nbytes else target.name)
    # Stores without positional writes need each file in order, even if chunks are read repeatedly.
    scattered = target.store.capabilities.positional_writes
    headers: list[bytes] = []
    sizes: list[int] = []
    tensors: list[Tensor] = []
    for file, numbers in enumerate(files):
        leaves = [snapshot.array_leaf[number] for number in numbers]
        rows = [
            (leaf_names[leaf], specs[number]) for leaf, number in zip(leaves, numbers, strict=True)
        ]
        # The first file of a set stores the tree.
        own_texts = texts if file == 0 else {FRAMEWORK_KEY: texts[FRAMEWORK_KEY]}
        header, offsets = encode_header(rows, own_texts)
        if reason := excess(header[LENGTH_NBYTES:], MAX_HEADER_NBYTES):
            raise UsageError(
                f"readers would refuse the header of {names[file]}: {reason}; if the tree has too "
                "many leaves, pass max_file_nbytes, which makes a set of files; store long lists "
                "and texts as arrays",
                found=reason,
            )
        headers.append(header)
        sizes.append(len(header) + sum(spec.nbytes for _, spec in rows))
        placed = [
            Tensor(number, *row, file, offset, scattered and reader.is_banded(leaf))
            for number, leaf, row, offset in zip(numbers, leaves, rows, offsets, strict=True)
        ]
        tensors += sorted(placed, key=lambda tensor: tensor.offset)
    index = None
    if len(files) > 1:
        total = sum(tensor.spec.nbytes for tensor in tensors)
        weights = {tensor.name: names[tensor.file] for tensor in tensors}
        index = (f"{STEM}{INDEX_SUFFIX}", encode_index(weights, total))
    return FilesPlan(
        names=tuple(names),
        headers=tuple(headers),
        file_nbytes=tuple(sizes),
        tensors=tuple(tensors),
        windows=_windows(headers, sizes, tensors),
        index=index,
    )


def _check_dtype(path: str, dtype: str) -> None:
    if dtype in CODES:
        return
    raise UnsupportedLeafError(
        f"{where(path)}: safetensors has no dtype {dtype}; cast it, for example to "
        f"{CASTS[dtype]} (leaf_options with LeafOptions(dtype={CASTS[dtype]!r}), or --cast "
        f"{dtype}={CASTS[dtype]})",
        path=path,
        expected=tuple(CODES),
        found=dtype,
    )


def _share(specs: Mapping[int, ArraySpec], max_file_nbytes: int | None) -> list[list[int]]:
    """Return the arrays of each file, in tree order; at least one file."""
    files: list[list[int]] = [[]]
    nbytes = 0
    for number, spec in specs.items():
        if max_file_nbytes is not None and files[-1] and nbytes + spec.nbytes > max_file_nbytes:
            files.append([])
            nbytes = 0
        files[-1].append(number)
        nbytes += spec.nbytes
    return files


def _file_names(count: int, single: str | None) -> list[str]:
    if single is not None:
        return [single]
    if count == 1:
        return [f"{STEM}{SUFFIX}"]
    return [f"{STEM}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def _metadata(
    target: Target, reader: LeafReader, snapshot: Snapshot, names: Sequence[str]
) -> dict[str, str]:
    metadata = {**reader.opened.metadata, **target.metadata}
    tensors: list[str | None] = [None] * len(names)
    texts = {key: text for key, text in metadata.items() if isinstance(text, str)}
    for number, leaf in enumerate(snapshot.array_leaf):
        kept = names[snapshot.array_leaf[snapshot.tied.get(number, number)]]
        tensors[leaf] = kept
        if kept != names[leaf]:
            # Like safetensors.torch.save_model for tensors that share memory.
            texts[names[leaf]] = kept
    # The tree holds the user's strings, too, so those under reserved keys are not lost.
    texts = {key: text for key, text in texts.items() if key.partition(".")[0] != TREE_KEY}
    leaves = LeafTable(snapshot.kinds, snapshot.values, snapshot.extra, {})
    tree = SavedTree(snapshot.structure, leaves, tensors, metadata, reader.opened.metrics)
    return texts | {FRAMEWORK_KEY: "pt"} | encode_tree(tree)


def _windows(
    headers: Sequence[bytes], sizes: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[Window, ...]:
    rows = [(-1 - file, file, 0, len(header)) for file, header in enumerate(headers)]
    rows += [
        (row, tensor.file, tensor.offset, tensor.spec.nbytes)
        for row, tensor in enumerate(tensors)
        if tensor.spec.nbytes and not tensor.tiled
    ]
    rows.sort(key=lambda row: (row[1], row[2]))
    array, file, offset, nbytes = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    windows = cut_windows(np.arange(len(rows)), array, file, offset, nbytes, sizes, SLOT_NBYTES)
    return tuple(window for window in windows if window.pieces)
