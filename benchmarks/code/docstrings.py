"""Share of function docstrings that begin with a verb in the imperative."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.code.sources import PACKAGE, Sources, tracked

SHARE_MIN = 0.95

QUESTION_WORDS = frozenset({"What", "Which", "Where", "Who", "How", "Whether", "Whose"})
"""First words that make a module docstring a riddle instead of a noun phrase."""

NOUN_FOLLOWERS = frozenset({"of", "per", "is", "are", "was", "were"})
"""Second words that show the first one to be a noun: "Name of the file", "Size per shard"."""

VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text(encoding="utf-8").split())


@dataclass(frozen=True, slots=True)
class Docstring:
    """First line of a docstring and its place."""

    path: str
    line: int
    first: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.first}"


def of_functions(sources: Sources) -> Iterator[Docstring]:
    """Yield the docstrings of functions and methods; properties and tests are left out."""
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("test_") and not _is_property(node):
                    yield from _docstring(path, node)


def of_modules(sources: Sources) -> Iterator[Docstring]:
    """Yield the docstrings of modules."""
    for path, text in sources.items():
        yield from _docstring(path, ast.parse(text))


def is_imperative(first_line: str) -> bool:
    """Tell whether the line begins with a verb of the list that is not used as a noun.

    Ruff's D401, which knows the wrong forms of many verbs, misses nouns that it does not know.
    """
    words = re.findall(r"[^\s.,:;()]+", first_line.lower())
    return bool(words) and words[0] in VERBS and not NOUN_FOLLOWERS.intersection(words[1:2])


def is_question(first_line: str) -> bool:
    """Tell whether the line begins with a question word."""
    return bool(QUESTION_WORDS.intersection(re.findall(r"\w+", first_line)[:1]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--check", action="store_true", help="exit with 1 if a rule is broken")
    parser.add_argument("--list", metavar="FOLDER", help="print the offenders below this folder")


def run(options: argparse.Namespace) -> int:
    """Print the share, the modules whose docstring is a question, and the offenders to list."""
    sources = tracked(options.package, PACKAGE)
    functions = list(of_functions(sources))
    offenders = [docstring for docstring in functions if not is_imperative(docstring.first)]
    questions = [docstring for docstring in of_modules(sources) if is_question(docstring.first)]
    folder = options.list.rstrip("/") if options.list is not None else ""
    listed = [*offenders, *questions] if options.list is not None else questions
    print(*(one for one in listed if Path(one.path).is_relative_to(folder)), sep="\n")
    imperative = len(functions) - len(offenders)
    share = imperative / max(len(functions), 1)
    print(f"functions: {imperative:,} of {len(functions):,} begin with a verb ({share:.1%})")
    print(f"modules: {len(questions)} begin with a question word")
    return 1 if options.check and (share < SHARE_MIN or questions) else 0


def _docstring(
    path: str, node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Docstring]:
    text = ast.get_docstring(node)
    if text is not None:
        yield Docstring(path, node.body[0].lineno, text.strip().partition("\n")[0])


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return not names.isdisjoint({"property", "cached_property"})
