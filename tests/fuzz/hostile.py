"""Inputs made to take time or memory, which mutation does not come upon."""

from __future__ import annotations

import bz2
import json
import struct
import zlib
from functools import cache
from typing import Any

import zstandard

from tests.fuzz.mutate import varint
from tests.fuzz.surround import PLAIN, PRESSED

ZEROS = bytes(1 << 20)


def _packed(stream: Any, mebibytes: int) -> bytes:
    parts = [stream.compress(ZEROS) for _ in range(mebibytes)]
    return b"".join((*parts, stream.flush()))


@cache
def zstd_bombs() -> tuple[bytes, ...]:
    """Half a gigabyte of zeros in 20 KB, with its size declared and without; a lie; a window."""
    sized = zstandard.ZstdCompressor(level=1).compressobj(size=512 << 20)
    unsized = zstandard.ZstdCompressor(level=1).compressobj()
    window = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    wide = zstandard.ZstdCompressor(compression_params=window).compressobj()
    # The magic, a descriptor of eight bytes of content size, that size, and an empty last block.
    lie = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 62) + b"\1\0\0"
    return _packed(sized, 512), _packed(unsized, 512), _packed(wide, 1), lie


@cache
def stream_bombs() -> dict[str, bytes]:
    """Zeros beyond what an input may take, by codec."""
    return {
        "gzip": _packed(zlib.compressobj(1, zlib.DEFLATED, 31), 80),
        "zlib": _packed(zlib.compressobj(1), 80),
        "bz2": _packed(bz2.BZ2Compressor(1), 80),
    }


def manifests() -> list[bytes]:
    """Bodies that claim more than they hold."""
    head = bytes(16) + b"\0" + varint(1024) + varint(100_000_000) + b"\4\0"
    return [
        PLAIN + head + b"\0" + varint((1 << 64) - 1),
        PLAIN + head + b"\0" + varint(60_000) + b"\1" * 60_000,
        PLAIN + head + varint(60_000) + bytes(60_000),
        *(PRESSED + bomb for bomb in zstd_bombs()),
    ]


def nodes() -> list[bytes]:
    """Bodies of leaves whose keys, paths or counts stand for far more than they take."""
    table = b"\1\1\0d"  # one data file, called d
    count = 20_000
    lengths = b"".join(map(varint, range(1, count)))
    # Every key is the one before it and a byte: 200 MB of keys.
    keys = b"\0" + table + varint(count) + lengths + b"\1" * count + b"k" * count
    paths = b"\0" + varint(count) + lengths + b"\1" * count + bytes(count) + b"p" * count
    counts = [b"\0" + table + varint(n) for n in (0, (1 << 20) + 1, 1 << 62, (1 << 64) - 1)]
    return [PLAIN + body for body in (keys, paths, *counts)] + [
        PRESSED + bomb for bomb in zstd_bombs()
    ]


def json_documents() -> list[bytes]:
    """Documents that are deep, wide, long or full of large numbers."""
    size = 1 << 18
    return [
        b"[" * size,
        b'{"a":' * (size // 5),
        b"[" + b"[]," * (size // 3) + b"0]",
        b"[" + b"{}," * (size // 3) + b"0]",
        b"9" * size,
        b"-" * size,
        b"1e" + b"9" * size,
        b'"' + b"\\u0041" * (size // 6) + b'"',
        b'"' + b"\\" * size,
        b'{"a":' + b" " * size,
        b"{" + b",".join(b'"%d":0' % n for n in range(size // 16)) + b"}",
    ]


def json_members(seed: bytes) -> list[bytes]:
    """The document with one member after the other replaced by something large, or deep."""
    document = json.loads(seed)
    size = 1 << 13
    values: list[Any] = ["x" * size, [0] * size, [""] * size, [1 << 62] * size, 10**4000]
    values.append({str(n): 0 for n in range(size // 4)})
    texts = json_documents()
    for name in document:
        texts += [json.dumps(document | {name: value}).encode() for value in values]
        hole = json.dumps(document | {name: "<hole>"}).encode()
        texts += [
            hole.replace(b'"<hole>"', text) for text in (b"[" * size, b"[" * 200 + b"]" * 200)
        ]
    return texts


def pickles() -> list[bytes]:
    """Programs that make much of little, go deep, hold themselves, or name what they may not."""
    head = b"\x80\x02"
    pack = struct.pack
    doubled_lists = b"]q\0" + b"".join(b"]q%c(h%ch%ce" % (n, n - 1, n - 1) for n in range(1, 99))
    doubled_tuples = b")q\0" + b"".join(b"h%ch%c\x86q%c" % (n - 1, n - 1, n) for n in range(1, 99))
    return [
        *(head + body + b"." for body in (doubled_lists, doubled_tuples)),
        head + b"]q\0(" + b"h\0" * 10_000 + b"e.",
        head + b"]q\0h\0a.",
        head + b"(" * 60_000 + b".",
        head + b"]" * 30_000 + b"a" * 29_999 + b".",
        head + b"N" + b"\x85" * 60_000 + b".",
        head + b"X" + pack("<I", (1 << 32) - 1) + b"x.",
        head + b"\x8d" + pack("<Q", 1 << 62) + b"x.",
        head + b"\x8b" + pack("<i", 60_000) + b"\x7f" * 60_000 + b".",
        head + b"\x8b" + pack("<i", -1) + b".",
        b"\x80\x05\x95" + pack("<Q", 1 << 62) + b"N.",
        head + b"Nr" + pack("<I", (1 << 32) - 1) + b".",
        head + b"cos\nsystem\nX\2\0\0\0id\x85R.",
        head + b"c" + b"m" * 60_000 + b"\n" + b"n" * 100 + b"\n.",
    ]


def safetensors_headers() -> list[bytes]:
    """Headers of many, overlapping or immense entries."""
    one = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    documents: list[dict[str, Any]] = [
        {str(n): one for n in range(8_000)},
        {str(n): empty for n in range(8_000)},
        {"a": one | {"shape": [1] * 50_000}},
        {"a": one | {"shape": [1 << 62, 1 << 62]}},
        {"a": one | {"data_offsets": [0, 1 << 70]}},
        {"__metadata__": {str(n): "x" for n in range(50_000)}},
    ]
    return [json.dumps(document).encode() for document in documents] + json_documents()
