"""Pickles of plain values, as `torch.save` writes them: numbers, strings, bytes and containers.

Protocol 2 writes `bytes` and `complex` as calls of `_codecs.encode` and `complex`; the only other
accepted calls are `OrderedDict` (read as a dict) and `torch.Size` (read as a tuple). Values that
are never written back may also have NumPy arrays, NumPy scalars and device names (`READ_NAMES`;
`torch_pickle` adds tensors). Source: `__reduce__` and `__setstate__` in `methods.c` and
`descriptor.c` of NumPy 2.3.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from asyncckpt.format.fields import MAX_RANK
from asyncckpt.format.foreign.torch.unpickle import (
    EMPTY_NBYTES,
    INT_NBYTES,
    TEXT_NBYTES,
    Allowance,
    Names,
    PickleSource,
    Stub,
    Unpickler,
)
from asyncckpt.tree import MAX_DEPTH
from asyncckpt.tree.structure import MAX_KEY_BITS

LEAF_NBYTES = 192
"""Memory of a leaf in the tables of an open checkpoint: its path, value and place."""

_ARRAY_NBYTES = 256
"""Memory of an array without its elements, and of temporary views."""

_CODES = frozenset("b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split())
"""Arguments of `numpy.dtype` for the supported dtypes."""

_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))


def _encode(arguments: tuple[Any, ...], allowance: Allowance) -> bytes:
    """Return bytes, which protocol 2 writes as a call of `_codecs.encode`."""
    if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] != "latin1":
        raise ValueError("it encodes something other than bytes")
    allowance.take(TEXT_NBYTES + len(arguments[0]))
    return arguments[0].encode("latin1")


def _bytes(arguments: tuple[Any, ...], _: Allowance) -> bytes:
    """Return empty bytes, which protocol 2 writes as a call of `bytes`."""
    if arguments:
        raise ValueError("it makes bytes from arguments")
    return b""


def _complex(arguments: tuple[Any, ...], allowance: Allowance) -> complex:
    if len(arguments) != 2 or any(type(part) is not float for part in arguments):
        raise ValueError("it makes a complex number of something other than two floats")
    allowance.take(INT_NBYTES)
    return complex(*arguments)


def empty_dict(arguments: tuple[Any, ...], allowance: Allowance) -> dict[Any, Any]:
    """Return an empty dict for a `collections.OrderedDict`; its items are set later."""
    if arguments:
        raise ValueError("it makes an OrderedDict from arguments")
    allowance.take(EMPTY_NBYTES)
    return {}


def _size(arguments: tuple[Any, ...], allowance: Allowance) -> tuple[int, ...]:
    if list(map(type, arguments)) == [tuple]:
        # As if copied, which bounds the time: a pickle may name one long tuple many times.
        allowance.take(len(arguments[0]))
        if set(map(type, arguments[0])) <= {int}:
            return tuple(arguments[0])
    raise ValueError("it makes a torch.Size of something other than a tuple of integers")


def _device(arguments: tuple[Any, ...], allowance: Allowance) -> str:
    if [type(part) for part in arguments] not in ([str], [str, int]):
        raise ValueError("it makes a torch.device of something other than a name and a number")
    name = ":".join(map(str, arguments))
    allowance.take(TEXT_NBYTES + 4 * len(name))  # a character takes at most 4 bytes
    return name


class SavedDtype(Stub):
    """NumPy dtype.

    Attributes:
        code: kind and size, as in `f8`.
        order: byte order: ``<``, ``>`` or ``|``.
    """

    __slots__ = ("code", "order")

    code: str

    def set_state(self, state: object) -> dict[str, object]:
        """Set the byte order; the rest of the state concerns unsupported dtypes."""
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "|"):
            raise ValueError("the state of a numpy.dtype has no byte order")
        self.order = state[1]
        return {}


class ValueLeaf:
    """Base class for leaves other than scalars."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return 0

    @property
    def fault(self) -> str:
        """Description of an unsupported leaf; empty for others."""
        return ""


class SavedArray(Stub, ValueLeaf):
    """NumPy array or scalar, a leaf of a value.

    Attributes:
        array: a view of the pickle's bytes, in its byte order; None if its dtype is unsupported.
        dtype: the name of its dtype.
    """

    __slots__ = ("array", "dtype")

    @property
    def nbytes(self) -> int:
        return 0 if self.array is None else int(self.array.nbytes)

    @property
    def fault(self) -> str:
        return f"a NumPy array of the dtype {self.dtype!r}" if self.array is None else ""

    def set_state(self, state: object) -> dict[str, object]:
        """Fill the array from version, shape, dtype, order and bytes."""
        if type(state) is not tuple or len(state) != 5:
            raise ValueError("the state of a NumPy array does not have 5 items")
        self.fill(*state[1:])
        return {}

    def fill(self, shape: object, dtype: object, fortran: object, data: object) -> None:
        """Set the array, if its dtype is supported."""
        if type(shape) is not tuple or len(shape) > MAX_RANK or not isinstance(dtype, SavedDtype):
            raise ValueError("a NumPy array has no shape, or no dtype")
        if any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
            raise ValueError("a NumPy array has an extent that is not a size")
        self.dtype = dtype.code
        if dtype.code not in _CODES:
            return
        stored = np.dtype(dtype.code).newbyteorder(dtype.order or "<")
        if type(data) is not bytes or math.prod(shape) * stored.itemsize != len(data):
            raise ValueError("the bytes of a NumPy array do not fit its shape and dtype")
        # Not copied: many arrays of a pickle may share the same bytes.
        self.array = np.frombuffer(data, stored).reshape(shape, order="F" if fortran else "C")


