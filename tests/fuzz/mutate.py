"""Mutators: bytes, JSON and pickle opcodes changed in ways that decoders must survive.

A mutator makes a new input of an old one, by the random numbers it is given and nothing else. What
checksums an input needs is not its business: targets put them around it.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickletools
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

Mutator = Callable[[bytes, Random, Sequence[bytes]], bytes]
"""An input, random numbers and other inputs to take pieces from -> a changed input."""

MAX_NBYTES = 1 << 16
"""Longest input that a mutator makes."""

_BYTES = (0, 1, 2, 127, 128, 129, 254, 255)
_POWERS = tuple(
    sorted(
        {(1 << bits) + change for bits in (7, 8, 14, 16, 31, 32, 62, 63, 64) for change in (-1, 0)}
    )
)
_NUMBERS = (0, 1, 2, 3, 4095, 4096, *_POWERS)


def mutate_bytes(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """The data after one to four small changes."""
    for _ in range(1 + int(4 * random.random() ** 2)):
        data = random.choice(_CHANGES)(data, random, corpus)
    return data[:MAX_NBYTES]


def _place(data: bytes, random: Random) -> int:
    return int(random.random() * len(data))


def _flip(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    if not data:
        return b"\0"
    at = _place(data, random)
    return data[:at] + bytes((data[at] ^ (1 << int(8 * random.random())),)) + data[at + 1 :]


def _set(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    at = _place(data, random)
    return data[:at] + bytes((random.choice(_BYTES),)) + data[at + 1 :]


def _add(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    """One byte counts one up or down, as a number in it may."""
    if not data:
        return b"\1"
    at = _place(data, random)
    return data[:at] + bytes(((data[at] + random.choice((-1, 1))) & 255,)) + data[at + 1 :]


def _insert(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    at = _place(data, random)
    return data[:at] + random.randbytes(1 + int(4 * random.random())) + data[at:]


def _remove(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    at = _place(data, random)
    return data[:at] + data[at + 1 + int(8 * random.random() ** 3) :]


def _cut(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    return data[: _place(data, random)]


def _repeat(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    at = _place(data, random)
    end = at + 1 + int(32 * random.random())
    times = 2 if random.random() < 0.9 else 1 + int(300 * random.random())
    return data[:at] + data[at:end] * times + data[end:]


def _number(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    """A number of the kinds that binary formats have stands somewhere instead of what did."""
    at, value = _place(data, random), random.choice(_NUMBERS)
    kind = int(4 * random.random())
    if kind == 0:
        number = varint(value)
        return data[:at] + number + data[at + random.choice((0, 1, len(number))) :]
    width, order = (8, "little") if kind < 3 else (8, "big")
    if value < 1 << 32 and random.random() < 0.5:
        width = 4
    number = (value & ((1 << 8 * width) - 1)).to_bytes(width, order)  # type: ignore[arg-type]
    return data[:at] + number + data[at + width :]


def _splice(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """A piece of another input stands somewhere."""
    other = random.choice(corpus)
    begin = _place(other, random)
    piece = other[begin : begin + 1 + int(64 * random.random() ** 2)]
    at = _place(data, random)
    return data[:at] + piece + data[at + (len(piece) if random.random() < 0.5 else 0) :]


_CHANGES = (
    *(_flip, _flip, _set, _add, _add, _insert, _remove, _remove),
    *(_cut, _repeat, _number, _number, _splice),
)


def varint(value: int) -> bytes:
    """Unsigned LEB128."""
    out = bytearray()
    while value >= 128:
        out.append((value & 127) | 128)
        value >>= 7
    return bytes((*out, value))


# ------------------------------------------------------------------------------------------- JSON

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, "", "0", "/", "..", "a/../b", "\0"),
    *("\ud800", "ö" * 10, "x" * 5000, [], [[]], {}, {"": 0}, [0] * 100, [0, -1], [1 << 40] * 3),
    *(10**400, -(10**30), *_POWERS, "nan", "inf", "int4", "float32", "default", "[" * 50),
)
_DEEP = ("[" * 5000 + "]" * 5000, '{"a":' * 3000 + "0" + "}" * 3000, "1" * 5000, "1e999", "NaN")


def mutate_json(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """A document with some of its values changed; rarely one that is JSON no more."""
    if random.random() < 0.1:
        return mutate_bytes(data, random, corpus)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, random, corpus)
    for _ in range(1 + int(3 * random.random() ** 2)):
        document = _change(document, random)
    try:
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=random.random() < 0.5)
        data = text.encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data
    if random.random() < 0.03:
        return data.replace(b"0", random.choice(_DEEP).encode(), 1)[:MAX_NBYTES]
    return data[:MAX_NBYTES]


def _change(document: Any, random: Random) -> Any:
    places: list[tuple[Any, Any]] = []
    level = [document]
    while level:  # every place where a value stands
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                places += [(node, key) for key in node]
                inner += node.values()
            elif isinstance(node, list):
                places += [(node, index) for index in range(len(node))]
                inner += node
        level = [node for node in inner if isinstance(node, (dict, list))]
    if not places:
        return _value(random)
    node, key = random.choice(places)
    other, other_key = random.choice(places)
    kind = int(8 * random.random())
    if kind < 2:
        node[key] = _value(random)
    elif kind == 2:
        del node[key]
    elif kind == 3:
        node[key] = other[other_key] if not isinstance(other[other_key], (dict, list)) else []
    elif kind == 4 and type(node[key]) is int:
        node[key] += random.choice((-1, 1))
    elif kind == 5 and isinstance(node[key], str):
        text = node[key].encode("utf-8", "surrogatepass")
        node[key] = mutate_bytes(text, random, [text]).decode("latin-1")
    elif kind == 6 and isinstance(node, list):
        node.insert(key, _value(random) if random.random() < 0.5 else node[key])
    elif isinstance(node, dict):
        node[random.choice(_NAMES)] = node[key]
    return document


def _value(random: Random) -> Any:
    value = random.choice(_VALUES)
    # Documents are changed in place: no two may share a container.
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


_NAMES = ("", "0", "1", "99", "-1", "01", "extra", "name", "shape", "crc32c", "version", "\0")


# ----------------------------------------------------------------------------------------- pickle


@lru_cache(maxsize=1024)
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    """The opcodes of a pickle with their arguments; none if it is no pickle any more."""
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return ()
    return tuple(data[a:b] for a, b in itertools.pairwise((*starts, len(data))))


_OPCODES = [ord(opcode.code) for opcode in pickletools.opcodes]


def mutate_pickle(data: bytes, random: Random, corpus: Sequence[bytes]) -> bytes:
    """A pickle with opcodes removed, repeated, exchanged or replaced."""
    if random.random() < 0.3:
        return mutate_bytes(data, random, corpus)
    ops = list(_opcodes(data))
    if not ops:
        return mutate_bytes(data, random, corpus)
    for _ in range(1 + int(3 * random.random() ** 2)):
        at, other = int(random.random() * len(ops)), int(random.random() * len(ops))
        kind = int(7 * random.random())
        if kind == 0 and len(ops) > 1:
            del ops[at]
        elif kind == 1:
            ops[at:at] = ops[other : other + 1 + int(6 * random.random())]
        elif kind == 2:
            ops[at], ops[other] = ops[other], ops[at]
        elif kind == 3:
            ops[at] = bytes((random.choice(_OPCODES),)) + ops[at][1:]
        elif kind == 4:
            ops.insert(at, bytes((random.choice(_OPCODES),)))
        elif kind == 5:
            ops[at] = ops[at][:1] + mutate_bytes(ops[at][1:], random, ops)
        else:
            ops[at:at] = [ops[at]] * (200 if random.random() < 0.05 else 1)
    return b"".join(ops)[:MAX_NBYTES]
