"""The garbage collector of the process, which belongs to the caller."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

# Whether the collector runs is state of the whole process, so this is, too.
_lock = threading.RLock()  # a signal handler may save inside of a block
_blocks = 0  # in all threads
_was_enabled = False  # before the first of them


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause the garbage collector for a block that makes many objects which are all kept.

    A full collection would free none of them, and holds the caller for 70 ms in a process that has
    imported torch. The block must be short and await nothing. Blocks of several threads may
    overlap, and a signal handler may run one at any point of another.
    """
    global _blocks, _was_enabled
    entered = False
    try:  # around the entry, too: a signal handler may raise at any point of it
        with _lock:
            if _blocks == 0:
                _was_enabled = gc.isenabled()
            _blocks, entered = _blocks + 1, True
            if _blocks == 1:
                gc.disable()
        yield
    finally:
        if entered:
            with _lock:
                if _blocks == 1 and _was_enabled:
                    gc.enable()
                _blocks = max(0, _blocks - 1)


def _end_in_child() -> None:
    """End the blocks of the parent's threads, which a forked child does not have."""
    global _lock, _blocks
    if _blocks and _was_enabled:
        gc.enable()
    _lock, _blocks = threading.RLock(), 0


os.register_at_fork(after_in_child=_end_in_child)
