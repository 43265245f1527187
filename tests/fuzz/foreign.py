"""The decoders of what other libraries write: zarr, safetensors, Orbax and pickles of torch."""

from __future__ import annotations

import bz2
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from asyncckpt.format import orbax, zarr3
from asyncckpt.format.foreign import orbax_read, zarr2
from asyncckpt.format.foreign.safetensors import (
    decode_header,
    decode_index,
    header_nbytes,
    holds_parts,
)
from asyncckpt.format.foreign.safetensors_tree import TREE_KEY, SavedTree, decode_tree, encode_tree
from asyncckpt.format.foreign.torch.dcp import decode_entries
from asyncckpt.format.foreign.torch.plain_values import load_value
from asyncckpt.format.foreign.torch.torch_pickle import metadata_names
from asyncckpt.format.foreign.torch.torch_zip import Archive
from asyncckpt.format.foreign.torch.unpickle import Allowance, PickleSource, Unpickler
from asyncckpt.format.foreign.zarr_codecs import decode_shard_index, make_codec
from asyncckpt.format.orbax import OrbaxLeaf
from asyncckpt.format.record_values import LeafTable
from asyncckpt.format.scalars import encode_scalar
from asyncckpt.format.zarr import Chain, Shards, ZarrArray
from asyncckpt.tree import flatten
from tests.fuzz import hostile
from tests.fuzz.engine import Target
from tests.fuzz.mutate import mutate_json, mutate_pickle
from tests.fuzz.surround import RAW, sealed

SEEDS = Path(__file__).parent / "seeds"
"""Pickles and archives that torch 2.13 has written; made by `make_seeds`."""

_UNPACKED_ELSEWHERE = {"blosc": lambda data, limit: data}


def targets() -> list[Target]:
    """All targets of this module."""
    return [
        _zarr("zarr3", zarr3.decode_metadata, _zarr3_documents()),
        _zarr("zarr2", zarr2.decode_metadata, _zarr2_documents()),
        _chunks(),
        _shard_index(),
        _safetensors(),
        _safetensors_tree(),
        _safetensors_index(),
        _orbax(),
        _dcp_metadata(),
        _torch_tensor(),
        _torch_value(),
    ]


# ------------------------------------------------------------------------------------------- zarr


def _zarr(name: str, decode_metadata: Any, documents: list[dict[str, Any]]) -> Target:
    def decode(data: bytes) -> object:
        array: ZarrArray | None = decode_metadata(data, file="zarr.json")
        if array is None:
            return None
        make_codec(
            array.chain,
            array.chunk_shape,
            array.spec.dtype,
            fill=array.fill_value,
            more=_UNPACKED_ELSEWHERE,
            file="zarr.json",
        )
        return array.grid.counts, array.grid.chunk_size, array.keys.all(b"w/", (2, 1))

    seeds = tuple(json.dumps(document).encode() for document in documents)
    return Target(name, seeds, decode, mutate_json, hostile=lambda: hostile.json_members(seeds[0]))


def _zarr3_documents() -> list[dict[str, Any]]:
    def document(*codecs: dict[str, Any], dtype: str = "float32", fill: Any = 0.0) -> Any:
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [10, 20],
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 20]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill,
            "codecs": list(codecs),
            "attributes": {"note": 1},
        }

    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    crc = {"name": "crc32c"}
    zstd = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
    transposed = {"name": "transpose", "configuration": {"order": [1, 0]}}
    shards = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [2, 10],
            "codecs": [plain, zstd],
            "index_codecs": [plain, crc],
            "index_location": "end",
        },
    }
    return [
        document(plain, crc),
        document({"name": "bytes", "configuration": {"endian": "big"}}, zstd, fill="NaN"),
        document(transposed, plain, {"name": "gzip", "configuration": {"level": 1}}),
        document(shards),
        document({"name": "bytes"}, dtype="bool", fill=True),
        document(plain, dtype="complex64", fill=[0.0, "Infinity"]),
        document(plain, dtype="bfloat16", fill="0x7fc0"),
    ]


def _zarr2_documents() -> list[dict[str, Any]]:
    def document(dtype: str, fill: Any, compressor: Any = None, order: str = "C") -> Any:
        return {
            "zarr_format": 2,
            "shape": [10, 20],
            "chunks": [4, 20],
            "dtype": dtype,
            "compressor": compressor,
            "fill_value": fill,
            "order": order,
            "filters": None,
            "dimension_separator": ".",
        }

    blosc = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
    return [
        document("<f4", None, {"id": "zstd", "level": 1}),
        document(">i8", 7, {"id": "zlib", "level": 1}, "F"),
        document("bfloat16", "NaN", {"id": "bz2", "level": 9}),
        document("|b1", False, blosc),
    ]


