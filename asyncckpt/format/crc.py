"""CRC-32C (Castagnoli) of bytes, and of concatenations from the CRCs of their parts.

The only module that imports the PyPI package `crc32c`, which is LGPL licensed and releases the GIL
for buffers of 32 KiB and more. The combination is the usual one over GF(2): appending `n` bytes
multiplies the checksum, read as a polynomial, by x^(8n) modulo the CRC polynomial.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import crc32c as _crc32c
import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Bit-reflected Castagnoli polynomial x^32 + x^28 + x^27 + … + 1 (RFC 3720, appendix B.4).
_POLYNOMIAL = 0x82F63B78
# The polynomials 1 and x^8 in the reflected representation, in which bit 31 is the power 0.
_ONE = 1 << 31
_ONE_BYTE = 1 << 23

# Lengths are split into base-256 digits; seven digits reach 2^56 bytes, more than any file holds.
_DIGITS = 7
# Each cached length holds 4 tables of 256 integers, about 40 KiB.
_CACHED_LENGTHS = 64


def crc32c(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32C of `data`, continued from `value`, the CRC of the bytes before it.

    `data` is any C-contiguous buffer; the GIL is released for 32 KiB and more.
    """
    return _crc32c.crc32c(data, value)


def _multiply(a: int, b: int) -> int:
    """Return the product of two reflected polynomials modulo the CRC polynomial."""
    product = 0
    for shift in range(31, -1, -1):
        product ^= b & -((a >> shift) & 1)
        b = (b >> 1) ^ (_POLYNOMIAL & -(b & 1))
    return product


@lru_cache(maxsize=1)
def _powers() -> tuple[tuple[int, ...], ...]:
    """Return x^(8 · d · 256^k) for every digit position k and digit d."""
    rows = []
    base = _ONE_BYTE
    for _ in range(_DIGITS):
        row = [_ONE]
        for _ in range(255):
            row.append(_multiply(row[-1], base))
        rows.append(tuple(row))
        base = _multiply(row[-1], base)
    return tuple(rows)


def _power(nbytes: int) -> int:
    """Return x^(8 · nbytes) modulo the CRC polynomial."""
    if not 0 <= nbytes < 1 << (8 * _DIGITS):
        raise ValueError(f"a length of {nbytes} bytes cannot be combined")
    result = _ONE
    for row in _powers():
        if nbytes & 255:
            result = _multiply(result, row[nbytes & 255])
        nbytes >>= 8
        if not nbytes:
            break
    return result


@lru_cache(maxsize=_CACHED_LENGTHS)
def _operator(nbytes: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return four tables, one per byte of a CRC; their entries XOR to the CRC times x^(8 · n)."""
    basis = [0] * 32
    column = _power(nbytes)
    for bit in range(31, -1, -1):
        basis[bit] = column
        column = (column >> 1) ^ (_POLYNOMIAL & -(column & 1))
    tables = np.zeros((4, 256), np.uint32)
    for byte in range(4):
        for bit in range(8):
            half = 1 << bit
            tables[byte, half : 2 * half] = tables[byte, :half] ^ np.uint32(basis[8 * byte + bit])
    first, second, third, fourth = tables.tolist()
    return first, second, third, fourth


def combine(crc_a: int, crc_b: int, nbytes_b: int) -> int:
    """Return the CRC of a‖b, from the CRCs of a and b and the length of b.

    The operator of a length is cached; a new length costs about 50 µs, a cached one 0.5 µs.
    """
    first, second, third, fourth = _operator(nbytes_b)
    return (
        first[crc_a & 255]
        ^ second[(crc_a >> 8) & 255]
        ^ third[(crc_a >> 16) & 255]
        ^ fourth[crc_a >> 24]
        ^ crc_b
    )
