"""The command line: look at checkpoints, verify, convert and compare them, remove steps.

`main` is the entry point of the command ``asyncckpt`` and of ``python -m asyncckpt``. Importing
this module needs nothing beyond the library; running it needs the extra `cli` (rich and typer).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

INSTALL_LINE = 'pip install "asyncckpt[cli]"'

_EXTRA = frozenset(("rich", "typer"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command has run; returns its exit status.

    0: done, whole where something was verified, and equal where something was compared. 1: an
    error of the library, damage, a difference, or a question answered with no. 2: the command line
    was wrong, the extra `cli` is missing, or something could not be compared.

    Args:
        arguments: words behind the command's name; None for those of the process.
    """
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
    return run(sys.argv[1:] if arguments is None else arguments)
