"""An interpreter for pickles of plain values. Nothing of a pickle is imported, called or executed.

A pickle is a program for a small stack machine. Its opcodes of protocols 2 to 5 are done here; the
names in it are looked up in a table that the caller gives, and what is not in there is refused.
"""

# Rule 1: all opcodes are read before the first object is made: a pickle that is cut off, or has an
#   opcode beyond the table, makes nothing.
# Rule 2: what is made is counted against an allowance first. Of the memo, to which pickles add
#   everything, only what is used again is kept.
# Rule 3: nothing recurses, and of a pickle only strings, integers and stubs are hashed: values may
#   be nested as deep as the pickle is long.

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from sys import getrefcount
from typing import Any, Final

from asyncckpt.format import opcodes as op
from asyncckpt.format.allowance import (
    DICT_NBYTES,
    ENTRY_NBYTES,
    FILLED_NBYTES,
    FLOAT_NBYTES,
    INT_NBYTES,
    ITEM_NBYTES,
    LIST_NBYTES,
    TEXT_NBYTES,
    TUPLE_NBYTES,
    Allowance,
)
from asyncckpt.format.opcodes import PickleSource, scan

MAX_STACK = 1 << 20
"""Values that wait on the stack: 8 MiB. Pickles write lists and dicts in batches of 1,000."""

_BATCH = 1 << 12
"""Opcodes between two looks at the stack, each of which adds one value at most."""

MAX_MARKS = 1 << 10
"""Containers that are open at once."""

MAX_INTEGER_NBYTES = 1785
"""Integers of 4,300 digits, the most that Python itself takes from a text."""


class Stub:
    """Base of what stands for the instances of one class: slots, filled from their state."""

    __slots__: tuple[str, ...] = ()

    def set_state(self, state: object) -> None:
        """The slots hold what `state` says, by name; others keep their values.

        Raises:
            ValueError: it is no dict, or names what is no slot.
        """
        if type(state) is not dict:
            raise ValueError(f"the state of a {type(self).__name__} is a {type(state).__name__}")
        for name, value in state.items():
            if name not in self.__slots__:
                raise ValueError(f"a {type(self).__name__} has no field {str(name)[:80]!r}")
            setattr(self, name, value)


Function = Callable[[tuple[Any, ...], Allowance], object]
"""What a pickle may call with its arguments. Takes from the allowance what its result takes, and
raises ValueError where the arguments do not fit."""

Names = Mapping[tuple[str, str], object]
"""What globals stand for, by module and name: a `Function`, a subclass of `Stub`, or a value."""


_MY_REFERENCES: Final = 2
"""References to an object that nobody else has: a name and the argument of `getrefcount`."""


class _StopError(Exception):
    """The opcode STOP was done."""


