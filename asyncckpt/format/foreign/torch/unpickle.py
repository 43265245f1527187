"""One-pass interpreter of pickles. Nothing that a pickle names is imported, called or executed.

A pickle is a program for a small stack machine. The interpreter knows the opcodes that
`pickle.dumps` writes for plain values in protocols 2 to 5, looks up globals in the caller's table,
and refuses everything else. Source: `pickletools` of CPython 3.13.
"""

# Rule 1: an opcode pays for each object before it makes it (`Allowance`), so that the pickle's size
#   bounds the memory. Costs are upper bounds; only the state of an instance, which is cleared once
#   applied, is refunded.
# Rule 2: nothing recurses, and only strings, integers and stubs are hashed: values may be nested as
#   deep as the pickle is long (test_hostile_pickles_are_refused_within_their_memory).
# Rule 3: a method first reads its whole argument through `_bytes`, which checks for the end.

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.damage import corrupt, unsupported

MAX_PROTOCOL = 5

MAX_NAME_NBYTES = 512
"""Longest module or name of a global."""

MAX_INTEGER_NBYTES = 1785
"""Integers of 4,300 digits, the longest that Python itself converts from text."""

ALLOWANCE_RATIO = 20
"""Bytes of decoded objects, by their upper bounds, per byte of their pickle. Metadata of many small
shards needs 16, and actually takes half of that."""

# Upper bounds of the sizes of objects in 64-bit CPython, garbage-collector headers included.
_SLOT_NBYTES: Final = 32
"""A reference on the stack, and later in a list, a tuple or half an entry of a dict."""
INT_NBYTES: Final = 32
TEXT_NBYTES: Final = 56
TUPLE_NBYTES: Final = 56
LIST_NBYTES: Final = 104
EMPTY_NBYTES: Final = 64
"""A dict without entries."""
DICT_NBYTES: Final = 184
"""A dict with its first entries."""
_MEMO_NBYTES: Final = 9


class Allowance:
    """Memory for decoded objects; `left` is the number of bytes still available."""

    __slots__ = ("left",)

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def take(self, nbytes: int) -> None:
        """Subtract `nbytes`.

        Raises:
            MemoryError: fewer are left.
        """
        self.left -= nbytes
        if self.left < 0:
            raise MemoryError


@dataclass(frozen=True, slots=True, eq=False)
class PickleSource:
    """Bytes with a pickle that begins at `start`; bytes after its end are ignored.

    Errors call it `what`; the bytes begin at byte `base` of `file`.
    """

    data: bytes
    what: str
    file: str
    base: int = 0
    start: int = 0

    def corrupt(self, reason: str, at: int) -> CorruptCheckpointError:
        """Return the error for damage at byte `at` of the data."""
        return corrupt(self.what, reason, file=self.file, offset=self.base + at)

    def refused(self, found: str, at: int) -> UnsupportedFormatError:
        """Return the error for an unsupported object or opcode at byte `at`."""
        return unsupported(
            f"{self.what} has {found}, which is not read (nothing is executed from a checkpoint); "
            "save it as tensors, arrays, numbers, strings and plain containers, or leave it out "
            "with include=",
            file=self.file,
            offset=self.base + at,
            expected="tensors, numbers, strings, bytes, dicts, lists and tuples",
            found=found,
        )


class Stub:
    """Base class for the instances in a pickle: slots, filled from their state, or None."""

    __slots__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        # A slot that the state lacks.
        if name not in self.__slots__:
            raise AttributeError(name)
        return None

    def set_state(self, state: object) -> dict[str, object]:
        """Fill the slots from `state` by name, and return the other fields.

        Raises:
            ValueError: the state is not a dict, or has a name that is not text.
        """
        if type(state) is not dict:
            raise ValueError(f"the state of a {type(self).__name__} is a {type(state).__name__}")
        unknown: dict[str, object] = {}
        for name, value in state.items():
            if name in self.__slots__:
                setattr(self, name, value)
            elif type(name) is str:
                unknown[name[:80]] = value
            else:
                raise ValueError(f"a field of a {type(self).__name__} is a {type(name).__name__}")
        # The memo would keep the state of every instance alive.
        state.clear()
        return unknown


Function = Callable[[tuple[Any, ...], Allowance], object]
"""A function that a pickle may call. It takes the memory of its result from the allowance, and
raises ValueError if the arguments do not fit."""

Names = Mapping[tuple[str, str], object]
"""Globals by module and name: a `Function`, a subclass of `Stub`, or a value."""


