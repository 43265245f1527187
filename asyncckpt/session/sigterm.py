"""SIGTERM: the notice that the scheduler will end this process."""

# Rule 1: the handler sets one attribute and calls the previous handler. It may run between any two
#   bytecodes of the main thread: it takes no lock and logs nothing.
# Rule 2: while any handler of this process listens, the default action is suppressed, which would
#   end the process before it has saved.
# Rule 3: a closed handler that cannot be removed, because another handler was installed on top or
#   it was closed in another thread, behaves as if it were not installed.
# Rule 4: a forked child inherits the handler, but not the training: in the child, SIGTERM keeps its
#   previous effect. Data loaders end their worker processes with it.

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from asyncckpt.errors import UsageError

_listening: set[SigtermHandler] = set()
"""Open handlers of this process, which share the action of the signal."""


class SigtermHandler:
    """Notes SIGTERM, on top of the handler that was installed before.

    Attributes:
        noticed: the signal has arrived.

    Raises:
        UsageError: this is not the main thread, the only one that can install handlers.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "Checkpointer(preemption=True) in thread "
                f"{threading.current_thread().name!r}: Python handles signals in the main thread "
                "only; create the Checkpointer there and use it in any thread"
            )
        self.noticed = False
        self._pid = os.getpid()
        # None means a handler in C, which Python can neither call nor restore.
        self._previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        _listening.add(self)
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal and call the previous handler, but suppress the default action."""
        listens = any(handler._pid == os.getpid() for handler in tuple(_listening))
        if self in _listening:
            self.noticed = True
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL and not listens:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Stop listening, and restore the previous handler if possible. Idempotent."""
        _listening.discard(self)
        if threading.current_thread() is not threading.main_thread():
            return
        while True:
            top = signal.getsignal(signal.SIGTERM)
            if not isinstance(top, SigtermHandler) or top in _listening:
                return
            signal.signal(signal.SIGTERM, top._previous)
