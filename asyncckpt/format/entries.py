"""Entries: a report of one process's writes, for the process that commits the checkpoint.

Layout, all integers little endian: magic ``ACKE`` and version `uint32`; length of the header
`uint32`; the header, a JSON object that counts the values of the columns; the columns; then the
CRC-32C `uint32` of all bytes before it. An entries object exists from the end of a process's writes
until the record is published. It is not part of the checkpoint.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt, path_fault
from asyncckpt.format.fields import MAX_RANK, check_form
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.reports import FileInfo
from asyncckpt.spec import Box

MAGIC = b"ACKE"
VERSION = 2

MAX_ENTRIES_NBYTES = 1 << 33
"""Largest entries object: 28 bytes per chunk that the process wrote."""

_HEAD = struct.Struct("<4sII")
_PROCESS: dict[str, Any] = {"save_id": str, "process": (1 << 63) - 1, "digest": str, "facts": dict}
"""Members of the header that equal fields of `Entries`."""

_GROUPS: Mapping[str, Mapping[str, str]] = {
    "written": {"chunk": "<i8", "file": "<i4", "offset": "<i8", "nbytes": "<i8", "crc": "<u4"},
    "small": {"value_chunk": "<i8", "value_nbytes": "<i4"},
    "checked": {"checked": "<i8", "checked_crc": "<u4"},
    "scalar": {"scalar": "<i8", "scalar_crc": "<u4"},
    "values": {"values": "u1"},
    "part": {"part_array": "<i8", "part_nbytes": "<i8", "part_crc": "<u4"},
    "part_box": {"part_box": "<i8"},
    "part_values": {"part_values": "u1"},
}
"""Groups of columns of equal length: the type of each column."""

_FIELDS = [*_GROUPS["written"], *_GROUPS["checked"], *_GROUPS["scalar"]]
"""Columns that equal fields of `Entries`."""

_HEADER = {**_PROCESS, "files": list, "counts": dict.fromkeys(_GROUPS, MAX_ENTRIES_NBYTES)}


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Boxes of small leaves that no process holds whole.

    Attributes:
        array: index of the leaf's array per box, `int64`.
        nbytes: bytes of the box's elements; 0 if another process sends them, `int64`.
        crc: CRC-32C of the box's elements, computed by every process that holds them, `uint32`.
        box: offset and shape, `int64[rows, 2, rank]`. `rank` is the highest of all leaves; others
            have offset 0 and shape 1 in the dimensions that they lack.
        values: the elements of all boxes, each in C order, `uint8`.
    """

    array: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    crc: npt.NDArray[np.uint32]
    box: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.array)

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Box, bytes, int]]) -> Parts:
        """Return the parts from rows of array, box, elements (may be empty) and CRC-32C."""
        rank = max([len(box.shape) for _, box, _, _ in parts], default=0)
        boxes: list[int] = []
        for _, box, _, _ in parts:
            lacking = rank - len(box.shape)
            boxes += *box.offset, *[0] * lacking, *box.shape, *[1] * lacking
        values = [data for _, _, data, _ in parts]
        return cls(
            np.array([array for array, _, _, _ in parts], np.int64),
            np.array(list(map(len, values)), np.int64),
            np.array([crc for _, _, _, crc in parts], np.uint32),
            np.array(boxes, np.int64).reshape(len(parts), 2, rank),
            np.frombuffer(b"".join(values), np.uint8),
        )

    @classmethod
    def joined(cls, all_parts: Sequence[Parts]) -> Parts:
        """Return the concatenated parts of several processes."""
        all_parts = [NOTHING, *all_parts]
        rank = max(parts.box.shape[2] for parts in all_parts)
        boxes = []
        for parts in all_parts:
            box = np.zeros((len(parts), 2, rank), np.int64)
            box[:, 1] = 1
            box[:, :, : parts.box.shape[2]] = parts.box
            boxes.append(box)
        columns = ("array", "nbytes", "crc", "values")
        joined = {c: np.concatenate([getattr(p, c) for p in all_parts]) for c in columns}
        return cls(box=np.concatenate(boxes), **joined)


