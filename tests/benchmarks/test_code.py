"""The code measurements count what they say they count."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.code import docstrings, hops, layout, lines
from benchmarks.code.__main__ import main
from benchmarks.code.sources import REPOSITORY, tracked

COUNTED = '''\
"""Module.

Two lines and a blank one between.
"""
# A comment.

LIMIT = 3  # with code
"""Why three."""
text = """a

b"""
'''

SYNTHETIC = '''\
import threading
from dataclasses import dataclass

@dataclass
class Plan:
    """A plan."""

    size: int

def work(plan):
    return sum(each for each in range(plan.size))

async def save(place, tree):
    thread = threading.Thread(target=lambda: work(Plan(2)))
    thread.start()
    thread.join()

async def restore(place):
    pass

class Checkpointer:
    def __init__(self, place):
        pass
    async def __aenter__(self):
        return self
    async def __aexit__(self, *error):
        pass
    async def save(self, step, tree):
        pass
'''


def checkout(root: Path, sources: dict[str, str]) -> Path:
    """Write the sources below the folder and have git track them."""
    for path, text in sources.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "."], check=True)
    return root


def test_every_line_is_of_one_kind() -> None:
    found = lines.count({"a.py": COUNTED})
    assert found == lines.LineCounts(files=1, code=4, docstring=5, comment=1, blank=1)
    assert found.total == len(COUNTED.splitlines())


def test_untracked_and_deleted_files_do_not_count(tmp_path: Path) -> None:
    checkout(tmp_path, {"asyncckpt/a.py": "", "asyncckpt/b/c.py": "", "other/d.py": ""})
    (tmp_path / "asyncckpt/new.py").write_text("")
    (tmp_path / "asyncckpt/a.py").unlink()
    assert list(tracked(tmp_path, "asyncckpt")) == ["asyncckpt/b/c.py"]


@pytest.mark.parametrize(("limit", "status"), [(1, 0), (0, 1)])
def test_lines_above_the_limit_fail_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, status: int
) -> None:
    checkout(tmp_path, {"asyncckpt/a.py": "x = 1\n"})
    monkeypatch.setattr(lines, "PACKAGE_LINES_MAX", limit)
    assert main(["lines", "--check", "--package", str(tmp_path)]) == status


@pytest.mark.parametrize(
    ("line", "imperative"),
    [
        ("Copy one chunk.", True),
        ("Check that it fits.", True),
        ("Copies one chunk.", False),
        ("The copy of one chunk.", False),
        ("Whether it fits.", False),
        ("Name of the file.", False),
        ("", False),
    ],
)
def test_docstring_begins_with_a_verb(line: str, imperative: bool) -> None:
    assert docstrings.is_imperative(line) is imperative


def test_properties_and_tests_need_no_verb() -> None:
    text = """
class A:
    @functools.cached_property
    def a(self): "Size."
    @property
    def b(self): "Size."
    def c(self): "Copy."
