"""The code measurements count what they say they count."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.code import docstrings, layout
from benchmarks.code.__main__ import main
from benchmarks.code.sources import tracked


def checkout(root: Path, sources: dict[str, str]) -> Path:
    """Write the sources below the folder and have git track them."""
    for path, text in sources.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    subprocess.run(["git", "-C", str(root), "add", "."], check=True)
    return root


def test_untracked_and_deleted_files_do_not_count(tmp_path: Path) -> None:
    checkout(tmp_path, {"asyncckpt/a.py": "", "asyncckpt/b/c.py": "", "other/d.py": ""})
    (tmp_path / "asyncckpt/new.py").write_text("")
    (tmp_path / "asyncckpt/a.py").unlink()
    assert list(tracked(tmp_path, "asyncckpt")) == ["asyncckpt/b/c.py"]


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
