"""Every structure of a checkpoint as JSON that a person can read, and back.

For golden tests and for looking at damaged files; nothing of the library stores it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.record import decode_record, encode_record, seal
from asyncckpt.format.record_values import CommitRecord
from asyncckpt.format.zarr import Chain, ChunkKeys, Shards, ZarrArray
from asyncckpt.spec import ArraySpec
from tests.format import ocdbt_dump as ocdbt

Structure = ocdbt.Structure | ChunkIndex | CommitRecord | ZarrArray


def dump(structure: Structure) -> dict[str, Any]:
    """JSON that `load` turns into an equal structure."""
    if isinstance(structure, CommitRecord):
        document = json.loads(encode_record(structure))
        del document["crc32c"]
        return {"type": "record", "document": document}
    if isinstance(structure, ZarrArray):
        return {
            "type": "zarr_array",
            "shape": list(structure.spec.shape),
            "dtype": structure.spec.dtype,
            "chunk_shape": list(structure.chunk_shape),
            "chain": asdict(structure.chain),
            "fill_value": structure.fill_value.hex(),
            "keys": asdict(structure.keys),
        }
    if isinstance(structure, ChunkIndex):
        rows = zip(
            structure.file.tolist(),
            structure.offset.tolist(),
            structure.nbytes.tolist(),
            structure.crc32c.tolist(),
            strict=True,
        )
        return {
            "type": "chunk_index",
            "rows": [
                {"file": file, "offset": offset, "nbytes": nbytes, "crc32c": f"{crc:08x}"}
                for file, offset, nbytes, crc in rows
            ],
        }
    return ocdbt.dump(structure)


def load(document: dict[str, Any]) -> Structure:
    """The structure that `dump` made the document of.

    Raises:
        ValueError: the document is of no known type.
    """
    kind = document.get("type")
    if kind == "record":
        return decode_record(seal(json.dumps(document["document"])), location="dump")
    if kind == "zarr_array":
        return ZarrArray(
            ArraySpec(tuple(document["shape"]), document["dtype"]),
            tuple(document["chunk_shape"]),
            _chain(document["chain"]),
            bytes.fromhex(document["fill_value"]),
            ChunkKeys(**document["keys"]),
        )
    if kind == "chunk_index":
        rows = document["rows"]
        file, offset, nbytes = (
            np.array([row[name] for row in rows], np.int64) for name in ("file", "offset", "nbytes")
        )
        crc = np.array([int(row["crc32c"], 16) for row in rows], np.uint32)
        return ChunkIndex(file, offset, nbytes, crc)
    return ocdbt.load(document)


def _chain(document: dict[str, Any]) -> Chain:
    shards = document["shards"]
    if shards is not None:
        shape, chain = tuple(shards["chunk_shape"]), _chain(shards["chain"])
        shards = Shards(**{**shards, "chunk_shape": shape, "chain": chain})
    return Chain(
        tuple(document["order"]), document["big_endian"], shards, tuple(document["packing"])
    )
