"""zarr v3 arrays: the metadata document and the keys of chunks.

Source: zarr-specs v3 (core, and the codecs `bytes`, `transpose`, `gzip`, `zstd`, `blosc`, `crc32c`
and `sharding_indexed`), as the `zarr3` driver of TensorStore reads it. asyncckpt writes a regular
grid, the default key encoding with ``/``, and the codecs `bytes` little endian, optionally `zstd`,
and `crc32c`, in this order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from asyncckpt.format.zarr import MAX_CODECS, Chain, ChunkKeys, Document, Shards, ZarrArray
from asyncckpt.spec import DTYPES, ArraySpec, numeric_class

CRC_NBYTES = 4
"""Bytes that the `crc32c` codec appends to a chunk."""

METADATA_NAME = "zarr.json"
"""Last part of the key of a metadata document."""

_ZEROS = {"bool": False, "int": 0, "float": 0.0, "complex": [0.0, 0.0]}


# A state has few combinations of spec, chunk shape and level.
@lru_cache(maxsize=8192)
def encode_metadata(
    spec: ArraySpec, chunk_shape: tuple[int, ...], zstd_level: int | None = None
) -> bytes:
    """Encode `zarr.json`, which arrays of equal shape, dtype, chunk shape and level share."""
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
        "fill_value": _ZEROS[numeric_class(spec.dtype)],
        "codecs": codecs,
        "attributes": {},
    }
    return json.dumps(document, separators=(",", ":")).encode()


# ------------------------------------------------------------------------------------------ keys


def metadata_key(name: str) -> bytes:
    """Return the key of the metadata document of array `name`."""
    return f"{name}/{METADATA_NAME}".encode()


def chunk_keys(name: str, counts: Sequence[int]) -> list[bytes]:
    """Return the keys of all chunks, in C order, of a grid with `counts` cells per dimension."""
    return ChunkKeys().all(f"{name}/".encode(), counts)


# -------------------------------------------------------------------------------------- decoding


def decode_metadata(data: bytes, *, file: str) -> ZarrArray | None:
    """Decode a metadata document within limits; return None for a group. Errors name `file`.

    Raises:
        CorruptCheckpointError: the document is damaged, or claims more than the limits.
        UnsupportedFormatError: it is intact, but has an unsupported dtype, grid, key encoding or
            codec.
    """
    return _Zarr3(file).decode(data)


_KNOWN_MEMBERS = frozenset(
    "zarr_format node_type shape data_type chunk_grid chunk_key_encoding fill_value codecs "
    "attributes dimension_names storage_transformers".split()
)
_SEPARATORS = {"default": "/", "v2": "."}
_PACKING = ("zstd", "gzip", "blosc", "crc32c")
_CODECS = ("transpose", "bytes", "sharding_indexed", *_PACKING)


@dataclass(frozen=True, slots=True)
class _Zarr3(Document):
    def decode(self, data: bytes) -> ZarrArray | None:
        document = self.members(data)
        if document.get("node_type") == "group":
            return None
        if document.get("zarr_format") != 3:
            raise self.unsupported("zarr_format", document.get("zarr_format"), 3)
        if document.get("node_type") != "array":
            raise self.unsupported("node_type", document.get("node_type"), "array")
        for name, member in document.items():
            # Readers may ignore members that need not be understood.
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
        fill = self.fill_value(document.get("fill_value"), dtype)
        keys = self.chunk_keys(document.get("chunk_key_encoding"))
        spec = ArraySpec(shape, dtype)
        self.check_limits(spec, chunk_shape)
        chain = self.chain(document.get("codecs"), chunk_shape, spec.itemsize, MAX_CODECS)
        return ZarrArray(spec, chunk_shape, chain, fill, keys)

    def named(self, value: object, what: str) -> tuple[str, dict[str, Any]]:
        if isinstance(value, str):
            return value, {}
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise self.fault(f"its {what} has no name")
        configuration = value.get("configuration", {})
        if not isinstance(configuration, dict):
            raise self.fault(f"the configuration of its {what} is not an object")
        return value["name"], configuration

    def chunk_keys(self, value: object) -> ChunkKeys:
        name, configuration = self.named(value, "chunk_key_encoding")
        separator = configuration.get("separator", _SEPARATORS.get(name))
        if name not in _SEPARATORS or separator not in ("/", "."):
            raise self.unsupported(
                "chunk_key_encoding", (name, separator), "default or v2, with / or ."
            )
        return ChunkKeys(name == "default", str(separator))

    def chain(self, value: object, chunk_shape: tuple[int, ...], itemsize: int, most: int) -> Chain:
        """Decode the codecs of chunks of this shape; at most `most` are allowed."""
        if not isinstance(value, list) or len(value) > most:
            raise self.fault(f"its codecs are not a list of at most {MAX_CODECS} in all")
        codecs = [self.named(codec, "codec") for codec in value]
        order: tuple[int, ...] = tuple(range(len(chunk_shape)))
        at = 0
        while at < len(codecs) and codecs[at][0] == "transpose":
            order = tuple(order[n] for n in self.permutation(codecs[at][1], len(chunk_shape)))
            at += 1
        names = [name for name, _ in codecs]
        rest = names[at + 1 :]
        if names[at : at + 1] not in (["bytes"], ["sharding_indexed"]) or not set(rest) <= set(
            _PACKING
        ):
            raise self.unsupported("codecs", names, list(_CODECS))
        for name, configuration in codecs[at + 1 :]:
            if name == "zstd":
                level = configuration.get("level")
                if type(level) is not int or not -(1 << 17) <= level <= 22:
                    raise self.fault(f"its zstd level is {repr(level)[:40]}")
        in_order = () if order == tuple(range(len(order))) else order
        configuration = codecs[at][1]
        if names[at] == "bytes":
            endian = configuration.get("endian", "little" if itemsize == 1 else None)
            if endian not in ("little", "big"):
                raise self.unsupported("endian", endian, "little or big")
            return Chain(in_order, endian == "big" and itemsize > 1, None, tuple(rest))
        if rest:
            raise self.unsupported("codecs", names, "nothing after sharding_indexed")
        stored_shape = tuple(chunk_shape[n] for n in order)
        shards = self.shards(configuration, stored_shape, itemsize, most - len(codecs))
        return Chain(in_order, False, shards)

    def permutation(self, configuration: dict[str, Any], rank: int) -> tuple[int, ...]:
        order = configuration.get("order")
        if order in ("C", "F"):  # from older writers
            return tuple(range(rank)) if order == "C" else tuple(range(rank))[::-1]
        numbers = self.integers(order, "transpose order", least=0)
        if sorted(numbers) != list(range(rank)):
            raise self.fault(f"its transpose order is {list(numbers)}, the rank {rank}")
        return numbers

    def shards(
        self, configuration: dict[str, Any], shard_shape: tuple[int, ...], itemsize: int, most: int
    ) -> Shards:
        chunk_shape = self.integers(configuration.get("chunk_shape"), "chunks in shards", least=1)
        if len(chunk_shape) != len(shard_shape) or any(
            outer % inner for outer, inner in zip(shard_shape, chunk_shape, strict=True)
        ):
            raise self.fault(
                f"its shards of shape {list(shard_shape)} are not made of whole chunks of shape "
                f"{list(chunk_shape)}"
            )
        index = self.chain(configuration.get("index_codecs"), (1,), 8, most)
        if index.order or index.shards is not None or index.packing not in ((), ("crc32c",)):
            raise self.unsupported("index_codecs", configuration["index_codecs"], "bytes, crc32c")
        location = configuration.get("index_location", "end")
        if location not in ("start", "end"):
            raise self.unsupported("index_location", location, "start or end")
        return Shards(
            chunk_shape,
            self.chain(configuration.get("codecs"), chunk_shape, itemsize, most),
            bool(index.packing),
            index.big_endian,
            location == "start",
        )
