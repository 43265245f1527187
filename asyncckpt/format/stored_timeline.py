"""The timeline of a save, stored in the index file before the chunk index.

A JSON object, then 12 bytes: its length `uint32` little endian, its CRC-32C `uint32` little endian,
and ``ACKT``. The record does not mention it: without this magic there is no timeline.
"""

from __future__ import annotations

import json
import struct

from asyncckpt.format.crc import crc32c
from asyncckpt.reports import Timeline

MAX_TIMELINE_NBYTES = 2048
"""Longest stored timeline, including its last 12 bytes: about fifty spans."""

_TAIL = struct.Struct("<II4s")
_MAGIC = b"ACKT"


def encode_timeline(timeline: Timeline) -> bytes:
    """Encode as many spans of a timeline as fit; return no bytes for an empty one.

    Every stage of the process that recorded it is included, from begin to end and with all bytes.
    Other processes follow in order while they fit.
    """
    own = [span for span in timeline.spans if span.process == timeline.process]
    others = [span for span in timeline.spans if span.process != timeline.process]
    others.sort(key=lambda span: span.process)
    most = 64
    while own:
        rows = Timeline((*own, *others), timeline.process).rows(most)
        document = {"process": timeline.process, "spans": rows}
        data = json.dumps(document, separators=(",", ":")).encode()
        if len(data) <= MAX_TIMELINE_NBYTES - _TAIL.size:
            return data + _TAIL.pack(len(data), crc32c(data), _MAGIC)
        if most > 1:
            most //= 2
        elif others:
            del others[-(1 + len(others) // 4) :]
        else:
            break
    return b""


def decode_timeline(data: bytes) -> Timeline | None:
    """Decode the timeline at the end of these bytes; None if it is missing or damaged."""
    if len(data) < _TAIL.size:
        return None
    nbytes, crc, magic = _TAIL.unpack(data[-_TAIL.size :])
    text = data[-_TAIL.size - nbytes : -_TAIL.size]
    if magic != _MAGIC or len(text) != nbytes or crc32c(text) != crc:
        return None
    try:
        document = json.loads(text)
        return Timeline.from_rows(document["spans"], int(document["process"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
