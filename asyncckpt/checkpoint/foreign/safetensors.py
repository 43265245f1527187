"""safetensors files, and sets of them with their index, opened as checkpoints."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import numpy as np

from asyncckpt.checkpoint.foreign.listing import Listing, concurrently, list_some, located, place
from asyncckpt.checkpoint.foreign.raw import Run, RunTables
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format.damage import unsupported
from asyncckpt.format.foreign.safetensors import (
    INDEX_SUFFIX,
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    SHARD_NAME,
    SHARDS_KEY,
    SUFFIX,
    Header,
    check_set,
    decode_header,
    decode_index,
    header_nbytes,
    holds_parts,
)
from asyncckpt.format.foreign.safetensors_tree import DEFAULT_KIND, SavedTree, decode_tree
from asyncckpt.format.record_values import LeafTable, Piece
from asyncckpt.format.scalars import JsonValue
from asyncckpt.log import logger
from asyncckpt.options import KIB, MAX_ENTRIES
from asyncckpt.ports import CheckpointFiles
from asyncckpt.tree import Node, Structure

HEAD_NBYTES = 128 * KIB
"""First read of a file: enough for most headers, and on object stores as fast as 8 bytes."""

_CONSOLIDATE = (
    "consolidate the files with torch.distributed.checkpoint first "
    "(HuggingFaceStorageWriter(enable_consolidation=True)), or load them with its "
    "HuggingFaceStorageReader"
)


async def open_safetensors(files: CheckpointFiles) -> OpenCheckpoint:
    """Open a safetensors file, or a set of files, from their headers.

    The location is a file, or a directory with one safetensors file or one index. The tree is a
    dict of arrays by name, or the tree that was converted to safetensors.
    """
    entries = await files.entries(max_entries=MAX_ENTRIES)
    regular = {entry.name: entry.nbytes for entry in entries if not entry.is_directory}
    indexes = [name for name in regular if name.endswith(INDEX_SUFFIX)]
    tensors = [name for name in regular if name.endswith(SUFFIX) or not name]
    if len(indexes) == 1:
        return await _open_set(files, indexes[0])
    if indexes or len(tensors) != 1:
        _refuse_choice(files.location, indexes or tensors)
    path = tensors[0]
    listing = Listing(files, "", {path: regular[path]})
    # If a single rank wrote the only file of a directory, it holds whole tensors.
    header = await _read_header(listing, path, alone=bool(path))
    return _opened(listing, dict.fromkeys(header.specs, (0, header)), header.metadata)


async def _open_set(files: CheckpointFiles, path: str) -> OpenCheckpoint:
    data = await files.read(path, max_nbytes=MAX_HEADER_NBYTES)
    with located(files):
        weight_map = decode_index(data, file=path)
    listing = await list_some(files, dict.fromkeys(weight_map.values()))
    paths = list(listing.nbytes_of)
    read = await concurrently(files, partial(_read_header, listing), paths)
    headers = dict(zip(paths, read, strict=True))
    numbers = {name: number for number, name in enumerate(paths)}
    with located(files):
        check_set(weight_map, headers, file=path)
    places = {name: (numbers[file], headers[file]) for name, file in weight_map.items()}
    return _opened(listing, places, _merged(headers))


async def _read_header(listing: Listing, path: str, *, alone: bool = False) -> Header:
    """Read the header of a file; `alone` if it is known to be the only file.

    Raises:
        UnsupportedFormatError: its tensors are, or may be, parts of larger tensors.
    """
    files, file_nbytes = listing.files, listing.nbytes_of[path]
    head = np.empty(min(HEAD_NBYTES, file_nbytes), np.uint8)
    await files.read_into(path, 0, [head])
    with located(files):
        nbytes = header_nbytes(head[:LENGTH_NBYTES].tobytes(), file_nbytes, file=path)
    text = head[LENGTH_NBYTES : LENGTH_NBYTES + nbytes].tobytes()
    if len(text) < nbytes:
        rest = np.empty(nbytes - len(text), np.uint8)
        await files.read_into(path, LENGTH_NBYTES + len(text), [rest])
        text += rest.tobytes()
        del rest
    del head
    with located(files):
        header = decode_header(text, file_nbytes, file=path)
        found = ""
        if holds_parts(header.metadata, file=path):
            found = f"its tensors are parts of larger ones, those of one rank; {_CONSOLIDATE}"
        elif not alone and SHARDS_KEY in header.metadata and _is_shard(place(files, path)):
            # The first shard of each tensor begins at 0, as a whole tensor does.
            found = (
                "these are the shards of one rank, whose tensors may be parts of larger ones; "
                f"{_CONSOLIDATE}; if a single rank wrote them, give the directory"
            )
        if found:
            raise unsupported(found, file=path, expected="whole tensors", found="parts of tensors")
    return header


def _is_shard(path: str) -> bool:
    return SHARD_NAME.fullmatch(posixpath.basename(path)) is not None


def _opened(
    listing: Listing, places: Mapping[str, tuple[int, Header]], metadata: Mapping[str, JsonValue]
) -> OpenCheckpoint:
    """Return the checkpoint of these tensors; `places` has number and header of each one's file."""
    tree = _saved_tree(listing.files, metadata, tuple(places))
    tables = RunTables()
    pieces: dict[str, Sequence[Piece]] = {}
    for leaf, (kind, name) in enumerate(zip(tree.leaves.kind, tree.tensors, strict=True)):
        extra = tree.leaves.extra.get(leaf)
        if name is None:
            tables.add_leaf(kind, tree.leaves.value[leaf])
        elif name in pieces:
            tables.add_tied(kind, pieces[name], extra)
        else:
            file, header = places[name]
            spec = header.specs[name]
            run = Run((0,) * len(spec.shape), spec.shape, file, header.offsets[name])
            pieces[name] = tables.add_array(kind, spec.dtype, [run], extra)
    return tables.open(
        listing,
        "safetensors",
        tree.structure,
        library="safetensors",
        metadata=tree.metadata,
        metrics=tree.metrics,
    )


