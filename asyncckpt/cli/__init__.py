"""The command line: inspect, verify, convert and compare checkpoints, remove steps.

`main` is the entry point of ``asyncckpt`` and ``python -m asyncckpt``. Running it needs the extra
`cli` (rich and typer); importing this module does not.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from asyncckpt.reports.progress import INSTALL_LINE

_EXTRA = frozenset(("rich", "typer"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: success; verified checkpoints are intact, compared ones equal. 1: an error of the library,
    damage, a difference, a declined question, or output that could not be written. 2: a usage
    error, the extra `cli` is missing, checkpoints that could not be compared, or a checkpoint to
    verify whose format this release does not read.

    Args:
        arguments: words after the command's name; None for `sys.argv`.
    """
    if sys.stderr is None:  # closed when the process started; print would take standard output
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            return main(arguments)
    try:
        from asyncckpt.cli.commands import run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        print(
            f"asyncckpt: the command line needs the package {package}: {INSTALL_LINE}",
            file=sys.stderr,
        )
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack × or …
            stream.reconfigure(errors="replace")
    try:
        status = run(sys.argv[1:] if arguments is None else arguments)
        if sys.stdout is not None:  # None if it was closed when the process started
            sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"asyncckpt: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        # Flushing the rest of the output must not fail again when the interpreter exits.
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    return status