class _StopError(Exception):
    """The opcode STOP was reached."""


class Unpickler:
    """Decoder of one pickle, which runs in steps.

    Args:
        names: the globals that it may name.
        allowance: memory for its objects.
        persistent: returns the object of a persistent id; raises ValueError if there is none.

    Attributes:
        unknown: ignored fields of newer writers, as `Class.field`.
    """

    def __init__(
        self,
        source: PickleSource,
        names: Names,
        allowance: Allowance,
        *,
        persistent: Callable[[object], object] | None = None,
    ) -> None:
        self.unknown: set[str] = set()
        self._source = source
        self._data = source.data
        self._names = names
        self._allowance = allowance
        self._persistent = persistent
        self._at = source.start
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        """Decode the whole pickle and return its value."""
        while not self.step(1 << 20):
            pass
        return self.value

    @property
    def value(self) -> Any:
        """The pickle's value after `step` has returned True."""
        return self._stack[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle that were interpreted."""
        return self._at - self._source.start

    def step(self, count: int) -> bool:
        """Interpret up to `count` opcodes; return whether the pickle has ended."""
        data, take = self._data, self._allowance.take
        begun = self._at
        try:
            for _ in range(count):
                begun = self._at
                method, argument, cost = _TABLE[data[begun]]
                self._at = begun + 1
                take(cost)
                method(self, argument)
        except _StopError:
            return True
        except IndexError:
            short = "it ends before its last opcode"
            reason = short if begun >= len(data) else "it takes more values than the stack has"
            raise self._source.corrupt(reason, begun) from None
        except ValueError as error:
            raise self._source.corrupt(str(error), begun) from None
        except MemoryError:
            reason = "its objects would take far more memory than its bytes do"
            raise self._source.corrupt(reason, begun) from None
        return False

    # -- arguments and operands

    def _bytes(self, nbytes: int) -> bytes:
        """Return the next bytes of an argument."""
        end = self._at + nbytes
        if end > len(self._data):
            raise ValueError("it ends before its last opcode")
        part = self._data[self._at : end]
        self._at = end
        return part

    def _number(self, width: int) -> int:
        return int.from_bytes(self._bytes(width), "little")

    def _raw(self, width: int) -> bytes:
        """Push and return an argument that follows its own length, which takes `width` bytes."""
        raw = self._bytes(self._number(width))
        self._allowance.take(TEXT_NBYTES + len(raw))
        self._stack.append(raw)
        return raw

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + MAX_NAME_NBYTES)
        if end < 0:
            raise ValueError(f"a global is cut off, or longer than {MAX_NAME_NBYTES} bytes")
        return self._bytes(end + 1 - self._at)[:-1].decode()

    def _pop(self, count: int) -> list[Any]:
        """Pop the last `count` values; with 0, those since the last mark."""
        stack, marks = self._stack, self._marks
        start = len(stack) - count if count else marks.pop()
        # Values below a mark must not be popped.
        if start < (marks[-1] if marks else 0):
            raise IndexError
        items = stack[start:]
        del stack[start:]
        return items

    # -- one method per kind of opcode

    def _stop(self, _: int) -> None:
        if len(self._stack) != 1 or self._marks:
            raise ValueError(f"{len(self._stack)} values are left at its end")
        raise _StopError

    def _proto(self, width: int) -> None:
        protocol = self._number(width)
        if protocol > MAX_PROTOCOL:
            raise self._source.refused(f"protocol {protocol}", self._at - 1 - width)

    def _refuse(self, code: int) -> None:
        name = REFUSED.get(code)
        if name is None:
            raise ValueError(f"it has the opcode {code:#04x}, which does not exist")
        raise self._source.refused(name, self._at - 1)

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _integer(self, width: int) -> None:
        self._stack.append(int.from_bytes(self._bytes(width), "little", signed=width == 4))

    def _long(self, width: int) -> None:
        nbytes = self._number(width)
        if nbytes > MAX_INTEGER_NBYTES:
            raise ValueError(f"it has an integer of {nbytes} bytes")
        self._allowance.take(INT_NBYTES + nbytes)
        self._stack.append(int.from_bytes(self._bytes(nbytes), "little", signed=True))

    def _float(self, width: int) -> None:
        self._stack.append(struct.unpack(">d", self._bytes(width))[0])

    def _text(self, width: int) -> None:
        raw = self._raw(width)
        if not raw.isascii():
            self._allowance.take(4 * len(raw))
        self._stack[-1] = raw.decode("utf-8", "surrogatepass")

    def _mark(self, _: int) -> None:
        self._marks.append(len(self._stack))

    def _tuple(self, count: int) -> None:
        self._stack.append(tuple(self._pop(count)))

    def _empty(self, kind: type) -> None:
        self._stack.append(kind())

    def _append(self, count: int) -> None:
        items = self._pop(count)
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError(f"it appends to a {type(target).__name__}")
        target.extend(items)

    def _set(self, count: int) -> None:
        items = self._pop(count)
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError(f"it sets {len(items)} keys and values of a {type(target).__name__}")
        if items and not target:
            # Not paid when the dict is made: a state that is cleared may be filled again.
            self._allowance.take(DICT_NBYTES - EMPTY_NBYTES)
        for row in range(0, len(items), 2):
            key = items[row]
            if type(key) not in (str, int) and not isinstance(key, Stub):
                found = f"a dict with a {type(key).__name__} as a key"
                raise self._source.refused(found, self._at - 1)
            target[key] = items[row + 1]

    def _put(self, width: int) -> None:
        count = len(self._memo)
        index = self._number(width) if width else count
        if index != count:
            found = f"memo entry {count} as number {index}"
            raise self._source.refused(found, self._at - 1 - width)
        self._memo.append(self._stack[-1])

    def _get(self, width: int) -> None:
        index = self._number(width)
        if index >= len(self._memo):
            raise ValueError(f"it uses memo entry {index} of {len(self._memo)}")
        self._stack.append(self._memo[index])

    def _global(self, _: int) -> None:
        at = self._at - 1
        module = self._line()
        self._push_name(module, self._line(), at)

    def _stack_global(self, _: int) -> None:
        module, name = self._pop(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("it names a global by something that is not text")
        self._push_name(module, name, self._at - 1)

    def _push_name(self, module: str, name: str, at: int) -> None:
        if (module, name) not in self._names:
            raise self._source.refused(f"the global {f'{module}.{name}'[:200]!r}", at)
        self._stack.append(self._names[module, name])

    def _reduce(self, _: int) -> None:
        function, arguments = self._pop(2)
        if not callable(function) or isinstance(function, type) or type(arguments) is not tuple:
            raise ValueError(f"it calls a {type(function).__name__}")
        self._stack.append(function(arguments, self._allowance))

    def _new(self, _: int) -> None:
        cls, arguments = self._pop(2)
        if not isinstance(cls, type) or not issubclass(cls, Stub) or arguments != ():
            raise ValueError(
                "it makes an instance of something other than a class, or with arguments"
            )
        self._allowance.take(cls.__basicsize__)
        self._stack.append(cls())

    def _build(self, _: int) -> None:
        target, state = self._pop(2)
        if not isinstance(target, Stub):
            raise ValueError(f"it sets the state of a {type(target).__name__}")
        kind = type(target).__name__
        filled = len(state) if type(state) is dict else 0
        unknown = target.set_state(state)
        if filled:
            self._allowance.left += DICT_NBYTES - EMPTY_NBYTES + 2 * _SLOT_NBYTES * filled
        for name, value in unknown.items():
            # An unknown field of a newer writer may change the meaning of others, as compression
            # would, unless it is empty.
            if value:
                found = f"the field {name!r} of {kind}, unknown to this release,"
                raise self._source.refused(found, self._at - 1)
            self.unknown.add(f"{kind}.{name}")
        self._stack.append(target)

    def _persist(self, _: int) -> None:
        (identity,) = self._pop(1)
        if self._persistent is None:
            raise self._source.refused("a persistent id", self._at - 1)
        self._stack.append(self._persistent(identity))


_Row = tuple[Callable[[Unpickler, Any], object], object, int]

READ: Final[dict[int, _Row]] = {
    0x28: (Unpickler._mark, 0, _SLOT_NBYTES),  # (  MARK
    0x2E: (Unpickler._stop, 0, 0),  # .  STOP
    0x80: (Unpickler._proto, 1, 0),  # PROTO
    0x95: (Unpickler._number, 8, 0),  # FRAME: a length that is not needed
    0x4E: (Unpickler._push, None, _SLOT_NBYTES),  # N  NONE
    0x88: (Unpickler._push, True, _SLOT_NBYTES),  # NEWTRUE
    0x89: (Unpickler._push, False, _SLOT_NBYTES),  # NEWFALSE
    0x29: (Unpickler._push, (), _SLOT_NBYTES),  # )  EMPTY_TUPLE
    0x4A: (Unpickler._integer, 4, _SLOT_NBYTES + INT_NBYTES),  # J  BININT
    0x4B: (Unpickler._integer, 1, _SLOT_NBYTES),  # K  BININT1
    0x4D: (Unpickler._integer, 2, _SLOT_NBYTES + INT_NBYTES),  # M  BININT2
    0x8A: (Unpickler._long, 1, _SLOT_NBYTES),  # LONG1
    0x8B: (Unpickler._long, 4, _SLOT_NBYTES),  # LONG4
    0x47: (Unpickler._float, 8, _SLOT_NBYTES + INT_NBYTES),  # G  BINFLOAT
    0x8C: (Unpickler._text, 1, _SLOT_NBYTES),  # SHORT_BINUNICODE
    0x58: (Unpickler._text, 4, _SLOT_NBYTES),  # X  BINUNICODE
    0x8D: (Unpickler._text, 8, _SLOT_NBYTES),  # BINUNICODE8
    0x43: (Unpickler._raw, 1, _SLOT_NBYTES),  # C  SHORT_BINBYTES
    0x42: (Unpickler._raw, 4, _SLOT_NBYTES),  # B  BINBYTES
    0x8E: (Unpickler._raw, 8, _SLOT_NBYTES),  # BINBYTES8
    0x85: (Unpickler._tuple, 1, _SLOT_NBYTES + TUPLE_NBYTES),  # TUPLE1
    0x86: (Unpickler._tuple, 2, _SLOT_NBYTES + TUPLE_NBYTES),  # TUPLE2
    0x87: (Unpickler._tuple, 3, _SLOT_NBYTES + TUPLE_NBYTES),  # TUPLE3
    0x74: (Unpickler._tuple, 0, _SLOT_NBYTES + TUPLE_NBYTES),  # t  TUPLE
    0x5D: (Unpickler._empty, list, _SLOT_NBYTES + LIST_NBYTES),  # ]  EMPTY_LIST
    0x61: (Unpickler._append, 1, 0),  # a  APPEND
    0x65: (Unpickler._append, 0, 0),  # e  APPENDS
    0x7D: (Unpickler._empty, dict, _SLOT_NBYTES + EMPTY_NBYTES),  # }  EMPTY_DICT
    0x73: (Unpickler._set, 2, 0),  # s  SETITEM
    0x75: (Unpickler._set, 0, 0),  # u  SETITEMS
    0x71: (Unpickler._put, 1, _MEMO_NBYTES),  # q  BINPUT
    0x72: (Unpickler._put, 4, _MEMO_NBYTES),  # r  LONG_BINPUT
    0x94: (Unpickler._put, 0, _MEMO_NBYTES),  # MEMOIZE
    0x68: (Unpickler._get, 1, _SLOT_NBYTES),  # h  BINGET
    0x6A: (Unpickler._get, 4, _SLOT_NBYTES),  # j  LONG_BINGET
    0x63: (Unpickler._global, 0, _SLOT_NBYTES),  # c  GLOBAL
    0x93: (Unpickler._stack_global, 0, _SLOT_NBYTES),  # STACK_GLOBAL
    0x52: (Unpickler._reduce, 0, _SLOT_NBYTES),  # R  REDUCE
    0x81: (Unpickler._new, 0, _SLOT_NBYTES),  # NEWOBJ
    0x62: (Unpickler._build, 0, _SLOT_NBYTES),  # b  BUILD
    0x51: (Unpickler._persist, 0, _SLOT_NBYTES + DICT_NBYTES),  # Q  BINPERSID
}
"""By opcode: method, its argument, and the memory that the opcode pays for."""

REFUSED: Final[dict[int, str]] = {
    **dict.fromkeys(b"ILFSVdlgp", "an opcode of protocol 0"),
    **dict.fromkeys((0x8F, 0x90), "a set"),
    0x91: "a frozenset",
    0x92: "an instance made with keywords",
    0x96: "a bytearray",
    **dict.fromkeys((0x97, 0x98), "a buffer beside the pickle"),
    **dict.fromkeys((0x82, 0x83, 0x84), "a code of the extension registry"),
    **dict.fromkeys((0x69, 0x6F), "an instance of an old-style class"),
    0x50: "a persistent id in text",
    **dict.fromkeys((0x54, 0x55), "a string of Python 2"),
    0x30: "the opcode POP",
    0x31: "the opcode POP_MARK",
    0x32: "the opcode DUP",
}
"""By refused opcode: its description in errors."""

_TABLE: Final = tuple(READ.get(code, (Unpickler._refuse, code, 0)) for code in range(256))
