"""What has to stand around an input for a decoder to look at it: lengths and checksums."""

from __future__ import annotations

import zstandard

from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.wire import FRAME_HEADER, frame

# The first byte of an input says how it is surrounded.
RAW = b"\0"
PLAIN = b"\1"
PACKED = b"\2"
PRESSED = b"\3"
"""As packed, but the input itself is what the packer gave."""


def sealed(body: bytes) -> bytes:
    """The body and its CRC-32C."""
    return body + crc32c(body).to_bytes(4, "little")


def framed(data: bytes, magic: int) -> bytes:
    """An OCDBT frame around the body behind the first byte."""
    kind, body = data[:1], data[1:]
    if kind == RAW:
        return body
    if kind not in (PACKED, PRESSED):
        return bytes(frame(magic, body))
    packed = b"\0\1" + (body if kind == PRESSED else zstandard.compress(body, 1))
    return sealed(magic.to_bytes(4, "big") + (len(packed) + 16).to_bytes(8, "little") + packed)


def unframed(block: bytes) -> bytes:
    """The body of an uncompressed frame."""
    return block[FRAME_HEADER:-4]


def recorded(data: bytes) -> bytes:
    """A commit record of the JSON behind the first byte."""
    kind, text = data[:1], data[1:]
    body = text[:-1] + b',"crc32c":'
    return text if kind == RAW else body + b'"%08x"}\n' % crc32c(body)
