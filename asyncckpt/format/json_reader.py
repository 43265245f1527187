"""JSON read value by value, so that a hostile document costs no more memory than its own size.

`json.loads` makes a Python object of everything: three bytes of ``[],`` become seventy. Here the
caller says what is due next, and only that is made.
"""

# Rule 1: nothing recurses, and every list and string has a limit that the caller states.

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, cast

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.allowance import TEXT_NBYTES, Allowance
from asyncckpt.format.faults import corrupt

FREE_NBYTES = 48 << 20
"""What the objects made of a document may take beyond three times its size, in memory."""

MAX_STRING_NBYTES = 4 << 20
"""Longest string, in bytes of JSON. One character beyond Latin makes it four times as long."""

MAX_VALUE_NBYTES = 1 << 20
"""Longest value of unknown kind, which does go through `json.loads`: at most 40 MiB there."""

MAX_DEPTH = 64
"""Containers inside each other in a value of unknown kind."""

_SPACE = re.compile(rb"[ \t\n\r]*+")
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]{0,18})(?![0-9.eE])")
_ESCAPED = re.compile(rb'[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+"')
_OTHER = re.compile(rb'[^"\[\]{}]*+')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_LITERAL = re.compile(rb"[-+.0-9A-Za-z]+")


class JsonReader:
    """A cursor in one JSON document.

    Args:
        data: the document in UTF-8.
        what: what it is, for errors.
        file: where it stands, for errors.
        base: offset of `data` in that file.
    """

    def __init__(self, data: bytes, what: str, file: str, base: int = 0) -> None:
        self._data = data
        self._allowance = Allowance(3 * len(data) + FREE_NBYTES)
        self._at = 0
        self._what = what
        self._file = file
        self._base = base

    def fault(self, reason: str, at: int | None = None) -> CorruptCheckpointError:
        """The error for what stands here, or at `at`."""
        offset = self._base + (self._at if at is None else at)
        return corrupt(self._what, reason, file=self._file, offset=offset)

    def unsupported(
        self, reason: str, *, expected: object, found: object
    ) -> UnsupportedFormatError:
        """The error for something intact that this release does not read."""
        offset = self._base + self._at
        return UnsupportedFormatError(
            f"{self._file}, byte {offset}: {reason}",
            file=self._file,
            offset=offset,
            expected=expected,
            found=found,
        )

    @property
    def position(self) -> int:
        """Where the cursor is in the document."""
        return self._at

    def take(self, nbytes: int) -> None:
        """What is made of the document takes `nbytes` more of memory.

        Raises:
            CorruptCheckpointError: it takes more than three times the document and 48 MiB.
        """
        try:
            self._allowance.take(nbytes)
        except MemoryError:
            raise self.fault("it would take far more memory than its bytes do") from None

    def match(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """What stands here, if it matches as a whole; else the cursor stays."""
        self._skip_space()
        found = pattern.match(self._data, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def members(self) -> Iterator[str]:
        """The keys of an object; its value must be read before the next one is asked for."""
        self._expect(b"{")
        if self._accept(b"}"):
            return
        while True:
            key = self.string()
            self._expect(b":")
            yield key
            if not self._accept(b","):
                self._expect(b"}")
                return

    def items(self) -> Iterator[int]:
        """The number of every value of a list; each must be read before the next is asked for."""
        self._expect(b"[")
        if self._accept(b"]"):
            return
        for number in itertools.count():
            yield number
            if not self._accept(b","):
                self._expect(b"]")
                return

    def at_string(self) -> bool:
        """Whether a string is due here."""
        self._skip_space()
        return self._data[self._at : self._at + 1] == b'"'

    def string(self) -> str:
        """A string."""
        start = self._expect(b'"') - 1
        data = self._data
        end = data.find(b'"', self._at)
        plain = end >= 0 and data.find(b"\\", self._at, end) < 0
        if not plain:
            found = _ESCAPED.match(data, self._at)
            end = found.end() - 1 if found is not None else -1
        if end < 0:
            raise self.fault("a string does not end, or has a control character", start)
        if end - start > MAX_STRING_NBYTES:
            raise self.fault(f"a string is longer than {MAX_STRING_NBYTES} bytes", start)
        text_nbytes = end - start if data[self._at : end].isascii() else 4 * (end - start)
        self.take(TEXT_NBYTES + text_nbytes)
        try:
            if plain:
                if _CONTROL.search(data, self._at, end):
                    raise ValueError("it has a control character")
                text = data[self._at : end].decode()
            else:
                text = cast(str, json.loads(data[start : end + 1]))
                text.encode()
        except ValueError as error:
            raise self.fault(f"a string is malformed ({error})", start) from None
        self._at = end + 1
        return text

    def integer(self) -> int:
        """A number without fraction or exponent, of at most 19 digits."""
        self._skip_space()
        found = _INTEGER.match(self._data, self._at)
        if found is None:
            raise self.fault(f"{self._here()} stands where an integer is due")
        self._at = found.end()
        return int(found[0])

    def integers(self, *, most: int) -> tuple[int, ...]:
        """A list of at most `most` integers."""
        self._expect(b"[")
        values: list[int] = []
        if self._accept(b"]"):
            return ()
        while True:
            if len(values) == most:
                raise self.fault(f"a list has more than {most} integers")
            values.append(self.integer())
            if not self._accept(b","):
                self._expect(b"]")
                return tuple(values)

    def value(self) -> Any:
        """A value of any kind, of at most 1 MiB and 64 containers in each other."""
        self._skip_space()
        start, depth = self._at, 0
        while True:
            self._skip_space()
            byte = self._data[self._at : self._at + 1]
            if byte == b'"':
                self.string()
            elif byte and byte in b"[{":
                depth += 1
                self._at += 1
            elif byte and byte in b"]}" and depth > 0:
                depth -= 1
                self._at += 1
            else:
                found = (_OTHER if depth > 0 else _LITERAL).match(self._data, self._at)
                if found is None or not found[0]:
                    raise self.fault(f"{self._here()} stands where a value is due")
                self._at = found.end()
            if depth > MAX_DEPTH or self._at - start > MAX_VALUE_NBYTES:
                raise self.fault("a value is too large or too deep", start)
            if depth == 0:
                break
        try:
            return json.loads(self._data[start : self._at])
        except ValueError as error:
            raise self.fault(f"a value is malformed ({error})", start) from None

    def end(self) -> None:
        """Nothing but space is left."""
        self._skip_space()
        if self._at != len(self._data):
            raise self.fault(f"{self._here()} stands behind the end")

    def _expect(self, token: bytes) -> int:
        self._skip_space()
        if self._data[self._at : self._at + 1] != token:
            raise self.fault(f"{self._here()} stands where {token.decode()!r} is due")
        self._at += 1
        return self._at

    def _accept(self, token: bytes) -> bool:
        self._skip_space()
        if self._data[self._at : self._at + 1] != token:
            return False
        self._at += 1
        return True

    def _skip_space(self) -> None:
        found = _SPACE.match(self._data, self._at)
        assert found is not None
        self._at = found.end()

    def _here(self) -> str:
        near = self._data[self._at : self._at + 16]
        return repr(near)[1:] if near else "the end"
