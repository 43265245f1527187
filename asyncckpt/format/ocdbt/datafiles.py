"""Data-file tables: the files that the entries of a manifest or node refer to.

A file's path relative to the database is transitive path + base path + relative path. The files
named in a node have the transitive and base path of the file that contains the node.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncckpt.format.damage import MAX_PATH_NBYTES, path_fault
from asyncckpt.format.ocdbt.wire import Reader, encode_varint, encode_varints

# Paths share prefixes, so that a small table can expand to a large one.
_MAX_TABLE_NBYTES = 1 << 26

MAX_DATA_FILES = 1 << 20
"""Rows of a table."""

MISSING = (1 << 64) - 1
"""Offset and length of a missing root."""


class DataFile(NamedTuple):
    """Row of a table: a path relative to the database, and the base path at its beginning.

    The transitive path is included in both; they may be empty.
    """

    path: str
    base_path: str


@dataclass(frozen=True, slots=True)
class Location:
    """Byte range of a file of the database.

    If it is a node, the files that the node names are relative to `base_path`.
    """

    file: str
    offset: int
    nbytes: int
    base_path: str = ""


def encode_data_files(paths: Sequence[str]) -> bytes:
    """Encode the table of these paths, in this order, without base paths."""
    shared: list[int] = []
    suffixes: list[bytes] = []
    previous = b""
    for path in paths:
        raw = path.encode()
        shared.append(len(os.path.commonprefix((previous, raw))))  # noqa: RUF071 - bytes of keys
        suffixes.append(raw[shared[-1] :])
        previous = raw
    return b"".join(
        (
            encode_varint(len(paths)),
            encode_varints(np.array(shared[1:], np.int64)),
            encode_varints(np.array(list(map(len, suffixes)), np.int64)),
            bytes(len(paths)),
            *suffixes,
        )
    )


def decode_data_files(
    reader: Reader, *, base_path: str = "", max_files: int = MAX_DATA_FILES
) -> tuple[DataFile, ...]:
    """Decode the table at the reader's cursor; `base_path` is the transitive path of the node."""
    count = reader.count("data files", nbytes_each=2)
    if not count:
        return ()
    if count > max_files:
        raise reader.fault(f"{count} data files are more than the limit of {max_files}")
    below = MAX_PATH_NBYTES + 1
    shared = [0, *reader.varints(count - 1, below=below).tolist()]
    suffix_nbytes = reader.varints(count, below=below).tolist()
    base_nbytes = reader.varints(count, below=below).tolist()
    if sum(shared) + sum(suffix_nbytes) > _MAX_TABLE_NBYTES:
        raise reader.fault(f"its data-file paths pass {_MAX_TABLE_NBYTES} bytes")
    files = []
    path, base = b"", b""
    for prefix, suffix, length in zip(shared, suffix_nbytes, base_nbytes, strict=True):
        if prefix > len(path):
            raise reader.fault(f"a path shares {prefix} bytes with one of {len(path)}")
        new = path[:prefix] + reader.take(suffix)
        if length > len(new):
            raise reader.fault(f"a base path of {length} bytes is longer than its path")
        if prefix > min(length, len(base)) and new[:length] != base:
            raise reader.fault("a path shares more than its base path with the one before")
        path, base = new, new[:length]
        try:
            row = DataFile(base_path + path.decode(), base_path + base.decode())
        except UnicodeDecodeError:
            raise reader.fault(f"the data-file path {path!r} is not UTF-8") from None
        # The table of a manifest without a root holds one empty path.
        fault = path_fault(row.path) if path else None
        if fault is not None:
            raise reader.fault(f"the data-file path {row.path!r} {fault}")
        files.append(row)
    return tuple(files)


def used_file(reader: Reader, files: Sequence[DataFile], index: int) -> DataFile:
    """Return the row that an entry refers to; it must exist and have a path."""
    if index >= len(files):
        raise reader.fault(f"data file {index} is not in a table of {len(files)}")
    if not files[index].path:
        raise reader.fault(f"data file {index} has an empty path")
    return files[index]
