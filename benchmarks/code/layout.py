"""Layout rules of the package that import-linter does not check."""

from __future__ import annotations

import argparse
import ast
import graphlib
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from benchmarks.code.sources import PACKAGE, Sources, tracked

FILES_MAX = 15
"""Python files in one folder, apart from `__init__.py`: about what a reader takes in at once."""

FORMATS = frozenset({"dcp", "ocdbt", "orbax", "safetensors", "zarr", "zarr2", "zarr3"})
RUNTIMES = frozenset({"jax", "numpy", "torch"})
EVERYWHERE = ("",)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Two folders that may hold files of the same name.

    Attributes:
        reason: why the name tells both files apart well enough.
        one: folders, below the package, that may hold one of the files, also deeper.
        other: folders that may hold the other one.
        names: names that may repeat; None: all.
    """

    reason: str
    one: tuple[str, ...] = EVERYWHERE
    other: tuple[str, ...] = EVERYWHERE
    names: frozenset[str] | None = None

    def allows(self, name: str, first: str, second: str) -> bool:
        """Tell whether both folders may hold a file of this name."""
        if self.names is not None and name not in self.names:
            return False
        return any(
            _below(one, self.one) and _below(other, self.other)
            for one, other in ((first, second), (second, first))
        )


REPEATS = (
    Repeat("a checkpoint format, in every folder that treats formats apart", names=FORMATS),
    Repeat("an array runtime, in every folder that treats runtimes apart", names=RUNTIMES),
    Repeat("a stage and its pure plan", ("save", "restore"), ("planning",)),
    Repeat("what wires the stages", ("save",), ("restore",), frozenset({"pipeline"})),
    Repeat("a command and what it calls", ("cli",)),
    Repeat("one role behind the store port", ("stores/local",), ("stores/objects",)),
    Repeat("gc of a session and of a store", ("session",), ("stores",), frozenset({"gc"})),
    Repeat("staging and destination buffers", ("flow",), ("restore",), frozenset({"buffers"})),
)


def violations(sources: Sources) -> list[str]:
    """Return every violation of the layout rules, one line each."""
    package = {path: text for path, text in sources.items() if path.startswith(f"{PACKAGE}/")}
    return [*crowded(package), *repeated(package), *undescribed(package), *circles(sources)]


def crowded(package: Sources) -> Iterator[str]:
    """Yield the folders with more than `FILES_MAX` Python files."""
    folders: dict[str, int] = defaultdict(int)
    for path in map(PurePosixPath, package):
        folders[str(path.parent)] += path.name != "__init__.py"
    for folder, count in sorted(folders.items()):
        if count > FILES_MAX:
            yield f"{folder}/: {count} Python files, at most {FILES_MAX} belong in one folder"


def repeated(package: Sources) -> Iterator[str]:
    """Yield the pairs of files whose common name no row of `REPEATS` allows."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in map(PurePosixPath, sorted(package)):
        if not path.stem.startswith("__"):
            folders[path.stem].append(str(path.parent.relative_to(PACKAGE)))
    for name, places in sorted(folders.items()):
        for first, second in itertools.combinations(places, 2):
            if not any(rule.allows(name, first, second) for rule in REPEATS):
                paths = (str(PurePosixPath(PACKAGE, place, name)) for place in (first, second))
                yield f"{'.py, '.join(paths)}.py: no rule allows the same name twice"


def undescribed(package: Sources) -> Iterator[str]:
    """Yield the folders whose `__init__.py` is missing or does not say what belongs there."""
    folders = {str(PurePosixPath(path).parent) for path in package}
    for folder in sorted(folders):
        text = ast.get_docstring(ast.parse(package.get(f"{folder}/__init__.py", ""))) or ""
        sentences = len(re.findall(r"[.!?](?:\s|$)", text))
        lines = sum(1 for line in text.splitlines() if line.strip())
        if max(sentences, lines) < 2:
            yield (
                f"{folder}/__init__.py: the docstring needs two sentences or lines: what belongs "
                "in the folder and what does not"
            )


def circles(sources: Sources) -> Iterator[str]:
    """Yield circles of imports among the files until none is left; no two share a file."""
    graph = imports(sources)
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            circle = error.args[1][::-1]
            yield f"circle of imports: {' -> '.join(circle)}"
            graph = {name: to - {*circle} for name, to in graph.items() if name not in circle}
        else:
            return


def imports(sources: Sources) -> dict[str, set[str]]:
    """Map each module to the modules among the sources that it imports.

    Imports for type checkers and inside functions count, except in `__init__.py`.
    """
    modules = {_module(path): path for path in sources}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        to: set[str] = set()
        for node in _import_nodes(ast.parse(sources[path]), lazy=not path.endswith("__init__.py")):
            if isinstance(node, ast.Import):
                to.update(alias.name for alias in node.names if alias.name in modules)
            elif not node.level and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    to.add(full if full in modules else node.module)
        graph[module] = {name for name in to if name in modules and name != module}
    return graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--check", action="store_true", help="exit with 1 if a rule is broken")


def run(options: argparse.Namespace) -> int:
    """Print every violation and their number."""
    found = violations(tracked(options.package, PACKAGE, "benchmarks"))
    print(*found, f"{len(found)} violations", sep="\n")
    return 1 if options.check and found else 0


def _below(folder: str, tops: tuple[str, ...]) -> bool:
    return any(not top or PurePosixPath(folder).is_relative_to(top) for top in tops)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _import_nodes(node: ast.AST, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    if not lazy:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
    for child in ast.iter_child_nodes(node):
        yield from _import_nodes(child, lazy=lazy)
