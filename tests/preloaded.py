"""Processes whose imports were made once: they are forked from a server, and then run as usual.

    server = Preloaded(["torch"], {"PYTHONHASHSEED": "1"})
    process = server.start("tests.processes.worker", "7", stderr=file, pass_fds=[7])
    process.wait(60)

Importing torch or JAX takes seconds, and tests start hundreds of processes that need them. What a
server imports may start no thread and no runtime. A forked process has the server's hash seed and
`-W` options, and otherwise its own arguments, environment, streams, end and exit status.
"""

# The server is `python -m tests.preloaded FD MODULE...`. A request is one packet with the process
# to be, and its descriptors; the answer is its pid. Its exit status goes into a pipe of its own.

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[1]

PACKET_NBYTES = 1 << 18
"""Above any request: arguments and environment."""

MOST_DESCRIPTORS = 16
"""Of one request."""

LOST = -int(signal.SIGKILL)
"""Exit status of a process whose server has ended."""


class Forked:
    """A forked process, with the part of `subprocess.Popen` that tests use.

    Attributes:
        pid: its process id.
        returncode: exit status (minus the signal), or None before `poll` or `wait` have seen it.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, status)

    def poll(self) -> int | None:
        """Return the exit status, or None of a process that runs."""
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int(os.read(self._status, 16) or LOST)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once there is one.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            # Another thread may take the status meanwhile; then there is nothing more to wait for.
            select.select([self._status], [], [], 0.5 if left is None else min(left, 0.5))
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.poll() is None:
            # Its server may have seen the end already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """A server that has imported modules.

    Args:
        modules: their names.
        environment: variables of the server and its processes, beside those of this process.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._environment = dict(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno()), *modules],
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def start(
        self,
        program: str,
        *arguments: str,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Forked:
        """Start a module by its name, or a script by its path.

        `pass_fds` have the same numbers in the process, whose standard input is empty.
        """
        read, write = os.pipe()
        streams = [2 if stream is None else stream.fileno() for stream in (stdout, stderr)]
        request = {
            "program": program,
            "arguments": arguments,
            "environment": {**os.environ, **self._environment},
            "pass_fds": list(pass_fds),
        }
        try:
            with self._lock:
                packet = json.dumps(request).encode()
                socket.send_fds(self._socket, [packet], [write, *streams, *pass_fds])
                answer = self._socket.recv(16)
        finally:
            os.close(write)
        if not answer:
            os.close(read)
            raise ChildProcessError("the server of preloaded processes has ended")
        return Forked(int(answer), read)

    def close(self) -> None:
        """End the server; processes that it has started go on."""
        self._socket.close()
        self._process.wait()


@functools.cache
def preloaded(modules: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> Preloaded:
    """Return the server of these, which is started once and ends with this process."""
    server = Preloaded(modules, dict(environment))
    atexit.register(server.close)
    return server


# ------------------------------------------------------------------------------------ the server


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork as requested. Returns the request in the forked process, else None at the end."""
    running: dict[int, tuple[int, int]] = {}  # pidfd -> pid, where its status goes
    requests = connection.fileno()
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for pidfd in running.keys() & set(ready):
            pid, status = running.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status, str(code).encode())
            os.close(status)
            os.close(pidfd)
        if requests not in ready:
            continue
        packet, descriptors, _, _ = socket.recv_fds(connection, PACKET_NBYTES, MOST_DESCRIPTORS)
        if not packet:
            return None
        status, *given = descriptors
        pid = os.fork()
        if pid == 0:
            for pidfd, (_, other) in running.items():
                os.close(pidfd)
                os.close(other)
            os.close(status)
            return json.loads(packet), given
        for descriptor in given:
            os.close(descriptor)
        running[os.pidfd_open(pid)] = pid, status
        connection.send(str(pid).encode())


def become(request: dict[str, Any], given: list[int]) -> None:
    """Be the requested process: streams, descriptors, environment, arguments; then run it."""
    wanted = [1, 2, *request["pass_fds"]]
    # Above all wanted numbers first, so that none is overwritten before it was used.
    high = [os.dup2(one, max(*wanted, *given) + 1 + n) for n, one in enumerate(given)]
    for descriptor in given:
        os.close(descriptor)
    for descriptor, number in zip(high, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    program = request["program"]
    sys.argv = [program, *request["arguments"]]
    if program.endswith(".py"):
        sys.path[0] = os.path.dirname(program)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def main() -> None:
    """Import, then fork until the connection ends."""
    descriptor, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    # Forking is what this process is for, and it has no thread that would be missed.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*os\.fork\(\)|.*use of fork\(\)")
        # Without this, every fork copies the pages that hold the reference counts of the collector.
        gc.collect()
        gc.freeze()
        with socket.socket(fileno=int(descriptor)) as connection:
            connection.set_inheritable(False)
            found = serve(connection)
    if found is not None:
        become(*found)


if __name__ == "__main__":
    main()
