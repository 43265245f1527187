"""Scalar leaves as JSON without loss: integers of any size, NaN payloads, any string.

====== =======================================================================================
kind   JSON
====== =======================================================================================
int    decimal string
float  16 hex digits, the IEEE 754 bits, most significant first
complex list of two such strings, real and imaginary part
bool   true or false
str    the string; with lone surrogates, {"utf8": base64} of its UTF-8 form, in which they
       pass through
bytes  base64
====== =======================================================================================
"""

from __future__ import annotations

import base64
import re
import struct
from typing import TypeAlias

from asyncckpt.errors import UnsupportedLeafError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
Scalar: TypeAlias = int | float | complex | bool | str | bytes

SCALAR_KINDS = frozenset(("int", "float", "complex", "bool", "str", "bytes"))

MAX_INT_DIGITS = 4300
"""Python refuses to convert longer decimal strings, because that takes quadratic time."""

_INT_BOUND = 10**MAX_INT_DIGITS
_INT = re.compile(r"0|-?[1-9][0-9]*")
_BITS = re.compile(r"[0-9a-f]{16}")


def is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_scalar(value: Scalar) -> tuple[str, JsonValue]:
    """Return kind and JSON of a scalar leaf; an instance of a subclass has the kind of its base.

    Raises:
        UnsupportedLeafError: the type is not one of the six, or the integer has over 4,300 digits.
    """
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):
        if not -_INT_BOUND < value < _INT_BOUND:
            raise UnsupportedLeafError(
                f"an integer of more than {MAX_INT_DIGITS} digits cannot be saved; save its bytes "
                "(int.to_bytes) instead",
                expected=f"at most {MAX_INT_DIGITS} digits",
                found=f"{value.bit_length()} bits",
            )
        return "int", int.__repr__(value)
    if isinstance(value, float):
        return "float", _float_bits(value)
    if isinstance(value, complex):
        return "complex", [_float_bits(value.real), _float_bits(value.imag)]
    if isinstance(value, str):
        if is_unicode(value):
            return "str", str(value)
        raw = value.encode("utf-8", "surrogatepass")
        return "str", {"utf8": base64.b64encode(raw).decode()}
    if isinstance(value, bytes):
        return "bytes", base64.b64encode(value).decode()
    raise UnsupportedLeafError(
        f"a {type(value).__name__} is not a scalar that can be saved; use int, float, complex, "
        "bool, str or bytes",
        expected=sorted(SCALAR_KINDS),
        found=type(value).__name__,
    )


def decode_scalar(kind: str, value: JsonValue) -> Scalar:
    """Return the scalar that `encode_scalar` encoded as `kind` and `value`.

    Raises:
        ValueError: they are not an encoded scalar; the text says why.
    """
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "float":
        return _float(value)
    if kind == "complex" and isinstance(value, list) and len(value) == 2:
        return complex(_float(value[0]), _float(value[1]))
    if kind == "int" and isinstance(value, str):
        if len(value) > MAX_INT_DIGITS + 1 or not _INT.fullmatch(value):
            raise ValueError(f"{value[:40]!r} is not a decimal integer of {MAX_INT_DIGITS} digits")
        return int(value)
    if kind == "bytes" and isinstance(value, str):
        return decode_base64(value, repr(value[:40]))
    if kind == "str":
        if isinstance(value, str):
            return value
        if isinstance(value, dict) and value.keys() == {"utf8"}:
            raw = value["utf8"]
            if isinstance(raw, str):
                return decode_base64(raw, repr(raw[:40])).decode("utf-8", "surrogatepass")
    raise ValueError(f"{str(value)[:40]!r} is not a scalar of kind {kind!r}")


def decode_base64(text: str, name: str) -> bytes:
    """Return the bytes that a text holds; errors call it `name`.

    Raises:
        ValueError: it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"{name} is not base64") from None


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float(value: JsonValue) -> float:
    if not isinstance(value, str) or not _BITS.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} is not 16 lower-case hex digits")
    result: float = struct.unpack(">d", bytes.fromhex(value))[0]
    return result
