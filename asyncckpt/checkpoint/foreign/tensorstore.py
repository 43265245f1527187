"""Decoding of Blosc by TensorStore, because no other dependency can."""

# Rule 1: TensorStore gets bytes in memory and a specification made here, never a stored one: it
#   trusts sizes, and terminates the process if memory runs out.
# Rule 2: the sizes that the bytes claim are checked first.

from __future__ import annotations

import struct

import numpy as np

from asyncckpt.format.codecs import Bytes, ChunkError

# Versions of format and codec, flags, element size; then the sizes in bytes of the data, of a
# block, and of the whole.
_BLOSC_HEADER = struct.Struct("<BBBBIII")
_BLOSC_VERSIONS = (1, 2)


def unpack_blosc(data: Bytes, limit: int) -> Bytes:
    """Decompress Blosc data. Blocking.

    Raises:
        ChunkError: the data are damaged, or decode to more than `limit` bytes.
    """
    packed = data.tobytes()
    if len(packed) < _BLOSC_HEADER.size:
        raise ChunkError(f"{len(packed)} bytes are fewer than the header of Blosc")
    version, _, _, _, nbytes, _, packed_nbytes = _BLOSC_HEADER.unpack_from(packed)
    if version not in _BLOSC_VERSIONS:
        raise ChunkError(f"it has version {version} of Blosc", expected=_BLOSC_VERSIONS)
    if packed_nbytes != len(packed):
        raise ChunkError(
            f"its Blosc header says {packed_nbytes} bytes, there are {len(packed)}",
            expected=packed_nbytes,
            found=len(packed),
        )
    if nbytes > limit:
        raise ChunkError(
            f"its Blosc header says {nbytes} bytes of content, the chunk has at most {limit}",
            expected=limit,
            found=nbytes,
        )
    if not nbytes:
        return np.empty(0, np.uint8)
    import tensorstore as ts

    context = ts.Context()
    kvstore = {"driver": "memory"}
    ts.KvStore.open(kvstore, context=context).result().write("0", packed).result()
    spec = {
        "driver": "zarr",
        "kvstore": kvstore,
        "metadata": {
            "zarr_format": 2,
            "shape": [nbytes],
            "chunks": [nbytes],
            "dtype": "|u1",
            # Ignored: the header of the data determines how to unpack it.
            "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 0},
            "fill_value": None,
            "filters": None,
            "order": "C",
        },
    }
    try:
        array = ts.open(spec, context=context, open=True, assume_metadata=True).result()
        values: Bytes = array.read().result()
    except ValueError as error:
        raise ChunkError(f"the Blosc data do not decode: {error}") from None
    return values
