"""Decoding of zarr chunks: a `Codec` for a chain of zarr codecs."""

# Rule 1: every step stops at a limit of bytes that comes from the array's metadata
#   (test_a_bomb_takes_no_more_memory_than_its_chunk).

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncckpt.format.codecs import ZSTD, Bytes, ChunkError, Codec, check_nbytes, decompress_within
from asyncckpt.format.damage import unsupported
from asyncckpt.format.foreign.sharding import unshard, without_crc32c
from asyncckpt.format.zarr import Chain
from asyncckpt.spec import ITEMSIZES

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

    `fill` and `stored` are as in `unshard`; `more` has functions for additional packings, by name.
    `file` is the metadata document, for errors.
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
    axes = chain.order or tuple(range(len(shape)))
    inner, checked = None, "crc32c" in packing
    if chain.shards is not None:
        inner_shape = chain.shards.chunk_shape
        inner = make_codec(chain.shards.chain, inner_shape, dtype, fill=fill, more=more, file=file)
        checked |= inner.verifies and chain.shards.index_crc32c

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
        if chain.shards is not None and inner is not None:
            data = unshard(
                data,
                chain.shards,
                inner,
                shape=[shape[axis] for axis in axes],
                itemsize=ITEMSIZES[dtype],
                fill=fill,
                stored=None if stored is None else [stored[axis] for axis in axes],
            )
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


# --------------------------------------------------------------------------------------- unpacking


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
    "crc32c": lambda data, _: without_crc32c(data),
}
