"""zarr v3 arrays: the metadata document and the keys of chunks.

Source: zarr-specs v3 (core, and the codecs `bytes`, `zstd`, `crc32c`), as the `zarr3` driver of
TensorStore reads it. Written are a regular grid, the default key encoding with ``/``, and the
codecs `bytes` little endian, optionally `zstd`, and `crc32c`, in this order.
"""

# A stored document is never handed on: what it says is checked here, and whoever opens the array
# elsewhere builds the specification anew. A shape of 2^40 ends a process that trusts it.

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.faults import corrupt
from asyncckpt.spec import DTYPES, ITEMSIZES, ArraySpec, ChunkGrid

CRC_NBYTES = 4
"""What the `crc32c` codec adds behind the encoded bytes of a chunk."""

# Documents differ by (spec, chunk shape, level), of which a state has few beside its shapes.
_CACHED_DOCUMENTS = 8192


@dataclass(frozen=True, slots=True)
class ZarrLimits:
    """Bounds of what a stored document may claim.

    Attributes:
        max_rank: dimensions.
        max_array_nbytes: all elements.
        max_chunk_nbytes: one chunk, decoded.
        max_chunks: chunks of one array.
        max_document_nbytes: the document itself.
    """

    max_rank: int = 32
    max_array_nbytes: int = 1 << 48
    max_chunk_nbytes: int = 1 << 40
    max_chunks: int = 1 << 32
    max_document_nbytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """What a metadata document says.

    Attributes:
        spec: shape and dtype.
        chunk_shape: elements of a chunk per dimension.
        zstd_level: level of the `zstd` codec, or None without one.
        crc32c: whether a CRC-32C trails every chunk.
        fill_value: bytes of the element that missing chunks consist of.
    """

    spec: ArraySpec
    chunk_shape: tuple[int, ...]
    zstd_level: int | None = None
    crc32c: bool = True
    fill_value: bytes = b""

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid."""
        return ChunkGrid(self.spec.shape, self.chunk_shape)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk before compression."""
        return math.prod(self.chunk_shape) * self.spec.itemsize


