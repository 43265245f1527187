"""Exceptions that signal handlers raise in the main thread, at moments that a test chooses."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from asyncckpt.flow.engine import wait_quietly


class Expired(Exception):
    """What the handler of an alarm raises."""


def waits(thread: threading.Thread) -> bool:
    """Whether the thread blocks until a future is done."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not wait_quietly.__code__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def raised_once(
    error: type[BaseException], when: Callable[[], object], then: Callable[[], object] = int
) -> Iterator[None]:
    """A signal handler raises the error in the main thread, once `when` has returned and it waits.

    `when`, and `then` after the signal, run in another thread.
    """

    def handler(*_: object) -> None:
        raise error

    def send() -> None:
        when()
        while not waits(threading.main_thread()):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)
        then()

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(60)
        signal.signal(signal.SIGUSR1, before)
