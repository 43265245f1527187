"""Ports on 127.0.0.1: one for a server to come, and one at which nobody listens."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator


def free_port() -> int:
    """Return a port on 127.0.0.1 on which nothing listens.

    It is below the ephemeral ports, one of which a connection of another test may take before this
    one is used.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port on 127.0.0.1 that refuses connections.

    It is bound for the block: the port of a server that has ended may be that of the next server,
    which belongs to a test in another process.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
