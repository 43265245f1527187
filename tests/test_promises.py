"""Every entry of `promises.toml` has tests that exist and that run."""

from __future__ import annotations

import ast
import functools
import itertools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
PROMISES = Path(__file__).with_name("promises.toml")
KINDS = ("promises", "features", "bad_input", "traps")
EXCUSES = frozenset({"skip", "skipif", "xfail", "importorskip"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
SUITES = ("asyncckpt.testing", "tests.stores.objects.clients.laws")


@dataclass(frozen=True, slots=True)
class FoundTest:
    """A test function as its file states it."""

    excuses: frozenset[str]  # names like skip or xfail on it, around it, or called in it
    is_long: bool


def attribute_names(node: ast.AST) -> frozenset[str]:
    return frozenset(part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute))


def laws_of(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Return the bodies of the suites of laws that the file imports, by class."""
    bodies: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(SUITES):
            source = REPOSITORY / f"{(node.module or '').replace('.', '/')}.py"
            names = {alias.name for alias in node.names}
            for inner in ast.parse(source.read_text()).body if source.is_file() else []:
                if isinstance(inner, ast.ClassDef) and inner.name in names:
                    bodies[inner.name] = inner.body
    return bodies


def scan(source: str) -> dict[str, FoundTest]:
    """The tests of a file by their id after the file's name, without importing it."""
    found: dict[str, FoundTest] = {}
    tree = ast.parse(source)
    bodies = laws_of(tree)

    def marks_of(body: list[ast.stmt]) -> frozenset[str]:
        assigned = [node for node in body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        marks = [node for node in assigned if "pytestmark" in ast.unparse(node).split("=")[0]]
        return frozenset().union(*map(attribute_names, marks))

    def visit(body: list[ast.stmt], prefix: str, outer: frozenset[str]) -> None:
        inherited = outer | marks_of(body)
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("Test"):
                own = [bodies.get(base.id, []) for base in node.bases if isinstance(base, ast.Name)]
                bodies[node.name] = [*itertools.chain(*own), *node.body]
            elif isinstance(node, ast.ClassDef):
                marks = frozenset().union(*map(attribute_names, node.decorator_list))
                for base in [base.id for base in node.bases if isinstance(base, ast.Name)]:
                    visit(bodies.get(base, []), f"{prefix}{node.name}::", inherited | marks)
                visit(node.body, f"{prefix}{node.name}::", inherited | marks)
                bodies[node.name] = [*bodies.get(node.name, []), *node.body]
            elif isinstance(node, ast.If):  # for one platform
                visit(node.body, prefix, inherited)
            elif isinstance(node, Function) and node.name.startswith("test"):
                marks = frozenset().union(*map(attribute_names, node.decorator_list))
                called = frozenset().union(*map(attribute_names, node.body))
                names = inherited | marks
                found[prefix + node.name] = FoundTest((names | called) & EXCUSES, "long" in names)

    visit(tree.body, "", frozenset())
    return found


@functools.cache
def scan_file(file: str) -> dict[str, FoundTest]:
    path = REPOSITORY / file
    return scan(path.read_text()) if path.is_file() else {}


def problems_of(entry: dict[str, Any]) -> list[str]:
    """What is wrong with one table of `promises.toml`."""
    problems = []
    if set(entry) != {"text", "tests"} or not entry["text"]:
        return ["needs exactly text and tests, and the text is not empty"]
    if not entry["tests"]:
        return ["names no test"]
    found = []
    for test_id in entry["tests"]:
        file, _, name = test_id.partition("::")
        test = scan_file(file).get(name)
        if test is None:
            problems.append(f"{test_id} does not exist")
            continue
        found.append(test)
        if test.excuses:
            problems.append(f"{test_id} may not run: {', '.join(sorted(test.excuses))}")
    if found and all(test.is_long for test in found):
        problems.append("only make test-long runs its tests")
    return problems


def test_every_entry_names_tests_that_exist_and_run() -> None:
    tables = tomllib.loads(PROMISES.read_text())
    problems = {
        f"{kind}.{name}": problems_of(entry)
        for kind, group in tables.items()
        for name, entry in group.items()
    }
    assert {name: found for name, found in problems.items() if found} == {}


def test_every_promise_of_the_design_has_an_entry() -> None:
    promises = tomllib.loads(PROMISES.read_text())["promises"]
    assert list(promises) == [f"I{number}" for number in range(9)]


def test_the_file_has_no_other_kinds_of_entries() -> None:
    assert set(tomllib.loads(PROMISES.read_text())) <= set(KINDS)


SAMPLE = """
import pytest

async def test_plain(): ...

@pytest.mark.parametrize("x", [1])
@pytest.mark.xfail(strict=True)
def test_marked(x): ...

def test_called():
    pytest.skip("no")

@pytest.mark.long
def test_long(): ...

class TestGroup:
    pytestmark = [pytest.mark.skipif(True, reason="")]

    def test_inner(self): ...
"""


def test_tests_are_found_with_their_excuses() -> None:
    found = scan(SAMPLE)
    assert {name: sorted(test.excuses) for name, test in found.items()} == {
        "test_plain": [],
        "test_marked": ["xfail"],
        "test_called": ["skip"],
        "test_long": [],
        "TestGroup::test_inner": ["skipif"],
    }
    assert [name for name, test in found.items() if test.is_long] == ["test_long"]


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ([], "names no test"),
        (["tests/test_promises.py::test_gone"], "does not exist"),
        (["tests/test_gone.py::test_gone"], "does not exist"),
        (
            ["tests/crash/test_faults.py::test_the_ziglang_package_builds_the_library"],
            "only make test-long runs its tests",
        ),
    ],
)
def test_a_bad_entry_is_reported(tests: list[str], problem: str) -> None:
    (found,) = problems_of({"text": "a promise", "tests": tests})
    assert problem in found
