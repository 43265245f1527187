"""The opcodes of pickle and a first look at all of them, which makes nothing.

Source: CPython's `pickletools`, which describes every opcode.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.faults import corrupt

MAX_PROTOCOL = 5
MAX_NAME_NBYTES = 512
"""Longest module or name of a global."""

MARK: Final = 0x28  # (
STOP: Final = 0x2E  # .
NONE: Final = 0x4E  # N
NEWTRUE: Final = 0x88
NEWFALSE: Final = 0x89
BININT: Final = 0x4A  # J
BININT1: Final = 0x4B  # K
BININT2: Final = 0x4D  # M
LONG1: Final = 0x8A
LONG4: Final = 0x8B
BINFLOAT: Final = 0x47  # G
SHORT_BINUNICODE: Final = 0x8C
BINUNICODE: Final = 0x58  # X
BINUNICODE8: Final = 0x8D
SHORT_BINBYTES: Final = 0x43  # C
BINBYTES: Final = 0x42  # B
BINBYTES8: Final = 0x8E
EMPTY_TUPLE: Final = 0x29  # )
TUPLE1: Final = 0x85
TUPLE2: Final = 0x86
TUPLE3: Final = 0x87
TUPLE: Final = 0x74  # t
EMPTY_LIST: Final = 0x5D  # ]
APPEND: Final = 0x61  # a
APPENDS: Final = 0x65  # e
EMPTY_DICT: Final = 0x7D  # }
SETITEM: Final = 0x73  # s
SETITEMS: Final = 0x75  # u
BINPUT: Final = 0x71  # q
LONG_BINPUT: Final = 0x72  # r
MEMOIZE: Final = 0x94
BINGET: Final = 0x68  # h
LONG_BINGET: Final = 0x6A  # j
GLOBAL: Final = 0x63  # c
STACK_GLOBAL: Final = 0x93
REDUCE: Final = 0x52  # R
NEWOBJ: Final = 0x81
BUILD: Final = 0x62  # b
BINPERSID: Final = 0x51  # Q
PROTO: Final = 0x80
FRAME: Final = 0x95

TWO_LINES: Final = -16
"""Width of an argument that is two texts, each ended by a line feed."""

_WIDTHS: dict[int, int] = {
    **dict.fromkeys(
        (
            *(MARK, STOP, NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE),
            *(EMPTY_LIST, APPEND, APPENDS, EMPTY_DICT, SETITEM, SETITEMS, MEMOIZE),
            *(STACK_GLOBAL, REDUCE, NEWOBJ, BUILD, BINPERSID),
        ),
        0,
    ),
    **dict.fromkeys((BININT1, BINPUT, BINGET, PROTO), 1),
    BININT2: 2,
    **dict.fromkeys((BININT, LONG_BINPUT, LONG_BINGET), 4),
    **dict.fromkeys((BINFLOAT, FRAME), 8),
    **dict.fromkeys((LONG1, SHORT_BINUNICODE, SHORT_BINBYTES), -1),
    **dict.fromkeys((LONG4, BINUNICODE, BINBYTES), -4),
    **dict.fromkeys((BINUNICODE8, BINBYTES8), -8),
    GLOBAL: TWO_LINES,
}

WIDTHS: Final[tuple[int | None, ...]] = tuple(map(_WIDTHS.get, range(256)))
"""Per opcode the bytes of its argument; negative: of the length that stands before the argument.
None for opcodes that are not read."""

REFUSED: Final[dict[int, str]] = {
    0x8F: "a set",
    0x90: "a set",
    0x91: "a frozenset",
    0x92: "an instance made with keywords",
    0x96: "a bytearray",
    0x97: "a buffer beside the pickle",
    0x98: "a buffer beside the pickle",
    0x82: "a code of the extension registry",
    0x83: "a code of the extension registry",
    0x84: "a code of the extension registry",
    0x69: "an instance of an old-style class",
    0x6F: "an instance of an old-style class",
    0x50: "a persistent id in text",
    0x54: "a string of Python 2",
    0x55: "a string of Python 2",
    0x30: "the opcode POP",
    0x31: "the opcode POP_MARK",
    0x32: "the opcode DUP",
    **dict.fromkeys(b"ILFSVdlgp", "an opcode of protocol 0"),
}
"""What the opcodes stand for that pickle has and that are not read."""


@dataclass(frozen=True, slots=True, eq=False)
class PickleSource:
    """Bytes with a pickle in them, and what to call it in errors.

    Attributes:
        data: the bytes.
        what: what the pickle is.
        file: where it stands.
        base: offset of `data` in that file.
        start: where in `data` the pickle begins; what follows its end is left alone.
    """

    data: bytes
    what: str
    file: str
    base: int = 0
    start: int = 0

    def corrupt(self, reason: str, at: int) -> CorruptCheckpointError:
        """The error for what stands at byte `at` of the data."""
        return corrupt(self.what, reason, file=self.file, offset=self.base + at)

    def refused(self, found: str, at: int) -> UnsupportedFormatError:
        """The error for something at byte `at` that is no part of a plain value."""
        return UnsupportedFormatError(
            f"{self.file}, byte {self.base + at}: {self.what} has {found}, which is not read "
            "(nothing is executed from a checkpoint); save it as tensors, numbers, strings and "
            "plain containers, or leave it out with include=",
            file=self.file,
            offset=self.base + at,
            expected="tensors, numbers, strings, bytes, dicts, lists and tuples",
            found=found,
        )


def scan(source: PickleSource) -> tuple[array[int], int]:
    """The memo entries that the pickle uses again, and where it ends in the data.

    The entries end with one more number, that of all entries. Nothing is made of the pickle.

    Raises:
        CorruptCheckpointError: it is cut off, or has opcodes that do not exist.
        UnsupportedFormatError: it has opcodes that are not read here.
    """
    data, size, widths = source.data, len(source.data), WIDTHS
    gets, puts = (BINGET, LONG_BINGET), (BINPUT, LONG_BINPUT)
    used = bytearray()
    at = source.start
    while at < size:
        begun, code = at, data[at]
        width = widths[code]
        if width is None:
            name = REFUSED.get(code)
            if name is not None:
                raise source.refused(name, at)
            raise source.corrupt(f"it has the opcode {code:#04x}, which does not exist", at)
        at = at + 1 + width if width >= 0 else _skip(data, at + 1, width)
        if at > size:
            break
        if code == MEMOIZE:
            used.append(0)
        elif code in gets:
            index = int.from_bytes(data[begun + 1 : at], "little")
            if index >= len(used):
                raise source.corrupt(f"it uses memo entry {index} of {len(used)}", begun)
            used[index] = 1
        elif code in puts:
            index = int.from_bytes(data[begun + 1 : at], "little")
            if index != len(used):
                raise source.refused(f"memo entry {len(used)} as number {index}", begun)
            used.append(0)
        elif code == PROTO and data[begun + 1] > MAX_PROTOCOL:
            raise source.refused(f"protocol {data[begun + 1]}", begun)
        elif code == STOP:
            rows = np.append(np.flatnonzero(np.frombuffer(used, np.uint8)), len(used))
            return array("q", rows.astype(np.int64).tobytes()), at
    raise source.corrupt("it ends before its last opcode", size)


def _skip(data: bytes, at: int, width: int) -> int:
    """The end of an argument that begins at `at` and states its own length."""
    if width == TWO_LINES:
        for _ in range(2):
            end = data.find(b"\n", at, at + MAX_NAME_NBYTES)
            at = end + 1 if end >= 0 else len(data) + 1
        return at
    return at - width + int.from_bytes(data[at : at - width], "little")
