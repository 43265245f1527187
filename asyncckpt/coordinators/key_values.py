"""Keys and values of a coordinator: their limits, and how often they are polled."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncckpt.errors import UsageError
from asyncckpt.ports import MAX_MESSAGE_NBYTES

PREFIX = "asyncckpt"
"""First part of every key of this library, which shares the services with other programs."""

FIRST_PAUSE_S = 0.001
"""First pause between two polls: most answers arrive within a few milliseconds."""

LAST_PAUSE_S = 0.02
"""Longest pause with few processes: waiting costs about 1 % of a core."""

GROWTH = 1.25
"""By how much a pause is longer than the one before, with few processes: a message then waits for a
quarter of the time that it took to arrive, or less, and not for as long again."""

PAUSE_PER_PROCESS_S = 50e-6
"""Longest pause with many processes, per process: a server answers about 20,000 polls a second, and
10,000 waiting processes must leave it time for other calls."""

_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")


def check_key(key: str) -> None:
    """Check that this is a key or a prefix of keys, as defined by `ports.Coordinator`."""
    if not _KEY.fullmatch(key):
        raise UsageError(
            f"coordinator key {key!r}: pass parts of letters, digits, '.', '_' and '-', joined by "
            "'/'",
            found=key,
        )


def check_message(key: str, value: bytes) -> None:
    """Check a key and its new value."""
    check_key(key)
    if not 0 < len(value) <= MAX_MESSAGE_NBYTES:
        raise UsageError(
            f"coordinator key {key}: the value has {len(value)} bytes; messages have 1 to "
            f"{MAX_MESSAGE_NBYTES}; write larger ones to the store",
            expected=f"1 to {MAX_MESSAGE_NBYTES} bytes",
            found=len(value),
        )


def longest_pause_s(process_count: int) -> float:
    """Return the longest pause between two polls of a key."""
    return max(LAST_PAUSE_S, PAUSE_PER_PROCESS_S * process_count)


def pauses(process_count: int) -> Iterator[float]:
    """Yield the pauses between polls of a key, in seconds; they grow up to a limit."""
    longest_s = longest_pause_s(process_count)
    growth = GROWTH if longest_s <= LAST_PAUSE_S else 2.0
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(growth * pause_s, longest_s)
