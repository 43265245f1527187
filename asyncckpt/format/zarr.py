"""zarr arrays of version 2 and 3: the array as a value, chunk keys, fill values, checks.

`zarr2.decode_metadata` and `zarr3.decode_metadata` return a `ZarrArray` for a stored document.
"""

# Rule 1: a stored document never reaches TensorStore, which gets a new specification built from the
#   checked values: a shape of 2^40 kills a process that trusts it.

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.damage import corrupt, unsupported
from asyncckpt.format.fields import MAX_RANK, parse_object
from asyncckpt.spec import DTYPES, ArraySpec, ChunkGrid, nonempty_size

# Limits of what a stored document may claim.
MAX_ARRAY_NBYTES = 1 << 48
MAX_CHUNK_NBYTES = 1 << 40
MAX_CHUNKS = 1 << 32

MAX_DOCUMENT_NBYTES = 1 << 20
"""Longest metadata document."""

MAX_CODECS = 16
"""Codecs of one array, including those inside shards."""


# ----------------------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Encoding of the cell of a chunk as the end of its key, after the name of the array.

    Attributes:
        prefix: whether this part begins with ``c``, as in the default encoding of version 3.
        separator: separator of the numbers, ``/`` or ``.``.
    """

    prefix: bool = True
    separator: str = "/"

    def all(self, base: bytes, counts: Sequence[int]) -> list[bytes]:
        """Return the keys of all chunks, in C order, of a grid with `counts` cells per dimension.

        `base` is their prefix: the name of the array and a ``/``, or empty.
        """
        if not counts:
            return [base + (b"c" if self.prefix else b"0")]
        if 0 in counts:
            return []  # the other counts may be huge
        separator = self.separator.encode()
        keys = [base + b"c"] if self.prefix else [base]
        for axis, count in enumerate(counts):
            between = separator if axis or self.prefix else b""
            tails = [b"%s%d" % (between, number) for number in range(count)]
            keys = [key + tail for key in keys for tail in tails]
        return keys


@dataclass(frozen=True, slots=True)
class Chain:
    """Chain of codecs from the elements of a chunk to its stored bytes, in the order of encoding.

    Attributes:
        order: dimensions in storage order, slowest first; empty for C order.
        big_endian: whether elements are stored most significant byte first.
        shards: the chunks inside the chunk; None if there are none.
        packing: names of the bytes-to-bytes codecs: `zstd`, `gzip`, `zlib`, `bz2`, `blosc` and
            `crc32c`.
    """

    order: tuple[int, ...] = ()
    big_endian: bool = False
    shards: Shards | None = None
    packing: tuple[str, ...] = ()

    @property
    def crc32c(self) -> bool:
        """Whether a CRC-32C trails the stored bytes."""
        return self.packing[-1:] == ("crc32c",)


@dataclass(frozen=True, slots=True)
class Shards:
    """Codec `sharding_indexed`: the chunks inside one stored chunk.

    Attributes:
        chunk_shape: elements of a chunk per dimension; divides the shape of the shard.
        chain: codecs of these chunks.
        index_crc32c: whether a CRC-32C follows the index.
        index_big_endian: whether its numbers are stored most significant byte first.
        index_at_start: whether the index precedes the chunks.
    """

    chunk_shape: tuple[int, ...]
    chain: Chain
    index_crc32c: bool = True
    index_big_endian: bool = False
    index_at_start: bool = False


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """Array described by a metadata document.

    Attributes:
        chunk_shape: elements per dimension under one key.
        fill_value: bytes of an element in chunks that are not stored.
    """

    spec: ArraySpec
    chunk_shape: tuple[int, ...]
    chain: Chain
    fill_value: bytes
    keys: ChunkKeys

    @property
    def grid(self) -> ChunkGrid:
        """Grid of the stored chunks."""
        return ChunkGrid(self.spec.shape, self.chunk_shape)


# -------------------------------------------------------------------------------------- documents


@dataclass(frozen=True, slots=True)
class Document:
    """Checks of a metadata document; errors name `file`."""

    file: str

    def members(self, data: bytes) -> dict[str, Any]:
        """Parse the JSON object."""
        return parse_object(
            data, "the zarr metadata", file=self.file, most_nbytes=MAX_DOCUMENT_NBYTES
        )

    def fault(self, reason: str) -> CorruptCheckpointError:
        """Return the error for an inconsistent document."""
        return corrupt("the zarr metadata", reason, file=self.file)

    def unsupported(self, what: str, found: object, expected: object) -> UnsupportedFormatError:
        """Return the error for a feature that asyncckpt does not read."""
        shown = repr(found)[:120]
        return unsupported(
            f"the zarr array has {what} {shown}, which is not read here; expected {expected}; "
            "rewrite the array with TensorStore or zarr",
            file=self.file,
            expected=expected,
            found=found,
        )

    def integers(self, value: object, what: str, *, least: int) -> tuple[int, ...]:
        """Return a list of at most `MAX_RANK` integers as a tuple."""
        if not isinstance(value, list) or len(value) > MAX_RANK:
            raise self.fault(f"its {what} is not a list of at most {MAX_RANK} numbers")
        for n in value:
            if type(n) is not int or not least <= n < 1 << 63:
                raise self.fault(f"its {what} has the entry {repr(n)[:40]}")
        return tuple(value)

    def check_limits(self, spec: ArraySpec, chunk_shape: tuple[int, ...]) -> None:
        """Raise if the array claims more than the limits."""
        if len(chunk_shape) != len(spec.shape):
            raise self.fault(
                f"its chunks have rank {len(chunk_shape)}, the array {len(spec.shape)}"
            )
        grid = ChunkGrid(spec.shape, chunk_shape)
        for what, found, limit in (
            ("bytes in total", nonempty_size(spec.shape) * spec.itemsize, MAX_ARRAY_NBYTES),
            ("bytes per chunk", grid.chunk_size * spec.itemsize, MAX_CHUNK_NBYTES),
            ("chunks", grid.chunk_count, MAX_CHUNKS),
        ):
            if found > limit:
                raise self.fault(f"it claims {found} {what}, the limit is {limit}")

    def fill_value(self, value: object, dtype: str) -> bytes:
        """Return the bytes of one element."""
        complex_ = dtype.startswith("complex")
        parts = value if complex_ and isinstance(value, list) else [value]
        if len(parts) != (2 if complex_ else 1):
            raise self.fault("its fill value has the wrong number of parts")
        part_dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        try:
            return b"".join(_fill_bytes(part, part_dtype) for part in parts)
        except (ValueError, TypeError, OverflowError):
            raise self.fault(f"its fill value {repr(value)[:40]} is not a {dtype}") from None


# ------------------------------------------------------------------------------------ fill values


_HEX = re.compile(r"0x[0-9a-fA-F]+")
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _fill_bytes(value: object, dtype: str) -> bytes:
    """Encode one JSON number of a fill value; raise ValueError or OverflowError if it cannot."""
    kind = DTYPES[dtype]
    if dtype == "bool":
        if type(value) is not bool:
            raise ValueError
        return bytes([value])
    if dtype.startswith(("int", "uint")):
        if type(value) is not int:
            raise ValueError
        stored = np.array(value, kind)
        if stored.item() != value:  # ml_dtypes wraps values that do not fit
            raise OverflowError
        return stored.tobytes()
    if isinstance(value, str):
        if _HEX.fullmatch(value):
            return int(value, 16).to_bytes(kind.itemsize, "little")
        if value not in _SPECIAL:
            raise ValueError
        value = _SPECIAL[value]
    if type(value) not in (int, float):
        raise ValueError
    if dtype == "float8_e8m0fnu" and value == 0:
        return b"\0"  # the smallest value, as in TensorStore: the dtype has no zero
    with np.errstate(over="ignore"):
        return np.array(value, kind).tobytes()
