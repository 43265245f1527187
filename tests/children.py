"""Python programs run by a test in a process of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[1]

TIMEOUT_S = 120.0
"""A child that takes longer hangs."""


def start(code: str, *arguments: object, warnings: str = "error") -> subprocess.Popen[str]:
    """The program is running; its standard streams are pipes."""
    return subprocess.Popen(
        [sys.executable, "-W", warnings, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
    """Exit status (minus the signal), standard output and standard error."""
    # Not `communicate`: it loses what was read ahead when a line of the output was read before.
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(_rest, stream) for stream in (child.stdout, child.stderr)]
        try:
            child.wait(timeout_s)
            hangs = False
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            hangs = True
        out, err = (read.result() for read in reads)
    if hangs:
        raise AssertionError(f"the child hangs\n{out}\n{err}")
    return child.returncode, out, err


def _rest(stream: IO[str] | None) -> str:
    if stream is None:
        return ""
    with stream:
        return stream.read()


def output(code: str, *arguments: object, timeout_s: float = TIMEOUT_S) -> str:
    """What the program printed; it must end with status 0."""
    status, out, err = finish(start(code, *arguments), timeout_s)
    assert status == 0, f"exit status {status}\n{out}\n{err}"
    return out
