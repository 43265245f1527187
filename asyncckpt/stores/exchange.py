"""Mark of a shared attempt, and names of the files that its processes exchange.

Process 0 writes the mark once the attempt can be joined. The other processes read it through the
store before their first write, which detects a root that is not shared.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError

MARK = ".begun"
"""Name of the mark; exchanged files cannot have it."""

MARK_NBYTES = 4096
"""Maximum size of a mark that is read."""

# Hidden names are the mark and files being written.
_PASSED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def mark_of(save_id: str, host: str) -> bytes:
    """Return the content of an attempt's mark; the host is for human readers."""
    return f"{save_id} {host}\n".encode()


def is_mark_of(save_id: str, data: bytes | None) -> bool:
    """Return whether `data` is the mark of this attempt."""
    return data is not None and data.startswith(f"{save_id} ".encode())


def check_process(process: int) -> None:
    """Raise `UsageError` unless a process of this number can join an attempt."""
    if process < 1:
        raise UsageError(
            f"process={process}: pass a number above zero; process 0 begins the attempt",
            found=process,
        )


def check_passed(path: str, location: str, *, shared: bool) -> None:
    """Raise `UsageError` if the attempt is not shared or the name cannot be exchanged."""
    if not _PASSED.fullmatch(path):
        raise UsageError(
            f"{path!r} cannot be passed on: pass 1 to 64 of the characters A-Z a-z 0-9 . _ -, "
            "the first of them neither '.' nor '-'",
            location=location,
            found=path,
        )
    if not shared:
        raise UsageError(
            f"{location}: this attempt has one process; begin it with shared=True to pass files on",
            location=location,
        )


def too_large(path: str, location: str, nbytes: int, max_nbytes: int) -> CorruptCheckpointError:
    """Return the error for an exchanged file that is too large."""
    return CorruptCheckpointError(
        f"{location}: {nbytes} bytes were passed on as {path!r}, expected at most {max_nbytes}; "
        "the processes disagree about what they save: run one version of the library everywhere",
        file=path,
        location=location,
        expected=max_nbytes,
        found=nbytes,
    )


async def find_mark(
    look: Callable[[], Awaitable[bool]],
    *,
    location: str,
    save_id: str,
    timeout_s: float,
    pauses_s: tuple[float, float],
) -> None:
    """Poll `look` until it returns True; `pauses_s` are the first and the longest pause.

    Raises:
        CheckpointNotFoundError: the mark was not found within `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    pause_s, longest_s = pauses_s
    while not await look():
        left_s = end - time.monotonic()
        if left_s <= 0:
            host = socket.gethostname()
            raise CheckpointNotFoundError(
                f"{location}: no attempt with save id {save_id} was found here from host {host} "
                f"within {timeout_s:g} s; either process 0 has not begun it or has abandoned it, "
                "or the two see different storage: pass a root that all processes share",
                location=location,
                expected=save_id,
                found=host,
            )
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
