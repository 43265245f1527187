"""Lines of Python by kind, and limits for them."""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass

from benchmarks.code.sources import PACKAGE, Sources, tracked

PACKAGE_LINES_MAX = 38_000
WITH_SIMULATOR_LINES_MAX = 41_500
SIMULATOR = "tests/simulator"

_LAYOUT_TOKENS = frozenset(
    {
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.COMMENT,
        tokenize.ENDMARKER,
    }
)


@dataclass(frozen=True, slots=True)
class LineCounts:
    """Lines of some files; each line is of one kind.

    Code with a comment behind it is code; blank lines within a docstring are docstring.
    """

    files: int = 0
    code: int = 0
    docstring: int = 0
    comment: int = 0
    blank: int = 0

    @property
    def total(self) -> int:
        """All lines."""
        return self.code + self.docstring + self.comment + self.blank


def count(sources: Sources) -> LineCounts:
    """Count the lines of all sources by kind."""
    kinds: Counter[str] = Counter()
    for text in sources.values():
        kinds.update(kinds_of(text))
    return LineCounts(len(sources), **kinds)


def kinds_of(text: str) -> list[str]:
    """Return the kind of each line."""
    kinds = ["blank"] * len(text.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first, last = token.start[0] - 1, token.end[0]
        if token.type not in _LAYOUT_TOKENS:
            kinds[first:last] = ["code"] * (last - first)
        elif token.type == tokenize.COMMENT and kinds[first] == "blank":
            kinds[first] = "comment"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                first, last = node.lineno - 1, node.end_lineno or node.lineno
                kinds[first:last] = ["docstring"] * (last - first)
    return kinds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--check", action="store_true", help="exit with 1 above the limits")


def run(options: argparse.Namespace) -> int:
    """Print the lines of the package, alone and with the simulator, and compare the limits."""
    package = count(tracked(options.package, PACKAGE))
    both = count(tracked(options.package, PACKAGE, SIMULATOR))
    rows = [(f"{PACKAGE}/", package, PACKAGE_LINES_MAX)]
    rows.append((f"{PACKAGE}/ + {SIMULATOR}/", both, WITH_SIMULATOR_LINES_MAX))
    heads = ("files", "total", "code", "docstring", "comment", "blank")
    print(f"{'':30}" + "".join(f"{head:>11}" for head in heads) + "   comments")
    for name, found, _ in rows:
        share = found.comment / max(found.total, 1)
        figures = "".join(f"{getattr(found, head):>11,}" for head in heads)
        print(f"{name:30}{figures}{share:>10.1%}")
    over = [(name, found.total, most) for name, found, most in rows if found.total > most]
    for name, total, most in over:
        print(f"{name}: {total:,} lines, {total - most:,} above the limit of {most:,}")
    return 1 if options.check and over else 0