NOTHING = Parts.of(())


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Entries of one process.

    Attributes:
        save_id: the attempt, 32 hex digits.
        digest: digest of the schema of its plan.
        chunk: numbers of the chunks in its data files, `int64`.
        file: index into `files` of each chunk, `int64`.
        offset: first byte of each chunk in its file, `int64`.
        nbytes: stored length of each chunk with its trailer, `int64`.
        crc: CRC-32C of each chunk without its trailer, `uint32`.
        values: stored bytes, trailer included, of small chunks by number.
        parts: boxes of small leaves that are sharded over several processes.
        checked: numbers of chunks whose checksum every holder computed, `int64`.
        checked_crc: CRC-32C of the payload of each, before any compression, `uint32`.
        scalar: ordinals of the scalar leaves that the process has, `int64`.
        scalar_crc: CRC-32C of type and value of each, `uint32`.
        facts: other information for the committing process: JSON.
    """

    save_id: str
    process: int
    digest: str
    files: Sequence[FileInfo]
    chunk: npt.NDArray[np.int64]
    file: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    crc: npt.NDArray[np.uint32]
    values: Mapping[int, bytes]
    parts: Parts
    checked: npt.NDArray[np.int64]
    checked_crc: npt.NDArray[np.uint32]
    scalar: npt.NDArray[np.int64]
    scalar_crc: npt.NDArray[np.uint32]
    facts: dict[str, Any]


def encode_entries(entries: Entries) -> bytes:
    """Encode the entries."""
    columns: dict[str, npt.NDArray[Any]] = {
        **{name: getattr(entries, name) for name in _FIELDS},
        "value_chunk": np.array(list(entries.values), np.int64),
        "value_nbytes": np.array(list(map(len, entries.values.values())), np.int64),
        "values": np.frombuffer(b"".join(entries.values.values()), np.uint8),
        **{f"part_{name}": getattr(entries.parts, name) for name in Parts.__slots__},
    }
    header = json.dumps(
        {
            **{name: getattr(entries, name) for name in _PROCESS},
            "files": [[file.path, file.nbytes, file.crc32c] for file in entries.files],
            "counts": {group: columns[next(iter(kinds))].size for group, kinds in _GROUPS.items()},
        },
        separators=(",", ":"),
    ).encode()
    blocks = [
        columns[name].astype(kind, copy=False).tobytes()
        for kinds in _GROUPS.values()
        for name, kind in kinds.items()
    ]
    data = b"".join((_HEAD.pack(MAGIC, VERSION, len(header)), header, *blocks))
    return data + crc32c(data).to_bytes(CRC_NBYTES, "little")


def decode_entries(data: bytes, *, file: str) -> Entries:
    """Decode entries; `file` is named in errors.

    Raises:
        CorruptCheckpointError: they are damaged, or another release wrote them.
    """

    def fault(reason: str) -> CorruptCheckpointError:
        return corrupt("the entries of a process", reason, file=file)

    if len(data) < _HEAD.size + CRC_NBYTES:
        raise fault(f"they have {len(data)} bytes")
    magic, version, header_nbytes = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise fault(f"they begin with {magic.hex()}, version {version}")
    crc = crc32c(memoryview(data)[:-CRC_NBYTES])
    if int.from_bytes(data[-CRC_NBYTES:], "little") != crc:
        raise fault(f"their CRC-32C is {crc:08x}, not the stored one")
    body = _HEAD.size + header_nbytes
    try:
        # Not limited further: a process of the same release wrote it, and may have long scalars.
        header = json.loads(data[_HEAD.size : body].decode())
        check_form(header, _HEADER)
        return _entries(header, _columns(data, body, header["counts"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise fault(f"{type(error).__name__}: {error}") from None


def _columns(data: bytes, start: int, counts: Mapping[str, int]) -> dict[str, npt.NDArray[Any]]:
    columns: dict[str, npt.NDArray[Any]] = {}
    for group, kinds in _GROUPS.items():
        for name, kind in kinds.items():
            column = np.frombuffer(data, kind, counts[group], start)
            start += column.nbytes
            if column.dtype.kind == "i":
                column = column.astype(np.int64)
                if int(column.min(initial=0)) < 0:
                    raise ValueError(f"column {name} has negative values")
            columns[name] = column
    if start != len(data) - CRC_NBYTES:
        raise ValueError(f"its columns end at byte {start} of {len(data)}")
    return columns


def _entries(header: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]) -> Entries:
    files: list[FileInfo] = []
    for path, nbytes, crc in header["files"]:
        if type(path) is not str or path_fault(path) is not None:
            raise ValueError(f"a file is named {path!r:.80}")
        if type(nbytes) is not int or type(crc) is not int or nbytes < 0:
            raise ValueError(f"{path} has {nbytes!r:.40} bytes and checksum {crc!r:.40}")
        files.append(FileInfo(path, nbytes, crc))
    if columns["file"].size and int(columns["file"].max()) >= len(files):
        raise ValueError(f"a chunk is in file {int(columns['file'].max())} of {len(files)}")
    sizes = columns["value_nbytes"]
    ends = np.cumsum(sizes).tolist()
    if (ends or [0])[-1] != columns["values"].size:
        raise ValueError("small values and their lengths differ")
    stored, chunks = columns["values"].tobytes(), columns["value_chunk"].tolist()
    spans = itertools.pairwise([0, *ends])
    values = {chunk: stored[a:b] for chunk, (a, b) in zip(chunks, spans, strict=True)}
    fields: dict[str, Any] = {name: header[name] for name in _PROCESS}
    fields |= {name: columns[name] for name in _FIELDS}
    return Entries(files=tuple(files), values=values, parts=_parts(columns), **fields)


def _parts(columns: Mapping[str, npt.NDArray[Any]]) -> Parts:
    array, nbytes, crc, box, values = (columns[f"part_{name}"] for name in Parts.__slots__)
    rank, rest = divmod(box.size, max(1, 2 * len(array)))
    if rest or rank > MAX_RANK:
        raise ValueError(f"{len(array)} parts of leaves have {box.size} offsets and extents")
    if int(nbytes.max(initial=0)) > values.size or int(nbytes.sum()) != values.size:
        raise ValueError("parts of leaves and their lengths differ")
    return Parts(array, nbytes, crc, box.reshape(len(array), 2, rank), values)
