"""Decoding the chunks of zarr arrays: a `Codec` for a chain of zarr codecs."""

# Rule 1: every step knows how many bytes it may give, from the array's metadata, and stops there.

from __future__ import annotations

import bz2
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import zstandard

from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format.codecs import Bytes, ChunkError, Codec, decompress_zstd
from asyncckpt.format.crc import crc32c
from asyncckpt.format.sharding import decode_index, index_range
from asyncckpt.format.zarr import CRC_NBYTES, Chain, Shards
from asyncckpt.spec import ITEMSIZES

Unpack = Callable[[Sequence[Bytes], int], Bytes]
"""Packed bytes, spread over buffers, and the most bytes they may give -> those bytes. Blocking.

Raises `ChunkError` where they are damaged or give more."""

_STEP_NBYTES = 1 << 20
"""Unpacked at a time."""


def make_codec(
    chain: Chain,
    shape: tuple[int, ...],
    dtype: str,
    *,
    fill: bytes,
    more: Mapping[str, Unpack] | None = None,
    file: str = "",
) -> Codec:
    """What turns stored chunks into their elements.

    Args:
        chain: how they are stored.
        shape: elements of a chunk per dimension.
        dtype: of the elements.
        fill: one element of what is missing inside of a shard.
        more: packings that are unpacked elsewhere, by name.
        file: the metadata document, for errors.

    Raises:
        UnsupportedFormatError: a packing is not known.
    """
    packing = chain.packing[:-1] if chain.crc32c else chain.packing
    known = {**_UNPACK, **(more or {})}
    for name in packing:
        if name not in known:
            raise UnsupportedFormatError(
                f"{file}: chunks packed with {name} are not read here; rewrite the array with zstd",
                file=file,
                expected=sorted(known),
                found=name,
            )
    if packing == ("zstd",) and not (chain.order or chain.big_endian or chain.shards):
        return Codec("zstd", chain.crc32c, decompress_zstd)
    names = [
        *(["transpose"] if chain.order else []),
        *(["big endian"] if chain.big_endian else []),
        *(["sharding"] if chain.shards else []),
        *packing,
    ]
    if not names:
        return Codec("", chain.crc32c)
    stored_shape = tuple(shape[n] for n in chain.order) or shape
    inner = None
    if chain.shards is not None:
        inner = make_codec(
            chain.shards.chain,
            chain.shards.chunk_shape,
            dtype,
            fill=fill,
            more=more,
            file=file,
        )

    def decode(parts: Sequence[Bytes], nbytes: int) -> Bytes:
        limits = list(_limits(len(packing), nbytes))
        for name, limit in zip(reversed(packing), reversed(limits), strict=True):
            parts = [known[name](parts, limit)]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if inner is not None:
            assert chain.shards is not None
            data = _unshard(data, chain.shards, inner, stored_shape, ITEMSIZES[dtype], fill)
        if data.nbytes != nbytes:
            raise ChunkError(
                f"it holds {data.nbytes} bytes, the chunk has {nbytes}",
                expected=nbytes,
                found=data.nbytes,
            )
        if chain.big_endian:
            width = ITEMSIZES[dtype] // (2 if dtype.startswith("complex") else 1)
            data = _swapped(data, width)
        if chain.order:
            elements = np.ndarray(stored_shape, f"V{ITEMSIZES[dtype]}", data)
            data = np.ascontiguousarray(elements.transpose(np.argsort(chain.order)))
            data = data.reshape(-1).view(np.uint8)
        return data

    return Codec("+".join(names), chain.crc32c, decode)


def _limits(count: int, nbytes: int) -> Iterator[int]:
    """The most bytes that each packing step may have been given, the first one first.

    What cannot be compressed grows: by 1 % and 600 bytes in bzip2, by less in the others.
    """
    for _ in range(count):
        yield nbytes
        nbytes += nbytes // 64 + 1024


def _swapped(data: Bytes, width: int) -> Bytes:
    # A copy first: the bytes of a slot may stand at any address.
    swapped: Bytes = data.copy().view(f"u{width}").byteswap(inplace=True).view(np.uint8)
    return swapped


