"""Command line of the code measurements: `python -m benchmarks.code COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.code import docstrings, layout
from benchmarks.code.sources import REPOSITORY

COMMANDS = {"docstrings": docstrings, "layout": layout}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 1 when a check fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.__doc__, description=module.__doc__)
        command.add_argument(
            "--package",
            type=Path,
            default=REPOSITORY,
            metavar="PATH",
            help="root of the checkout to measure, the folder above asyncckpt/; default: this one",
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    options.package = options.package.resolve()
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