def _saved_tree(
    files: CheckpointFiles, metadata: Mapping[str, JsonValue], names: tuple[str, ...]
) -> SavedTree:
    """Return the tree that the metadata describes, or a dict of all tensors by name.

    The metadata of converted asyncckpt checkpoints describes the tree. A description of other
    tensors than those of the files is ignored.
    """
    texts = {key: text for key, text in metadata.items() if isinstance(text, str)}
    with located(files):
        tree, others = decode_tree(texts, len(names), file="")
    if tree is not None:
        if {name for name in tree.tensors if name is not None} == set(names):
            return tree
        metadata = others
        logger.warning(
            "%s: the tensors are not those of the tree in its metadata; they are read by name",
            files.location,
        )
    count = len(names)
    structure = Structure((Node("dict", names, tuple(range(count))),), count)
    leaves = LeafTable([DEFAULT_KIND] * count, [None] * count, {}, {})
    return SavedTree(structure, leaves, names, metadata, {})


def _merged(headers: Mapping[str, Header]) -> dict[str, JsonValue]:
    """Merge the metadata of a set; a key whose text differs gets a dict of its texts by file."""
    texts_of: dict[str, dict[str, str]] = {}
    for path, header in headers.items():
        for key, text in header.metadata.items():
            texts_of.setdefault(key, {})[path] = text
    return {
        key: dict(texts) if len(set(texts.values())) > 1 else next(iter(texts.values()))
        for key, texts in texts_of.items()
    }


def _refuse_choice(location: str, names: Sequence[str]) -> NoReturn:
    some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "") or "no regular file"
    if any(map(_is_shard, names)):
        raise UnsupportedFormatError(
            f"{location}: these are the shards of ranks, whose tensors are parts of larger ones: "
            f"{some}; {_CONSOLIDATE}",
            location=location,
            expected="whole tensors",
            found=some,
        )
    raise UnsupportedFormatError(
        f"{location}: one safetensors file or one index is read, and here is {some}; nothing says "
        "which belong together: give the path of one file, or a directory with one index",
        location=location,
        expected="one file, or one index",
        found=some,
    )