@lru_cache(maxsize=_CACHED_DOCUMENTS)
def encode_metadata(
    spec: ArraySpec, chunk_shape: tuple[int, ...], zstd_level: int | None = None
) -> bytes:
    """The bytes of `zarr.json`, which arrays of one shape, dtype, chunk shape and level share."""
    configuration = {"configuration": {"endian": "little"}} if spec.itemsize > 1 else {}
    codecs: list[dict[str, object]] = [{"name": "bytes", **configuration}]
    if zstd_level is not None:
        codecs.append({"name": "zstd", "configuration": {"level": zstd_level, "checksum": False}})
    codecs.append({"name": "crc32c"})
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": spec.shape,
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill_value_json(spec.dtype),
        "codecs": codecs,
        "attributes": {},
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _fill_value_json(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if dtype.startswith(("int", "uint")) else 0.0


def fill_value_bytes(dtype: str) -> bytes:
    """One element of zero, the fill value of every array we write."""
    return bytes(ITEMSIZES[dtype])


# ------------------------------------------------------------------------------------------ keys


def metadata_key(name: str) -> bytes:
    """Key of the metadata document of array `name`."""
    return f"{name}/zarr.json".encode()


def chunk_key(name: str, cell: Sequence[int]) -> bytes:
    """Key of one chunk: `<name>/c/0/0`; `<name>/c` for rank 0."""
    return "/".join((name, "c", *map(str, cell))).encode()


def chunk_keys(name: str, counts: Sequence[int]) -> list[bytes]:
    """Keys of all chunks of a grid of this many cells per dimension, in C order."""
    head = f"{name}/c".encode()
    if not counts:
        return [head]
    axes = [[f"/{i}".encode() for i in range(count)] for count in counts]
    if len(axes) == 1:
        return [head + tail for tail in axes[0]]
    return [head + b"".join(tails) for tails in itertools.product(*axes)]


# -------------------------------------------------------------------------------------- decoding


def decode_metadata(data: bytes, *, file: str, limits: ZarrLimits | None = None) -> ZarrArray:
    """The array that a document describes, within limits; `file` is named in errors.

    Raises:
        CorruptCheckpointError: the document is damaged, or claims more than the limits.
        UnsupportedFormatError: it is intact, but uses a dtype, grid, key encoding or codec that is
            not read here.
    """
    limits = limits or ZarrLimits()
    return _Document(file, limits).decode(data)


_KNOWN_MEMBERS = frozenset(
    (
        "zarr_format",
        "node_type",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "fill_value",
        "codecs",
        "attributes",
        "dimension_names",
        "storage_transformers",
    )
)


@dataclass(frozen=True, slots=True)
class _Document:
    file: str
    limits: ZarrLimits

    def decode(self, data: bytes) -> ZarrArray:
        if len(data) > self.limits.max_document_nbytes:
            raise self.fault(f"it has {len(data)} bytes")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.fault(f"it is not JSON ({error})") from None
        if not isinstance(document, dict):
            raise self.fault("it is not a JSON object")
        if document.get("zarr_format") != 3 or isinstance(document.get("zarr_format"), bool):
            raise self.unsupported("zarr_format", document.get("zarr_format"), 3)
        if document.get("node_type") != "array":
            raise self.unsupported("node_type", document.get("node_type"), "array")
        for name, member in document.items():
            # The specification lets readers ignore what says that it need not be understood.
            optional = isinstance(member, dict) and member.get("must_understand") is False
            if name not in _KNOWN_MEMBERS and not optional:
                raise self.unsupported("member", name, sorted(_KNOWN_MEMBERS))
        if document.get("storage_transformers"):
            raise self.unsupported("storage_transformers", document["storage_transformers"], [])
        shape = self.integers(document.get("shape"), "shape", least=0)
        dtype = document.get("data_type")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.unsupported("data_type", dtype, list(DTYPES))
        grid = self.named(document.get("chunk_grid"), "chunk_grid")
        if grid[0] != "regular":
            raise self.unsupported("chunk_grid", grid[0], "regular")
        chunk_shape = self.integers(grid[1].get("chunk_shape"), "chunk_shape", least=1)
        if len(chunk_shape) != len(shape):
            raise self.fault(f"its chunks have rank {len(chunk_shape)}, the array {len(shape)}")
        keys = self.named(document.get("chunk_key_encoding"), "chunk_key_encoding")
        separator = keys[1].get("separator", "/")
        if (keys[0], separator) != ("default", "/"):
            raise self.unsupported("chunk_key_encoding", (keys[0], separator), ("default", "/"))
        zstd_level, crc = self.codecs(document.get("codecs"), ITEMSIZES[dtype])
        fill = self.fill_value(document.get("fill_value"), dtype)
        array = ZarrArray(ArraySpec(shape, dtype), chunk_shape, zstd_level, crc, fill)
        for what, found, limit in (
            ("bytes in all", array.spec.nbytes, self.limits.max_array_nbytes),
            ("bytes per chunk", array.chunk_nbytes, self.limits.max_chunk_nbytes),
            ("chunks", array.grid.chunk_count, self.limits.max_chunks),
        ):
            if found > limit:
                raise self.fault(f"it claims {found} {what}, the limit is {limit}")
        return array

    def fault(self, reason: str) -> CorruptCheckpointError:
        return corrupt("the zarr metadata", reason, file=self.file)

    def unsupported(self, what: str, found: object, expected: object) -> UnsupportedFormatError:
        shown = repr(found)[:120]
        return UnsupportedFormatError(
            f"{self.file}: the zarr array has {what} {shown}, which is not read here; expected "
            f"{expected}; rewrite the array with TensorStore or zarr",
            location=self.file,
            expected=expected,
            found=found,
        )

    def integers(self, value: object, what: str, *, least: int) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > self.limits.max_rank:
            raise self.fault(f"its {what} is not a list of at most {self.limits.max_rank} numbers")
        for n in value:
            if type(n) is not int or not least <= n < 1 << 63:
                raise self.fault(f"its {what} has the entry {repr(n)[:40]}")
        return tuple(value)

    def named(self, value: object, what: str) -> tuple[str, dict[str, Any]]:
        if isinstance(value, str):
            return value, {}
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise self.fault(f"its {what} has no name")
        configuration = value.get("configuration", {})
        if not isinstance(configuration, dict):
            raise self.fault(f"the configuration of its {what} is not an object")
        return value["name"], configuration

    def codecs(self, value: object, itemsize: int) -> tuple[int | None, bool]:
        if not isinstance(value, list) or len(value) > 16:
            raise self.fault("its codecs are not a list of at most 16")
        chain = [self.named(codec, "codec") for codec in value]
        names = [name for name, _ in chain]
        if names not in (
            ["bytes"],
            ["bytes", "crc32c"],
            ["bytes", "zstd"],
            ["bytes", "zstd", "crc32c"],
        ):
            raise self.unsupported("codecs", names, ["bytes", "zstd (optional)", "crc32c"])
        endian = chain[0][1].get("endian", "little" if itemsize == 1 else None)
        if endian != "little" and (itemsize > 1 or endian != "big"):
            raise self.unsupported("endian", endian, "little")
        level = None
        if "zstd" in names:
            level = chain[1][1].get("level")
            if type(level) is not int or not -(1 << 17) <= level <= 22:
                raise self.fault(f"its zstd level is {repr(level)[:40]}")
        return level, "crc32c" in names

    def fill_value(self, value: object, dtype: str) -> bytes:
        complex_ = dtype.startswith("complex")
        parts = value if complex_ and isinstance(value, list) else [value]
        if len(parts) != (2 if complex_ else 1):
            raise self.fault("its fill value has the wrong number of parts")
        parser = _fill_parser(dtype)
        try:
            return b"".join(parser(part) for part in parts)
        except (ValueError, TypeError, OverflowError):
            raise self.fault(f"its fill value {repr(value)[:40]} is no {dtype}") from None


_HEX = re.compile(r"0x[0-9a-fA-F]+")
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _fill_parser(dtype: str) -> Callable[[object], bytes]:
    """Turns one JSON number of a fill value into its bytes; raises ValueError where it is none."""
    part = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    kind = DTYPES[part]

    def parse(value: object) -> bytes:
        if part == "bool":
            if type(value) is not bool:
                raise ValueError
            return bytes([value])
        if part.startswith(("int", "uint")):
            if type(value) is not int:
                raise ValueError
            if part == "int4" and not -8 <= value <= 7:
                raise OverflowError
            return np.array(value, kind).tobytes()
        if isinstance(value, str):
            if _HEX.fullmatch(value):
                return int(value, 16).to_bytes(kind.itemsize, "little")
            if value not in _SPECIAL:
                raise ValueError
            value = _SPECIAL[value]
        if type(value) not in (int, float):
            raise ValueError
        return np.array(value, kind).tobytes()

    return parse
