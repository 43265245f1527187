"""Decoding of zarr chunks: a `Codec` for a chain of zarr codecs.

With the codec `sharding_indexed`, many chunks form a shard, which is stored under one key: the
chunks in any order, and an index with two `uint64` for every chunk in C order, its offset in the
shard and its length; for a missing chunk, all their bits are set. The index is at the end or start
of the shard, and a CRC-32C may follow it. Source: zarr-specs v3, `codecs/sharding-indexed/v1.0`.
"""

# Rule 1: every step stops at a limit of bytes that comes from the array's metadata
#   (test_a_bomb_takes_no_more_memory_than_its_chunk).

from __future__ import annotations

import bz2
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.format.codecs import ZSTD, Bytes, ChunkError, Codec, check_nbytes, decompress_within
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import unsupported
from asyncckpt.format.zarr import Chain, Shards
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.spec import ITEMSIZES

ENTRY_NBYTES = 16
"""Bytes of one entry of a shard's index."""

_MISSING = (1 << 64) - 1

Unpack = Callable[[Bytes, int], Bytes]
"""Packed bytes and the limit of unpacked ones -> the unpacked bytes. Blocking.

Raises `ChunkError` if the packed bytes are damaged or unpack to more than the limit."""


def make_codec(
    chain: Chain,
    shape: tuple[int, ...],
    dtype: str,
    *,
    fill: bytes,
    stored: tuple[int, ...] | None = None,
    more: Mapping[str, Unpack] | None = None,
    file: str = "",
) -> Codec:
    """Return the codec that decodes stored chunks of this shape and dtype.

    `fill` is one element of chunks that a shard lacks, empty for zero. `stored` is the shape of the
    corner of a shard whose chunks must be stored; None if any may be missing. `more` has functions
    for additional packings, by name. `file` is the metadata document, for errors.
    """
    packing = chain.packing[:-1] if chain.crc32c else chain.packing
    known = {**_UNPACK, **(more or {})}
    for name in packing:
        if name not in known:
            raise unsupported(
                f"chunks packed with {name} are not read here; rewrite the array with zstd",
                file=file,
                expected=sorted(known),
                found=name,
            )
    if packing == ("zstd",) and not (chain.order or chain.big_endian or chain.shards):
        return replace(ZSTD, crc32c=chain.crc32c)
    flags = ("transpose", chain.order), ("big endian", chain.big_endian), ("sharding", chain.shards)
    names = [*(name for name, used in flags if used), *packing]
    if not names:
        return Codec("", chain.crc32c)
    # If zstd packed first, its content has the size of the chunk, except in shards.
    exact = ZSTD.decode if packing[:1] == ("zstd",) and chain.shards is None else None
    shards, unshard, checked = chain.shards, None, "crc32c" in packing
    if shards is not None:
        inner = make_codec(shards.chain, shards.chunk_shape, dtype, fill=fill, more=more, file=file)
        checked |= inner.verifies and shards.index_crc32c
        axes = chain.order or range(len(shape))
        element = np.frombuffer(fill or bytes(ITEMSIZES[dtype]), f"V{ITEMSIZES[dtype]}")
        own = [shape[axis] for axis in axes]
        required = None if stored is None else [stored[axis] for axis in axes]
        unshard = partial(_unshard, shards, inner, own, element, required)

    def decode(parts: Sequence[Bytes], nbytes: int) -> Bytes:
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # Packing grows incompressible data: in bzip2 by 1 % and 600 bytes, in others by less.
        limits = [nbytes]
        for _ in packing[1:]:
            limits.append(limits[-1] + limits[-1] // 64 + 1024)
        for name in reversed(packing[1:] if exact else packing):
            data = known[name](data, limits.pop())
        if exact:
            data = exact([data], nbytes)
        if unshard is not None:
            data = unshard(data)
        check_nbytes(data, nbytes)
        return _ordered(data, chain, shape, dtype)

    return Codec("+".join(names), chain.crc32c, decode, checked)


def _ordered(data: Bytes, chain: Chain, shape: tuple[int, ...], dtype: str) -> Bytes:
    """Return the elements little endian and in C order."""
    itemsize = ITEMSIZES[dtype]
    if chain.big_endian:
        # Copied first: the bytes of a slot may be unaligned.
        width = itemsize // (2 if dtype.startswith("complex") else 1)
        data = data.copy().view(f"u{width}").byteswap(inplace=True).view(np.uint8)
    if chain.order:
        elements = np.ndarray([shape[axis] for axis in chain.order], f"V{itemsize}", data)
        elements = np.ascontiguousarray(elements.transpose(np.argsort(chain.order)))
        data = elements.reshape(-1).view(np.uint8)
    return data


# ------------------------------------------------------------------------------------------ shards


def decode_shard_index(
    data: Bytes, shards: Shards, shard_shape: Sequence[int]
) -> list[tuple[int, int] | None]:
    """Return offset and length in the shard of every chunk; None for missing chunks.

    Raises:
        ChunkError: the index is cut off, its checksum differs, or a chunk is outside the shard.
    """
    chunks = math.prod(n // c for n, c in zip(shard_shape, shards.chunk_shape, strict=True))
    crc_nbytes = CRC_NBYTES if shards.index_crc32c else 0
    nbytes = chunks * ENTRY_NBYTES + crc_nbytes
    if nbytes > data.nbytes:
        raise ChunkError(
            f"the shard has {data.nbytes} bytes, its index alone needs {nbytes}",
            expected=nbytes,
            found=data.nbytes,
        )
    start = 0 if shards.index_at_start else data.nbytes - nbytes
    index = data[start : start + nbytes]
    if shards.index_crc32c:
        index = _without_crc32c(index, "the CRC-32C of the shard's index")
    kind = ">u8" if shards.index_big_endian else "<u8"
    entries = np.frombuffer(index.tobytes(), kind).tolist()
    places: list[tuple[int, int] | None] = []
    for number, (offset, length) in enumerate(zip(entries[::2], entries[1::2], strict=True)):
        if offset == length == _MISSING:
            places.append(None)
            continue
        if offset + length > data.nbytes:
            raise ChunkError(
                f"the shard's index places chunk {number} at {offset}+{length}, the shard has "
                f"{data.nbytes} bytes",
                expected=data.nbytes,
                found=offset,
            )
        places.append((offset, length))
    return places


def _unshard(
    shards: Shards,
    codec: Codec,
    shape: Sequence[int],
    fill: npt.NDArray[np.void],
    stored: Sequence[int] | None,
    data: Bytes,
) -> Bytes:
    """Return the elements of a whole shard, whose chunks `codec` decodes.

    Raises:
        ChunkError: the index or a chunk is damaged, or a required chunk is missing.
    """
    places = decode_shard_index(data, shards, shape)
    chunk_shape = shards.chunk_shape
    chunk_nbytes = math.prod(chunk_shape) * fill.itemsize
    out = np.full(shape, fill[0])
    axes = [range(0, n, c) for n, c in zip(shape, chunk_shape, strict=True)]
    for number, corner in enumerate(itertools.product(*axes)):
        place = places[number]
        if place is not None:
            payload = data[place[0] : sum(place)]
            if codec.crc32c:
                payload = _without_crc32c(payload)
            if codec.decode is not None:
                payload = codec.decode([payload], chunk_nbytes)
            check_nbytes(payload, chunk_nbytes)
            box = tuple(slice(at, at + n) for at, n in zip(corner, chunk_shape, strict=True))
            out[box] = np.ndarray(chunk_shape, fill.dtype, np.ascontiguousarray(payload))
        elif stored is not None and all(a < n for a, n in zip(corner, stored, strict=True)):
            raise ChunkError(
                f"chunk {number} of the shard is missing, and this checkpoint says that all are "
                "stored",
                expected="a chunk",
                found="nothing",
            )
    return out.reshape(-1).view(np.uint8)


# --------------------------------------------------------------------------------------- unpacking


def _without_crc32c(data: Bytes, what: str = "a CRC-32C") -> Bytes:
    """Return the bytes without their CRC-32C, after checking it; errors call it `what`.

    Raises:
        ChunkError: the CRC-32C is missing or differs.
    """
    end = data.nbytes - CRC_NBYTES
    if end < 0:
        raise ChunkError(f"{data.nbytes} bytes hold no checksum")
    stored, crc = int.from_bytes(data[end:].tobytes(), "little"), crc32c(data[:end])
    if crc != stored:
        raise ChunkError(
            f"{what} is {crc:08x}, the stored one {stored:08x}", expected=stored, found=crc
        )
    return data[:end]


def _unpack_zstd(data: Bytes, limit: int) -> Bytes:
    try:
        return np.frombuffer(decompress_within(data, limit), np.uint8)
    except ValueError as error:
        raise ChunkError(str(error), expected=limit) from None


def _stream(name: str, start: Callable[[], Any]) -> Unpack:
    """Return the function that unpacks one stream of the standard library's `zlib` or `bz2`."""

    def unpack(data: Bytes, limit: int) -> Bytes:
        stream = start()
        try:
            unpacked = stream.decompress(memoryview(data), limit + 1)
        except (zlib.error, OSError) as error:
            raise ChunkError(f"the {name} data do not decode: {error}") from None
        if len(unpacked) > limit:
            raise ChunkError(f"the {name} data hold more than {limit} bytes", expected=limit)
        if not stream.eof:
            raise ChunkError(f"the {name} data are cut off")
        if stream.unused_data:
            raise ChunkError(f"bytes follow the end of the {name} data")
        return np.frombuffer(unpacked, np.uint8)

    return unpack


_UNPACK: dict[str, Unpack] = {
    "zstd": _unpack_zstd,
    "gzip": _stream("gzip", lambda: zlib.decompressobj(31)),
    "zlib": _stream("zlib", lambda: zlib.decompressobj(15)),
    "bz2": _stream("bz2", bz2.BZ2Decompressor),
    "crc32c": lambda data, _: _without_crc32c(data),
}