class Unpickler:
    """One pickle, decoded step by step.

    Args:
        source: the pickle.
        names: what its globals stand for.
        allowance: what the objects may take.
        persistent: gives the object for a persistent id; raises ValueError where there is none.

    Attributes:
        nbytes: length of the pickle.

    Raises:
        CorruptCheckpointError: the pickle is cut off or malformed.
        UnsupportedFormatError: it uses what is not read here.
    """

    def __init__(
        self,
        source: PickleSource,
        names: Names,
        allowance: Allowance,
        *,
        persistent: Callable[[object], object] | None = None,
    ) -> None:
        self._source = source
        self._data = source.data
        self._names = names
        self._allowance = allowance
        self._persistent = persistent
        self._at = source.start
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._memo_count = 0
        self._used, end = scan(source)
        self.nbytes = end - source.start
        self._next_used = self._used[0]

    def run(self) -> Any:
        """The pickle's value."""
        while not self.step(1 << 20):
            pass
        return self.value

    @property
    def value(self) -> Any:
        """The pickle's value, once `step` has returned True."""
        return self._stack[-1]

    def step(self, count: int) -> bool:
        """At least `count` more opcodes are done; True when the last one was."""
        begun = self._at
        try:
            for _ in range(0, count, _BATCH):
                for _ in range(_BATCH):
                    begun = self._at
                    self._at = begun + 1
                    method, argument = _TABLE[self._data[begun]]
                    method(self, argument)
                if len(self._stack) > MAX_STACK:
                    raise ValueError(f"it has more than {MAX_STACK} values on its stack")
        except IndexError:
            raise self._source.corrupt("it takes more values than there are", begun) from None
        except ValueError as error:
            raise self._source.corrupt(str(error), begun) from None
        except MemoryError:
            raise self._source.corrupt(
                "its objects would take far more memory than its bytes do", begun
            ) from None
        except _StopError:
            return True
        return False

    # -- arguments

    def _number(self, width: int) -> int:
        at = self._at
        self._at = at + width
        return int.from_bytes(self._data[at : at + width], "little")

    def _raw(self, width: int) -> bytes:
        nbytes = self._number(width)
        self._allowance.take(TEXT_NBYTES + nbytes)
        at = self._at
        self._at = at + nbytes
        return self._data[at : at + nbytes]

    def _few(self, count: int) -> list[Any]:
        """The last values of the stack; with 0 those since the last mark."""
        stack, marks = self._stack, self._marks
        start = len(stack) - count if count else marks.pop()
        # What stood there before a mark is not there to be taken.
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

    def _skip(self, width: int) -> None:
        self._at += width

    def _constant(self, value: object) -> None:
        self._stack.append(value)

    def _integer(self, width: int) -> None:
        if width > 1:
            self._allowance.take(INT_NBYTES)
        at = self._at
        self._at = at + width
        self._stack.append(int.from_bytes(self._data[at : at + width], "little", signed=width == 4))

    def _long(self, width: int) -> None:
        nbytes = self._number(width)
        if nbytes > MAX_INTEGER_NBYTES:
            raise ValueError(f"it has an integer of {nbytes} bytes")
        self._allowance.take(INT_NBYTES + nbytes)
        at = self._at
        self._at = at + nbytes
        self._stack.append(int.from_bytes(self._data[at : at + nbytes], "little", signed=True))

    def _float(self, width: int) -> None:
        self._allowance.take(FLOAT_NBYTES)
        self._stack.append(_FLOAT.unpack_from(self._data, self._at)[0])
        self._at += width

    def _text(self, width: int) -> None:
        raw = self._raw(width)
        if not raw.isascii():
            self._allowance.take(4 * len(raw))
        self._stack.append(raw.decode("utf-8", "surrogatepass"))

    def _bytes(self, width: int) -> None:
        self._stack.append(self._raw(width))

    def _mark(self, _: int) -> None:
        if len(self._marks) == MAX_MARKS:
            raise ValueError(f"more than {MAX_MARKS} of its containers are open at once")
        self._marks.append(len(self._stack))

    def _tuple(self, count: int) -> None:
        items = self._few(count)
        self._allowance.take(TUPLE_NBYTES + 8 * len(items))
        self._stack.append(tuple(items))

    def _list(self, _: int) -> None:
        self._allowance.take(LIST_NBYTES)
        self._stack.append([])

    def _dict(self, _: int) -> None:
        self._allowance.take(DICT_NBYTES)
        self._stack.append({})

    def _append(self, count: int) -> None:
        items = self._few(count)
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError(f"it appends to a {type(target).__name__}")
        self._allowance.take(ITEM_NBYTES * len(items))
        target.extend(items)

    def _set(self, count: int) -> None:
        items = self._few(count)
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError(f"it sets {len(items)} keys and values of a {type(target).__name__}")
        first = 0 if target or not items else FILLED_NBYTES
        self._allowance.take(first + ENTRY_NBYTES * (len(items) // 2))
        for row in range(0, len(items), 2):
            key = items[row]
            if type(key) not in (str, int) and not isinstance(key, Stub):
                found = f"a dict with a {type(key).__name__} as a key"
                raise self._source.refused(found, self._at - 1)
            target[key] = items[row + 1]

    def _put(self, width: int) -> None:
        self._at += width
        if self._memo_count == self._next_used:
            self._allowance.take(16)
            self._memo.append(self._stack[-1])
            self._next_used = self._used[len(self._memo)]
        self._memo_count += 1

    def _get(self, width: int) -> None:
        self._stack.append(self._memo[bisect_left(self._used, self._number(width))])

    def _global(self, _: int) -> None:
        at = self._at
        middle = self._data.index(b"\n", at)
        end = self._data.index(b"\n", middle + 1)
        self._at = end + 1
        self._name(self._data[at:middle].decode(), self._data[middle + 1 : end].decode(), at - 1)

    def _stack_global(self, _: int) -> None:
        module, name = self._few(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("it names a global by what is no text")
        self._name(module, name, self._at - 1)

    def _name(self, module: str, name: str, at: int) -> None:
        try:
            self._stack.append(self._names[module, name])
        except KeyError:
            found = f"the global {f'{module}.{name}'[:200]!r}"
            raise self._source.refused(found, at) from None

    def _reduce(self, _: int) -> None:
        function, arguments = self._few(2)
        if not callable(function) or isinstance(function, type) or type(arguments) is not tuple:
            raise ValueError(f"it calls a {type(function).__name__}")
        self._stack.append(function(arguments, self._allowance))
        if getrefcount(arguments) <= _MY_REFERENCES:
            self._allowance.give(TUPLE_NBYTES + 8 * len(arguments))

    def _new(self, _: int) -> None:
        cls, arguments = self._few(2)
        if not isinstance(cls, type) or not issubclass(cls, Stub) or arguments != ():
            raise ValueError("it makes an instance of what is no class, or with arguments")
        self._allowance.take(16 + cls.__basicsize__)
        self._stack.append(cls())

    def _build(self, _: int) -> None:
        target, state = self._few(2)
        if not isinstance(target, Stub):
            raise ValueError(f"it sets the state of a {type(target).__name__}")
        target.set_state(state)
        self._stack.append(target)
        if getrefcount(state) <= _MY_REFERENCES:
            # Pickles describe every instance by a dict or tuple that nothing else uses.
            if type(state) is dict:
                first = FILLED_NBYTES if state else 0
                self._allowance.give(DICT_NBYTES + first + ENTRY_NBYTES * len(state))
            elif type(state) is tuple:
                self._allowance.give(TUPLE_NBYTES + 8 * len(state))

    def _persist(self, _: int) -> None:
        (identity,) = self._few(1)
        if self._persistent is None:
            raise self._source.refused("a persistent id", self._at - 1)
        self._allowance.take(DICT_NBYTES)
        self._stack.append(self._persistent(identity))


_FLOAT = struct.Struct(">d")

_METHODS: Final[dict[int, tuple[Callable[[Unpickler, Any], None], object]]] = {
    op.STOP: (Unpickler._stop, 0),
    op.PROTO: (Unpickler._skip, 1),
    op.FRAME: (Unpickler._skip, 8),
    op.MARK: (Unpickler._mark, 0),
    op.NONE: (Unpickler._constant, None),
    op.NEWTRUE: (Unpickler._constant, True),
    op.NEWFALSE: (Unpickler._constant, False),
    op.BININT: (Unpickler._integer, 4),
    op.BININT1: (Unpickler._integer, 1),
    op.BININT2: (Unpickler._integer, 2),
    op.LONG1: (Unpickler._long, 1),
    op.LONG4: (Unpickler._long, 4),
    op.BINFLOAT: (Unpickler._float, 8),
    op.SHORT_BINUNICODE: (Unpickler._text, 1),
    op.BINUNICODE: (Unpickler._text, 4),
    op.BINUNICODE8: (Unpickler._text, 8),
    op.SHORT_BINBYTES: (Unpickler._bytes, 1),
    op.BINBYTES: (Unpickler._bytes, 4),
    op.BINBYTES8: (Unpickler._bytes, 8),
    op.EMPTY_TUPLE: (Unpickler._constant, ()),
    op.TUPLE1: (Unpickler._tuple, 1),
    op.TUPLE2: (Unpickler._tuple, 2),
    op.TUPLE3: (Unpickler._tuple, 3),
    op.TUPLE: (Unpickler._tuple, 0),
    op.EMPTY_LIST: (Unpickler._list, 0),
    op.APPEND: (Unpickler._append, 1),
    op.APPENDS: (Unpickler._append, 0),
    op.EMPTY_DICT: (Unpickler._dict, 0),
    op.SETITEM: (Unpickler._set, 2),
    op.SETITEMS: (Unpickler._set, 0),
    op.BINPUT: (Unpickler._put, 1),
    op.LONG_BINPUT: (Unpickler._put, 4),
    op.MEMOIZE: (Unpickler._put, 0),
    op.BINGET: (Unpickler._get, 1),
    op.LONG_BINGET: (Unpickler._get, 4),
    op.GLOBAL: (Unpickler._global, 0),
    op.STACK_GLOBAL: (Unpickler._stack_global, 0),
    op.REDUCE: (Unpickler._reduce, 0),
    op.NEWOBJ: (Unpickler._new, 0),
    op.BUILD: (Unpickler._build, 0),
    op.BINPERSID: (Unpickler._persist, 0),
}

_NO_METHOD = (Unpickler._skip, 0)
_TABLE: Final[Sequence[tuple[Callable[[Unpickler, Any], None], object]]] = [
    _METHODS.get(code, _NO_METHOD) for code in range(256)
]
"""By opcode; `scan` has let none pass that is not in `_METHODS`."""
