"""Columns of the keys of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.format.ocdbt.wire import I64

MAX_KEY_NBYTES = 1 << 16
"""Longest key; the limit of the OCDBT format."""

_WORD = 8  # bytes compared at a time


@dataclass(frozen=True, slots=True, eq=False)
class KeyColumns:
    """Sorted keys and derived columns, which all saves with these keys share.

    Attributes:
        text: strictly increasing keys, one after the other.
        starts: start of each key in `text`.
        lengths: bytes of each key.
        shared: bytes that each key shares with the one before it; 0 for the first.
        suffixes: keys without their shared bytes, one after the other.
        suffix_ends: 0, then the end of each suffix in `suffixes`.
    """

    text: bytes
    starts: I64
    lengths: I64
    shared: I64
    suffixes: bytes
    suffix_ends: I64

    def __len__(self) -> int:
        return len(self.lengths)

    def key(self, number: int) -> bytes:
        """Return one key."""
        start = int(self.starts[number])
        return self.text[start : start + int(self.lengths[number])]


def prepare_keys(keys: Sequence[bytes]) -> KeyColumns:
    """Return the columns of strictly increasing keys; errors as `key_columns`."""
    return key_columns(b"".join(keys), np.fromiter(map(len, keys), np.int64, len(keys)))


def key_columns(text: bytes, lengths: I64) -> KeyColumns:
    """Return the columns of strictly increasing keys, given one after the other.

    Raises:
        ValueError: keys are out of order, equal, or longer than 64 KiB.
    """
    count = len(lengths)
    starts = np.cumsum(lengths) - lengths
    if count and int(lengths.max()) > MAX_KEY_NBYTES:
        start = int(starts[lengths.argmax()])
        longest = text[start : start + 64]
        raise ValueError(f"the key {longest!r}… is longer than {MAX_KEY_NBYTES} bytes")
    shared = np.zeros(count, np.int64)
    if count > 1:
        shared[1:] = _shared_with_previous(text, starts, lengths)
    suffix = lengths - shared
    # Every key is a run of shared bytes, then a suffix.
    in_suffix = np.repeat(np.tile([False, True], count), np.stack([shared, suffix], axis=1).ravel())
    suffixes = np.frombuffer(text, np.uint8)[in_suffix].tobytes()
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(suffix, out=ends[1:])
    return KeyColumns(text, starts, lengths, shared, suffixes, ends)


def _shared_with_previous(text: bytes, starts: I64, lengths: I64) -> I64:
    text += bytes(_WORD)
    # Overlapping view: the eight bytes from every position as a little-endian number.
    words = np.ndarray((len(text) - _WORD + 1,), "<u8", text, 0, (1,))
    first, second = starts[:-1], starts[1:]
    limit = np.minimum(lengths[:-1], lengths[1:])
    shared = limit.copy()
    rows = np.flatnonzero(limit > 0)
    done = 0
    while rows.size:
        difference = words[first[rows] + done] ^ words[second[rows] + done]
        differs = difference != 0
        hits = difference[differs]
        lowest = (hits & (~hits + np.uint64(1))).astype(np.float64)
        equal = (np.frexp(lowest)[1] - 1) // 8
        found = rows[differs]
        shared[found] = np.minimum(done + equal, limit[found])
        done += _WORD
        rows = rows[~differs]
        rows = rows[limit[rows] > done]
    letters = np.frombuffer(text, np.uint8)
    rises = (shared < lengths[1:]) & (
        (shared == lengths[:-1]) | (letters[first + shared] < letters[second + shared])
    )
    if not rises.all():
        row = int(np.argmin(rises))
        one, other = (text[starts[n] : starts[n] + lengths[n]] for n in (row, row + 1))
        raise ValueError(f"the key {other!r} does not sort after {one!r}")
    return shared