def _unshard(
    data: Bytes, shards: Shards, inner: Codec, shape: tuple[int, ...], itemsize: int, fill: bytes
) -> Bytes:
    """The elements of a whole shard of this shape."""
    start, length = index_range(shards, shape, data.nbytes)
    offsets, lengths = decode_index(data[start : start + length].tobytes(), shards, data.nbytes)
    chunk_shape = shards.chunk_shape
    chunk_nbytes = math.prod(chunk_shape) * itemsize
    out = np.full(shape, np.frombuffer(fill or bytes(itemsize), f"V{itemsize}")[0])
    counts = [range(0, n, c) for n, c in zip(shape, chunk_shape, strict=True)]
    for corner, offset, nbytes in zip(
        itertools.product(*counts), offsets.tolist(), lengths.tolist(), strict=True
    ):
        if offset < 0:
            continue
        payload = data[offset : offset + nbytes]
        if inner.crc32c:
            payload = _unpack_crc32c([payload], nbytes)
        if inner.decode is not None:
            payload = inner.decode([payload], chunk_nbytes)
        if payload.nbytes != chunk_nbytes:
            raise ChunkError(
                f"a chunk in the shard has {payload.nbytes} bytes, it needs {chunk_nbytes}",
                expected=chunk_nbytes,
                found=payload.nbytes,
            )
        box = tuple(slice(at, at + n) for at, n in zip(corner, chunk_shape, strict=True))
        out[box] = np.ndarray(chunk_shape, f"V{itemsize}", np.ascontiguousarray(payload))
    return out.reshape(-1).view(np.uint8)


# --------------------------------------------------------------------------------------- unpacking


def _collect(pieces: Iterable[bytes], what: str, limit: int) -> Bytes:
    out = np.empty(limit, np.uint8)
    view = memoryview(out)
    filled = 0
    for piece in pieces:
        if filled + len(piece) > limit:
            raise ChunkError(f"the {what} data hold more than {limit} bytes", expected=limit)
        view[filled : filled + len(piece)] = piece
        filled += len(piece)
    return out[:filled]


def _unpack_zstd(parts: Sequence[Bytes], limit: int) -> Bytes:
    def pieces() -> Iterator[bytes]:
        data = b"".join(parts)
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while piece := reader.read(_STEP_NBYTES):
                yield piece

    try:
        return _collect(pieces(), "zstd", limit)
    except zstandard.ZstdError as error:
        raise ChunkError(f"the zstd frame does not decode: {error}") from None


def _unpack_zlib(name: str, window_bits: int) -> Unpack:
    def pieces(parts: Sequence[Bytes]) -> Iterator[bytes]:
        stream = zlib.decompressobj(window_bits)
        for number, part in enumerate(parts):
            data: Bytes | bytes = part
            while not stream.eof:
                piece = stream.decompress(data, _STEP_NBYTES)
                yield piece
                data = stream.unconsumed_tail
                if len(piece) < _STEP_NBYTES and not data:
                    break
            if stream.eof and (stream.unused_data or any(p.nbytes for p in parts[number + 1 :])):
                raise ChunkError(f"bytes follow the end of the {name} data")
        if not stream.eof:
            raise ChunkError(f"the {name} data are cut off")

    def unpack(parts: Sequence[Bytes], limit: int) -> Bytes:
        try:
            return _collect(pieces(parts), name, limit)
        except zlib.error as error:
            raise ChunkError(f"the {name} data do not decode: {error}") from None

    return unpack


def _unpack_bz2(parts: Sequence[Bytes], limit: int) -> Bytes:
    def pieces() -> Iterator[bytes]:
        stream = bz2.BZ2Decompressor()
        for number, part in enumerate(parts):
            yield stream.decompress(part, _STEP_NBYTES)
            while not stream.needs_input and not stream.eof:
                yield stream.decompress(b"", _STEP_NBYTES)
            if stream.eof:
                if stream.unused_data or any(p.nbytes for p in parts[number + 1 :]):
                    raise ChunkError("bytes follow the end of the bz2 data")
                return
        raise ChunkError("the bz2 data are cut off")

    try:
        return _collect(pieces(), "bz2", limit)
    except OSError as error:
        raise ChunkError(f"the bz2 data do not decode: {error}") from None


def _unpack_crc32c(parts: Sequence[Bytes], limit: int) -> Bytes:
    data = parts[0] if len(parts) == 1 else np.concatenate(parts)
    end = data.nbytes - CRC_NBYTES
    if end < 0:
        raise ChunkError(f"{data.nbytes} bytes hold no checksum")
    stored, crc = int.from_bytes(data[end:].tobytes(), "little"), crc32c(data[:end])
    if crc != stored:
        raise ChunkError(
            f"a CRC-32C is {crc:08x}, the stored one {stored:08x}", expected=stored, found=crc
        )
    return data[:end]


_UNPACK: dict[str, Unpack] = {
    "zstd": _unpack_zstd,
    "gzip": _unpack_zlib("gzip", 31),
    "zlib": _unpack_zlib("zlib", 15),
    "bz2": _unpack_bz2,
    "crc32c": _unpack_crc32c,
}