def test_d(): "Copies are equal."
def e(): pass
"""
    assert [one.first for one in docstrings.of_functions({"a.py": text})] == ["Copy."]


def test_docstring_offenders_fail_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = '"""How it works."""\ndef f():\n    """Returns it."""\ndef g():\n    """Copy."""\n'
    checkout(tmp_path, {"asyncckpt/a.py": module})
    command = ["docstrings", "--check", "--list", "asyncckpt/", "--package", str(tmp_path)]
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert "asyncckpt/a.py:3: Returns it." in printed
    assert "1 of 2 begin with a verb (50.0%)" in printed
    assert "asyncckpt/a.py:1: How it works." in printed
    assert docstrings.flagged_by_ruff(tmp_path, "asyncckpt") == {("asyncckpt/a.py", 3)}


def test_sample_depends_on_the_seed_alone() -> None:
    found = [docstrings.Docstring("a.py", line, "Copy.") for line in range(50)]
    first = docstrings.sample(found, 5, "abc")
    assert first == docstrings.sample(found[::-1], 5, "abc")
    assert first != docstrings.sample(found, 5, "abd")


def test_crowded_folder_is_found() -> None:
    package = {f"asyncckpt/a/f{number}.py": "" for number in range(layout.FILES_MAX)}
    package["asyncckpt/a/__init__.py"] = ""
    assert not list(layout.crowded(package))
    assert list(layout.crowded({**package, "asyncckpt/a/more.py": ""}))


@pytest.mark.parametrize(
    ("first", "second", "allowed"),
    [
        ("format/orbax", "convert/orbax", True),
        ("save/stage", "planning/stage", True),
        ("save/pipeline", "restore/pipeline", True),
        ("save/match", "restore/match", False),
        ("cli/diff", "convert/diff", True),
        ("stores/local/attempt", "stores/objects/attempt", True),
        ("stores/objects/gc", "session/gc", True),
        ("stores/objects/sweep", "session/sweep", False),
        ("options", "cli/options", True),
        ("options", "flow/options", False),
    ],
)
def test_name_repeats_only_by_a_rule(first: str, second: str, allowed: bool) -> None:
    found = list(layout.repeated({f"asyncckpt/{path}.py": "" for path in (first, second)}))
    assert (not found) is allowed


def test_folder_must_say_what_belongs_in_it() -> None:
    package = {
        "asyncckpt/__init__.py": '"""Checkpoints. No models."""',
        "asyncckpt/a/__init__.py": '"""Stages."""',
        "asyncckpt/b/c.py": "",
    }
    found = [one.partition(":")[0] for one in layout.undescribed(package)]
    assert found == ["asyncckpt/a/__init__.py", "asyncckpt/b/__init__.py"]


def test_circle_through_a_function_and_a_type_checking_block_is_found() -> None:
    sources = {
        "asyncckpt/a.py": "def f():\n    from asyncckpt.b import g\n",
        "asyncckpt/b.py": "if TYPE_CHECKING:\n    from asyncckpt import c\n",
        "asyncckpt/c.py": "import asyncckpt.a\n",
        "asyncckpt/__init__.py": "def f():\n    from asyncckpt import d\n",
        "asyncckpt/d.py": "from asyncckpt import f\n",
    }
    (found,) = layout.circles(sources)
    assert {part.rpartition(".")[2] for part in found.split(" -> ")} == {"a", "b", "c"}
    del sources["asyncckpt/c.py"]
    assert not list(layout.circles(sources))


def test_layout_violations_fail_the_check(tmp_path: Path) -> None:
    described = '"""Checkpoints. No models."""\n'
    checkout(tmp_path, {"asyncckpt/__init__.py": described, "asyncckpt/a.py": ""})
    assert main(["layout", "--check", "--package", str(tmp_path)]) == 0
    checkout(
        tmp_path, {"asyncckpt/a.py": "import asyncckpt.b", "asyncckpt/b.py": "import asyncckpt.a"}
    )
    assert main(["layout", "--check", "--package", str(tmp_path)]) == 1


def test_threads_lambdas_generators_and_generated_methods_are_entered(tmp_path: Path) -> None:
    checkout(tmp_path, {"asyncckpt/__init__.py": SYNTHETIC})
    found = hops.entered(tmp_path, "save", str(tmp_path / "out"))
    assert {function.name for function in found} == {
        "save",
        "save.<locals>.<lambda>",
        "Plan.__init__ (generated 1)",
        "work",
        "work.<locals>.<genexpr>",
    }


def test_second_save_of_one_leaf_enters_the_package(tmp_path: Path) -> None:
    found = hops.entered(REPOSITORY, "second save", str(tmp_path))
    assert "Checkpointer.save" in {function.name for function in found}
    assert all(function.path.startswith("asyncckpt/") for function in found)
    assert len(found) == len(set(found)) > 50


def test_long_functions_leave_decorators_out() -> None:
    body = "    pass\n" * (hops.LONG_LINES - 1)
    text = f"@one\n@two\ndef fits():\n{body}def long():\n    pass\n{body}"
    found = [(nlines, function.name) for nlines, function in hops.long_functions({"a.py": text})]
    assert found == [(hops.LONG_LINES + 1, "long")]
