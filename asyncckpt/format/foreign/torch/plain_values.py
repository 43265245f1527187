"""Pickles of plain values, as `torch.save` writes them: numbers, strings, bytes and containers.

Protocol 2 writes `bytes` and `complex` as calls of `_codecs.encode` and `complex`; these,
`OrderedDict` (read as a dict) and `torch.Size` (read as a tuple) are the only accepted calls.
"""

from __future__ import annotations

from typing import Any

from asyncckpt.format.foreign.torch.unpickle import (
    DICT_NBYTES,
    INT_NBYTES,
    TEXT_NBYTES,
    Allowance,
    Names,
    PickleSource,
    Unpickler,
)
from asyncckpt.tree import MAX_DEPTH
from asyncckpt.tree.structure import MAX_KEY_BITS

LEAF_NBYTES = 192
"""Memory that a leaf takes in the tables of an open checkpoint: its path, its value, its place."""

_SCALARS = frozenset((type(None), bool, int, float, complex, str, bytes))


def _encode(arguments: tuple[Any, ...], allowance: Allowance) -> bytes:
    """Return bytes as protocol 2 writes them: a call of `_codecs.encode`."""
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
    """Return an empty dict for a `collections.OrderedDict`, whose items are set afterwards."""
    if arguments:
        raise ValueError("it makes an OrderedDict from arguments")
    allowance.take(DICT_NBYTES)
    return {}


def _size(arguments: tuple[Any, ...], _: Allowance) -> tuple[int, ...]:
    if len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise ValueError("it makes a torch.Size of something other than a tuple")
    if any(type(n) is not int for n in arguments[0]):
        raise ValueError("it makes a torch.Size of something other than integers")
    return arguments[0]


NAMES: Names = {
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _bytes,
    ("builtins", "bytes"): _bytes,
    ("__builtin__", "complex"): _complex,
    ("builtins", "complex"): _complex,
    ("collections", "OrderedDict"): empty_dict,
    ("torch", "Size"): _size,
}


def load_value(source: PickleSource, allowance: Allowance, *, depth: int = 0) -> Any:
    """Return the plain value of a pickle, which will be `depth` containers deep in a tree."""
    unpickler = Unpickler(source, NAMES, allowance)
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
    """Return what in a value is not plain, or None. Shared containers count for every use.

    Raises `ValueError` if it is deeper than `depth` or has more than `most` parts, `MemoryError` if
    its leaves take more than the allowance.
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
            else:
                return f"a {kind.__name__}"
            if count + len(inner) > most:
                raise ValueError("it uses one container so often that its value has no bounds")
        count += len(inner)
        level = inner
        depth -= 1
        if inner and depth <= 0:
            raise ValueError(f"its containers are more than {MAX_DEPTH} deep")
    return None
