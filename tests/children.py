"""Python programs run by a test in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

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
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        raise AssertionError(f"the child hangs\n{out}\n{err}") from None
    return child.returncode, out, err


def output(code: str, *arguments: object, timeout_s: float = TIMEOUT_S) -> str:
    """What the program printed; it must end with status 0."""
    status, out, err = finish(start(code, *arguments), timeout_s)
    assert status == 0, f"exit status {status}\n{out}\n{err}"
    return out
