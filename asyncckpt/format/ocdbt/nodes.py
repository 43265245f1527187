"""Decoding of one B+tree node into columns, with absolute keys and absolute file paths."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

from asyncckpt.format.damage import corrupt
from asyncckpt.format.ocdbt.btree import MAX_ARITY
from asyncckpt.format.ocdbt.datafiles import (
    MAX_DATA_FILES,
    DataFile,
    Location,
    decode_data_files,
    used_file,
)
from asyncckpt.format.ocdbt.keys import MAX_KEY_NBYTES
from asyncckpt.format.ocdbt.wire import I64, MAX_BODY_NBYTES, NODE_MAGIC, Reader, unframe

MAX_KEYS_NBYTES = 1 << 30
"""Most bytes of all keys of a tree: keys share prefixes, so that a small node can expand a lot."""

_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class LeafNode:
    """Keys and values by row: a value is inline (`file` and `offset` -1) or in `files[file]`."""

    keys: list[bytes]
    files: tuple[DataFile, ...]
    file: I64
    offset: I64
    nbytes: I64
    inline: list[bytes | None]

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return len(self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class InteriorNode:
    """First key, common prefix length, location and statistics of each child, in key order."""

    height: int
    keys: list[bytes]
    prefix_nbytes: I64
    files: tuple[DataFile, ...]
    file: I64
    offset: I64
    nbytes: I64
    child_num_keys: I64
    child_tree_nbytes: I64
    child_indirect_nbytes: I64

    @property
    def num_keys(self) -> int:
        """Declared number of keys in all children."""
        return int(self.child_num_keys.sum())

    def child(self, row: int) -> Location:
        """Return the location of child `row`."""
        data_file = self.files[self.file[row]]
        return Location(
            data_file.path, int(self.offset[row]), int(self.nbytes[row]), data_file.base_path
        )


Node = LeafNode | InteriorNode


def decode_node(
    data: bytes,
    *,
    file: str,
    offset: int,
    expected_height: int | None = None,
    base_path: str = "",
    key_prefix: bytes = b"",
    max_nbytes: int = MAX_BODY_NBYTES,
    max_keys_nbytes: int = MAX_KEYS_NBYTES,
    max_entries: int = MAX_ARITY,
    max_files: int = MAX_DATA_FILES,
) -> Node:
    """Decode the node whose frame is `data`, found at `offset` in `file`.

    `expected_height` is that implied by the parent, None to accept any; `key_prefix` is the prefix
    of all keys, which the node omits. `base_path` is as in `Location`. The limits apply to the body
    (`max_nbytes`), all keys together, keys or children, and data files.

    Raises:
        CorruptCheckpointError: the node is damaged or exceeds a limit.
        UnsupportedFormatError: it is intact, but of a newer format version.
    """
    what = "the B+tree node"
    reader = unframe(data, NODE_MAGIC, what=what, file=file, offset=offset, max_nbytes=max_nbytes)
    height = reader.uint8()
    if expected_height is not None and height != expected_height:
        raise corrupt(
            what,
            f"its height is {height}, its parent says {expected_height}",
            file=file,
            offset=offset,
            expected=expected_height,
            found=height,
        )
    files = decode_data_files(reader, base_path=base_path, max_files=max_files)
    count = reader.count("entries", nbytes_each=3)
    most = min(max_entries, MAX_ARITY)
    if not 1 <= count <= most:
        raise reader.fault(f"{count} entries are not between 1 and {most}")
    keys, lengths, own_prefix = _decode_keys(
        reader, count, key_prefix, max_keys_nbytes, interior=height > 0
    )
    if height:
        if bool((own_prefix > lengths).any()):
            raise reader.fault("a common prefix is longer than its key")
        file_index, starts = _decode_places(reader, files, count)
        sizes, num_keys, tree, indirect = (reader.varints(count) for _ in range(4))
        _check_ranges(reader, starts, sizes)
        for total in (num_keys, tree, indirect):
            if float(total.sum(dtype=np.float64)) >= float(_INT64_MAX):
                raise reader.fault("its statistics pass 2^63")
        reader.end()
        return InteriorNode(
            height, keys, own_prefix, files, file_index, starts, sizes, num_keys, tree, indirect
        )
    nbytes = reader.varints(count)
    kinds = np.frombuffer(reader.take(count), np.uint8)
    if int(kinds.max()) > 1:
        raise reader.fault(f"value kind {int(kinds.max())} is unknown")
    in_file = kinds == 1
    file_index = np.full(count, -1, np.int64)
    starts = np.full(count, -1, np.int64)
    file_index[in_file], starts[in_file] = _decode_places(reader, files, int(in_file.sum()))
    _check_ranges(reader, starts[in_file], nbytes[in_file])
    sizes = nbytes[~in_file]
    if float(sizes.sum(dtype=np.float64)) != reader.remaining:
        raise reader.fault(
            f"its inline values do not fill the {reader.remaining} bytes that remain"
        )
    inline: list[bytes | None] = [None] * count
    for row, size in zip(np.flatnonzero(~in_file).tolist(), sizes.tolist(), strict=True):
        inline[row] = reader.take(size)
    return LeafNode(keys, files, file_index, starts, nbytes, inline)


def _decode_keys(
    reader: Reader, count: int, key_prefix: bytes, max_nbytes: int, *, interior: bool
) -> tuple[list[bytes], I64, I64]:
    below = MAX_KEY_NBYTES + 1
    base = len(key_prefix)
    shared = np.zeros(count, np.int64)
    shared[1:] = reader.varints(count - 1, below=below)
    suffix = reader.varints(count, below=below)
    prefix = reader.varints(count, below=below) if interior else np.empty(0, np.int64)
    lengths = shared + suffix
    reader.need(int(suffix.sum()), "bytes of keys")
    if int(lengths.max()) + base > MAX_KEY_NBYTES:
        raise reader.fault(f"a key is longer than {MAX_KEY_NBYTES} bytes")
    if bool((shared[1:] > lengths[:-1]).any()):
        raise reader.fault("a key shares more bytes with the one before it than that has")
    if int(lengths.sum()) + base * count > max_nbytes:
        raise reader.fault(f"its keys pass the limit of {max_nbytes} bytes")
    text = reader.take(int(suffix.sum()))
    cuts = (shared + base).tolist()
    ends = np.cumsum(suffix).tolist()
    keys = []
    key = key_prefix
    start = 0
    for cut, end in zip(cuts, ends, strict=True):
        key = key[:cut] + text[start:end]
        keys.append(key)
        start = end
    if not all(map(operator.lt, keys, keys[1:])):
        raise reader.fault("its keys are out of order")
    return keys, lengths + base, prefix + base if interior else prefix


def _decode_places(reader: Reader, files: tuple[DataFile, ...], count: int) -> tuple[I64, I64]:
    file_index = reader.varints(count)
    for index in np.unique(file_index).tolist():
        used_file(reader, files, index)
    return file_index, reader.varints(count)


def _check_ranges(reader: Reader, starts: I64, sizes: I64) -> None:
    if bool((starts > _INT64_MAX - sizes).any()):
        raise reader.fault("a byte range ends past 2^63")