_NDARRAY = object()
"""The class `numpy.ndarray`, which pickles only pass as an argument."""


def _dtype(arguments: tuple[Any, ...], allowance: Allowance) -> SavedDtype:
    if len(arguments) != 3 or type(arguments[0]) is not str:
        raise ValueError("it makes a numpy.dtype of something other than its name")
    code = arguments[0][:80]
    allowance.take(SavedDtype.__basicsize__ + TEXT_NBYTES + 4 * len(code))
    made = SavedDtype()
    made.code = code
    return made


def _new_array(arguments: tuple[Any, ...], allowance: Allowance) -> SavedArray:
    """Return an array that is filled later, like `numpy._core.multiarray._reconstruct`."""
    if len(arguments) != 3 or arguments[0] is not _NDARRAY:
        raise ValueError("it makes a NumPy array of another class")
    allowance.take(SavedArray.__basicsize__ + _ARRAY_NBYTES)
    return SavedArray()


def _scalar(arguments: tuple[Any, ...], allowance: Allowance) -> SavedArray:
    if len(arguments) != 2:
        raise ValueError("it makes a NumPy scalar of something other than a dtype and bytes")
    allowance.take(SavedArray.__basicsize__ + _ARRAY_NBYTES)
    made = SavedArray()
    made.fill((), arguments[0], False, arguments[1])
    return made


_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")

NAMES: Names = {
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _bytes,
    ("builtins", "bytes"): _bytes,
    ("__builtin__", "complex"): _complex,
    ("builtins", "complex"): _complex,
    ("collections", "OrderedDict"): empty_dict,
    ("torch", "Size"): _size,
}

READ_NAMES: Names = {
    **NAMES,
    ("torch", "device"): _device,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    **{(module, "_reconstruct"): _new_array for module in _ARRAYS},
    **{(module, "scalar"): _scalar for module in _ARRAYS},
}


def load_value(source: PickleSource, allowance: Allowance, *, depth: int = 0) -> Any:
    """Return the plain value of a pickle; it will be below `depth` containers in a tree."""
    return plain_value(Unpickler(source, NAMES, allowance), source, allowance, depth=depth)


def plain_value(
    unpickler: Unpickler, source: PickleSource, allowance: Allowance, *, depth: int = 0
) -> Any:
    """Return the value of a pickle, whose leaves are scalars and `ValueLeaf` instances."""
    value = unpickler.run()
    try:
        found = _not_plain(value, allowance, MAX_DEPTH - depth, unpickler.nbytes)
    except ValueError as error:
        raise source.corrupt(str(error), source.start) from None
    except MemoryError:
        reason = "its value would take far more memory than its bytes do"
        raise source.corrupt(reason, source.start) from None
    if found is not None:
        raise source.refused(found, source.start)
    return value


def _not_plain(value: Any, allowance: Allowance, depth: int, most: int) -> str | None:
    """Describe a part of a value that is not plain, or return None. Containers count at every use.

    Raises:
        ValueError: the value is deeper than `depth` or has more than `most` parts.
        MemoryError: its leaves take more than the allowance.
    """
    level = [value]
    count = 0
    while level:
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _SCALARS:
                allowance.take(LEAF_NBYTES + (len(item) if kind is bytes else 0))
            elif kind is dict:
                if any(type(key) not in (str, int) for key in item):
                    return "a dict with a key that is neither a string nor an integer"
                if any(type(key) is int and key.bit_length() > MAX_KEY_BITS for key in item):
                    return f"a dict with an integer of more than {MAX_KEY_BITS} bits as a key"
                inner += item.values()
            elif kind is list or kind is tuple:
                inner += item
            elif isinstance(item, ValueLeaf):
                if item.fault:
                    return item.fault
                allowance.take(LEAF_NBYTES + item.nbytes)
            else:
                return f"a {kind.__name__}"
            if count + len(inner) > most:
                raise ValueError("it repeats one container so often that its value is too large")
        count += len(inner)
        level = inner
        depth -= 1
        if inner and depth <= 0:
            raise ValueError(f"its containers are more than {MAX_DEPTH} deep")
    return None