def _chunks() -> Target:
    """Stored chunks of eight kinds; the first byte of an input names the kind."""
    shape = (8, 16)
    elements = np.arange(128, dtype=np.int16).reshape(shape)
    raw = elements.tobytes()
    inner = Chain(packing=("zstd",))
    shards = Shards((4, 16), inner, index_at_start=True)
    chains = [
        Chain(packing=("zstd",)),
        Chain(packing=("gzip",)),
        Chain(packing=("zlib",)),
        Chain(packing=("bz2",)),
        Chain(packing=("zstd", "crc32c", "gzip")),
        Chain(order=(1, 0), big_endian=True),
        Chain(shards=shards),
        Chain(shards=Shards((8, 8), Chain(packing=("crc32c",)))),
    ]
    codecs = [make_codec(chain, shape, "int16", fill=b"\0\0", file="zarr.json") for chain in chains]
    halves = [zstandard.compress(raw[:128]), zstandard.compress(raw[128:])]
    columns = [sealed(elements[:, :8].tobytes()), sealed(elements[:, 8:].tobytes())]
    stored = [
        zstandard.compress(raw),
        gzip.compress(raw, mtime=0),
        zlib.compress(raw),
        bz2.compress(raw),
        gzip.compress(sealed(zstandard.compress(raw)), mtime=0),
        elements.T.astype(">i2").tobytes(),
        _shard(halves, at_start=True),
        _shard(columns, at_start=False),
    ]

    def decode(data: bytes) -> object:
        kind = data[0] % len(codecs) if data else 0
        codec, body = codecs[kind], np.frombuffer(data[1:], np.uint8)
        assert codec.decode is not None
        chunk = codec.decode([body[: len(body) // 2], body[len(body) // 2 :]], len(raw))
        assert chunk.nbytes == len(raw)
        return chunk

    seeds = tuple(bytes([kind]) + data for kind, data in enumerate(stored))
    for seed in seeds:
        assert decode(seed).tobytes() == raw  # type: ignore[attr-defined]

    def bombs() -> list[bytes]:
        zstd, streams = hostile.zstd_bombs(), hostile.stream_bombs()
        return [
            *(b"\0" + bomb for bomb in zstd),
            *(bytes([kind]) + streams[chains[kind].packing[-1]] for kind in (1, 2, 3, 4)),
            b"\6" + _shard([*zstd[:2]], at_start=True),
        ]

    return Target("chunks", seeds, decode, head=1, hostile=bombs)


def _shard(chunks: list[bytes], *, at_start: bool) -> bytes:
    size = 16 * len(chunks) + 4
    offset = size if at_start else 0
    numbers: list[int] = []
    for chunk in chunks:
        numbers += [offset, len(chunk)]
        offset += len(chunk)
    index = sealed(np.array(numbers, "<u8").tobytes())
    return index + b"".join(chunks) if at_start else b"".join(chunks) + index


def _shard_index() -> Target:
    shards = Shards((2, 2), Chain(), index_at_start=True)

    def decode(data: bytes) -> object:
        body = data[1:][:64].ljust(64, b"\0")
        index = body + bytes(4) if data[:1] == RAW else sealed(body)
        shard = np.frombuffer(index + bytes(1 << 13), np.uint8)
        return decode_shard_index(shard, shards, (4, 4))

    numbers = np.array([0, 100, 100, 200, 2**64 - 1, 2**64 - 1, 4096, 1 << 11], "<u8")
    return Target("shard-index", (b"\1" + numbers.tobytes(),), decode, head=1)


# ------------------------------------------------------------------------------------ safetensors


def _safetensors() -> Target:
    payload_nbytes = 48

    def decode(data: bytes) -> object:
        file_nbytes = 8 + len(data) + payload_nbytes
        if header_nbytes(len(data).to_bytes(8, "little"), file_nbytes, file="m.safetensors") != len(
            data
        ):
            raise AssertionError("the length is not what was stored")
        header = decode_header(data, file_nbytes, file="m.safetensors")
        return header, holds_parts(header.metadata, file="m.safetensors")

    tensors: dict[str, Any] = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.c": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [24, 48]},
        "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [48, 48]},
    }
    parts = json.dumps({"a": {"saved_offsets": [2, 0]}, "b.c": {"saved_offsets": [0, 0]}})
    seeds = [
        tensors,
        {"__metadata__": {"format": "pt"}, **tensors},
        {"__metadata__": {"DCP_SHARDING_INFO": parts}, **tensors},
    ]
    return Target(
        "safetensors",
        tuple(json.dumps(seed).encode() for seed in seeds),
        decode,
        mutate_json,
        hostile=hostile.safetensors_headers,
    )


def _safetensors_tree() -> Target:
    def decode(data: bytes) -> object:
        metadata = {TREE_KEY: data.decode("utf-8", "replace")}
        return decode_tree(metadata, 3, file="m.safetensors")

    structure = flatten({"a": 0, "b": [0, 0, (None, {})], "lr": 0.1}).structure
    leaves = LeafTable(
        ["numpy", "torch", "jax", "float"],
        [None, None, None, encode_scalar(0.1)[1]],
        {1: {"requires_grad": True}},
    )
    tree = SavedTree(
        structure, leaves, ["a", "b.0", "b.1", None], {"x": [1]}, {"loss": float("nan")}
    )
    seed = encode_tree(tree)[TREE_KEY].encode()
    return Target(
        "safetensors-tree",
        (seed,),
        decode,
        mutate_json,
        hostile=lambda: hostile.json_members(seed),
    )


def _safetensors_index() -> Target:
    def decode(data: bytes) -> object:
        return decode_index(data, file="m.safetensors.index.json")

    names = {f"layers.{n}.w": f"model-{n % 3:05}-of-00003.safetensors" for n in range(6)}
    document = {"metadata": {"total_size": 10**9}, "weight_map": names}
    seed = json.dumps(document).encode()
    return Target(
        "safetensors-set", (seed,), decode, mutate_json, hostile=lambda: hostile.json_members(seed)
    )


# ------------------------------------------------------------------------------------------ Orbax


def _orbax() -> Target:
    """Four kinds of documents; the first byte of an input says which."""

    def strings(data: bytes, *, file: str) -> object:
        document = orbax_read.parse_document(data, "the strings", file=file)
        return orbax_read.find_string(document, "name/of~1it")

    decoders = (
        orbax_read.decode_metadata,
        strings,
        orbax_read.decode_array_metadatas,
        orbax_read.decode_checkpoint_metadata,
    )

    def decode(data: bytes) -> object:
        kind = data[0] % len(decoders) if data else 0
        return decoders[kind](data[1:], file="_METADATA")

    key = OrbaxLeaf((("key", False),), "jax.Array", "key", (2,), (2,), "cpu:0", "threefry2x32")
    leaves = [
        OrbaxLeaf((("w", False), ("0", True)), "np.ndarray", "w.0"),
        OrbaxLeaf((("step", False),), "scalar", "step"),
        OrbaxLeaf((("name/of~1it", False),), "string", text="x"),
        OrbaxLeaf((("none", False),), "None"),
        key,
    ]
    step = {
        "item_handlers": {"default": "orbax.checkpoint.handlers.StandardCheckpointHandler"},
        "metrics": {"loss": 0.5, "count": 3},
        "performance_metrics": {},
        "init_timestamp_nsecs": 1_700_000_000_000_000_000,
        "commit_timestamp_nsecs": 1_700_000_000_000_000_001,
        "custom_metadata": {"tokens": 10**9},
    }
    files = orbax.encode_files(leaves)
    documents = (
        files[orbax.METADATA_FILE].replace(b"null", b'{"a": [1]}'),  # the custom metadata
        files[orbax.STRINGS_FILE],
        files[orbax.ARRAY_METADATA_FILE],
        json.dumps(step).encode(),
    )
    seeds = tuple(bytes([kind]) + data for kind, data in enumerate(documents) if data)

    def bad() -> list[bytes]:
        return [seed[:1] + text for seed in seeds for text in hostile.json_members(seed[1:])]

    return Target("orbax", seeds, decode, mutate_json, head=1, hostile=bad)


# ------------------------------------------------------------------------------------------ torch


def _allowance(data: bytes) -> Allowance:
    return Allowance((16 << 20) + 2 * len(data))


def _dcp_metadata() -> Target:
    def decode(data: bytes) -> object:
        source = PickleSource(data, "the metadata", ".metadata")
        value = Unpickler(source, metadata_names(), _allowance(data)).run()
        return decode_entries(value, file=".metadata")

    seed = (SEEDS / "dcp-metadata.bin").read_bytes()
    return Target("dcp-metadata", (seed,), decode, mutate_pickle, hostile=hostile.pickles)


def _torch_tensor() -> Target:
    def decode(data: bytes) -> object:
        archive = Archive(data, len(data), "the tensor", "__0_0.distcp", 4096)
        return archive.tensor(_allowance(data))

    seed = (SEEDS / "torch-archive.bin").read_bytes()
    return Target("torch-archive", (seed,), decode)


def _torch_value() -> Target:
    def decode(data: bytes) -> object:
        source = PickleSource(data, "the value", "__0_0.distcp")
        return load_value(source, _allowance(data), depth=3)

    seed = (SEEDS / "torch-value.bin").read_bytes()
    return Target("torch-value", (seed,), decode, mutate_pickle, hostile=hostile.pickles)
