"""What one input may take: a second of CPU time, and memory in proportion to its size."""

# Time is CPU time: how busy the machine is makes no difference.

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

CPU_S = 1.0
"""CPU seconds that one input may take."""

FREE_NBYTES = 64 << 20
"""Memory that an input may take, beyond four times its own size."""

_RENEWED = 512
"""Inputs between two looks at how large the process is."""


class TooLongError(BaseException):
    """An input took more than `CPU_S`. No `Exception`, so that no decoder handles it."""


class Guard:
    """Calls a decoder within the limits.

    Attributes:
        slowest_s: CPU seconds of the input that took longest.
    """

    def __init__(self) -> None:
        self.slowest_s = 0.0
        self._calls = 0
        self._base_nbytes = 0
        self._hard = resource.getrlimit(resource.RLIMIT_AS)[1]

    def call(self, decode: Callable[[bytes], object], data: bytes) -> None:
        """The input was decoded.

        Raises:
            TooLongError: it took more than `CPU_S`.
            MemoryError: it took more than four times its size and `FREE_NBYTES`.
            BaseException: whatever the decoder raises.
        """
        if self._calls % _RENEWED == 0:
            self._base_nbytes = _process_nbytes()
        self._calls += 1
        limit = self._base_nbytes + FREE_NBYTES + 4 * len(data)
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._hard))
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            decode(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.slowest_s = max(self.slowest_s, time.process_time() - begun)
            resource.setrlimit(resource.RLIMIT_AS, (self._hard, self._hard))


def _process_nbytes() -> int:
    """Size of the address space; where it is not told, so much that nothing is limited."""
    if sys.platform != "linux":
        return 1 << 46
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def guarded() -> Iterator[Guard]:
    """A `Guard` for the main thread of a process that does nothing else."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TooLongError(f"an input took more than {CPU_S} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    try:
        yield Guard()
    finally:
        signal.signal(signal.SIGPROF, before)
