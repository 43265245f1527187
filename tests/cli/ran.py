"""Runs of commands, and their output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

WITHOUT_RIGHTS = """
import ctypes, os, sys

if os.getuid() == 0:
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-m", "asyncckpt", *sys.argv[1:]])
"""


class Ran(NamedTuple):
    """Result of a command."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]
"""Runs the command line with these words; `answer` is typed by the user."""


def without_rights(*arguments: object) -> Ran:
    """Run a command in a process to which the modes of directories apply, even as root."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@contextmanager
def closed(directory: Path) -> Iterator[None]:
    """Let nobody enter a directory during the block."""
    directory.chmod(0)
    try:
        yield
    finally:
        directory.chmod(0o755)
