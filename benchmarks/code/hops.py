"""Functions of the package that saving and restoring one leaf enters, and long functions."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.code.sources import PACKAGE, Sources, tracked

CASES = ("save", "second save", "restore")
"""One-shot save; second save of a `Checkpointer`, whose plan is cached; one-shot restore."""

LONG_LINES = 60
"""Longest function that fits a screen."""

MEMORY_URL = "memory://asyncckpt-hops"
CHILD = Path(__file__).with_name("entered.py")
CHILD_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the package; generated methods have line 0."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}"


def entered(root: Path, case: str, place: str) -> list[Function]:
    """Run the case in a new process and return the functions that it enters.

    Code that runs at import does not count; threads, lambdas, comprehensions and generated
    methods do.
    """
    command = [sys.executable, "-P", str(CHILD), str(root), case, place]
    child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
    if child.returncode:
        raise RuntimeError(f"{case} at {place} failed:\n{child.stderr}")
    return [Function(*function) for function in json.loads(child.stdout)]


def long_functions(sources: Sources) -> Iterator[tuple[int, Function]]:
    """Yield the functions above `LONG_LINES` with their lines, decorators left out."""
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nlines = (node.end_lineno or node.lineno) - node.lineno + 1
                if nlines > LONG_LINES:
                    yield nlines, Function(path, node.lineno, node.name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--object-store", action="store_true", help="also on fsspec's memory filesystem"
    )
    parser.add_argument("--list", action="store_true", help="print every function entered")
    parser.add_argument("--long", action="store_true", help="print every long function")


def run(options: argparse.Namespace) -> int:
    """Print functions and files of each case, and the number of long functions."""
    print(f"{'case':32}{'functions':>10}{'files':>7}")
    with tempfile.TemporaryDirectory(prefix="asyncckpt-hops-") as folder:
        stores = {"local disk": folder}
        if options.object_store:
            stores["object store"] = MEMORY_URL
        for store, top in stores.items():
            for case in CASES:
                found = entered(options.package, case, f"{top}/{case.replace(' ', '-')}")
                files = {function.path for function in found}
                print(f"{f'{case}, {store}':32}{len(found):>10}{len(files):>7}", flush=True)
                if options.list:
                    print(*(f"  {function}" for function in found), sep="\n")
    long = sorted(long_functions(tracked(options.package, PACKAGE)), reverse=True, key=_nlines)
    print(f"functions above {LONG_LINES} lines: {len(long)}")
    if options.long:
        print(*(f"  {nlines:4} {function}" for nlines, function in long), sep="\n")
    return 0


def _nlines(measured: tuple[int, Function]) -> int:
    return measured[0]
