"""Decoding of one B+tree node, with absolute keys and absolute file paths."""

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
from asyncckpt.format.ocdbt.wire import I64, INT64_MAX, MAX_BODY_NBYTES, NODE_MAGIC, Reader, unframe

MAX_KEYS_NBYTES = 1 << 30
"""Most bytes of all keys of a tree: keys share prefixes, so that a small node can expand a lot."""

Value = bytes | tuple[str, int, int]
"""A value itself, or the file, first byte and length of one in a data file."""


@dataclass(frozen=True, slots=True)
class Child:
    """Node as its parent describes it.

    Attributes:
        first_key: lower bound of its keys.
        prefix: beginning of all its keys, which it omits.
        num_keys: keys of all leaves from it down.
    """

    location: Location
    first_key: bytes
    prefix: bytes
    num_keys: int


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
    values_base: str = "",
) -> dict[bytes, Value] | list[Child]:
    """Decode the node whose frame is `data`, found at `offset` in `file`.

    Returns the values of a leaf by key, or the children of an interior node; both in key order.

    `expected_height` is that implied by the parent, None to accept any; `key_prefix` is the prefix
    of all keys, which the node omits. `base_path` is as in `Location`. The limits apply to the body
    (`max_nbytes`), all keys together, keys or children, and data files. The paths in values are
    `values_base` followed by a path relative to the database.

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
            if float(total.sum(dtype=np.float64)) >= float(INT64_MAX):
                raise reader.fault("its statistics pass 2^63")
        reader.end()
        columns = [c.tolist() for c in (file_index, starts, sizes, own_prefix, num_keys)]
        return [
            Child(Location(files[n].path, at, size, files[n].base_path), key, key[:prefix], below)
            for key, n, at, size, prefix, below in zip(keys, *columns, strict=True)
        ]
    nbytes = reader.varints(count)
    kinds = np.frombuffer(reader.take(count), np.uint8)
    if int(kinds.max()) > 1:
        raise reader.fault(f"value kind {int(kinds.max())} is unknown")
    in_file = kinds == 1
    file_index, starts = _decode_places(reader, files, int(in_file.sum()))
    sizes = nbytes[in_file]
    _check_ranges(reader, starts, sizes)
    if float(nbytes[~in_file].sum(dtype=np.float64)) != reader.remaining:
        raise reader.fault(
            f"its inline values do not fill the {reader.remaining} bytes that remain"
        )
    paths = [values_base + data_file.path for data_file in files]
    indirect_paths = map(paths.__getitem__, file_index.tolist())
    places = zip(indirect_paths, starts.tolist(), sizes.tolist(), strict=True)
    rows = zip(keys, in_file.tolist(), nbytes.tolist(), strict=True)
    return {key: next(places) if kind else reader.take(size) for key, kind, size in rows}


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
    if bool((starts > INT64_MAX - sizes).any()):
        raise reader.fault("a byte range ends past 2^63")
