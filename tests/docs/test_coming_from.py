"""The tables of docs/coming-from.md name calls and arguments that exist, theirs and ours."""

from __future__ import annotations

import ast
import dataclasses
import html
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.torch
import tensorstore
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
import torch.distributed.checkpoint.state_dict
from orbax.checkpoint.experimental import v1 as ocp_v1

import asyncckpt
from asyncckpt import blocking
from tests.checkpoint.foreign import orbax_writers

TEXT = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
TABLES = re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE)
OPTIONS_OF_ORBAX = "| `ocp.CheckpointManagerOptions` | asyncckpt |"

NAMES: dict[str, Any] = {
    "ocp": ocp,
    "ocp_v1": ocp_v1,
    "manager": ocp.CheckpointManager,
    "torch": torch,
    "dcp": dcp,
    "safetensors": safetensors,
    "model": torch.nn.Module,
    "asyncckpt": asyncckpt,
    "blocking": blocking,
    "ckpt": blocking.Checkpointer,
    "pending": blocking.PendingSave,
    "tensorstore": tensorstore,
}
"""What the names that begin a call stand for; methods are looked up on classes."""


def codes(cell: str) -> list[str]:
    found = re.findall(r"`([^`]+)`|<code>(.+?)</code>", cell)
    return [html.unescape(code or other).strip("| ") for code, other in found]


def snippets() -> list[str]:
    """The code of every cell; arguments alone are completed to the call that takes them."""
    found = []
    for table in TABLES:
        header, _, *rows = table.splitlines()
        for row in rows:
            left, right = row.strip("| ").split(" | ", 1)
            if header == OPTIONS_OF_ORBAX:
                found += [f"ocp.CheckpointManagerOptions({code})" for code in codes(left)]
            else:
                found += codes(left)
            for code in codes(right):
                if match := re.match(r"(\w+)=", code):
                    call = "blocking.Checkpointer(root, {})"
                    call = call if match[1] == "keep" else "ckpt.save(step, tree, {})"
                    code = call.format(code if code != match[0] else f"{code}None")
                found.append(code)
    return found


def resolve(node: ast.AST) -> Any:
    """What an expression of names and calls is: for a call, what it returns, if that is known."""
    if isinstance(node, ast.Name):
        return NAMES.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None else getattr(owner, node.attr)
    if isinstance(node, ast.Subscript):
        return None
    assert isinstance(node, ast.Call), ast.dump(node)
    function = resolve(node.func)
    if function is None:
        return None
    names = {keyword.arg: None for keyword in node.keywords}
    values = [None] * len(node.args)
    if isinstance(node.func, ast.Attribute) and inspect.isclass(resolve(node.func.value)):
        values.append(None)  # self
    try:
        signature = inspect.signature(function)
    except ValueError:  # safetensors.safe_open is not written in Python
        return function
    signature.bind_partial(*values, **names)
    if inspect.isclass(function):
        return function
    if inspect.isfunction(function) and function.__module__.startswith("asyncckpt."):
        return typing.get_type_hints(function)["return"]
    return None


@pytest.mark.parametrize("snippet", dict.fromkeys(snippets()))
def test_every_call_of_the_page_exists_with_its_arguments(snippet: str) -> None:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = compile(snippet, "coming-from.md", "eval", flags)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Call, ast.Attribute)):
            resolve(node)


@pytest.mark.parametrize("options", [{}, orbax_writers.PADDED, orbax_writers.PREFIXED])
@pytest.mark.filterwarnings("ignore:.*no checksum")
def test_the_run_of_orbax_on_the_page_continues_whatever_its_steps_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    section = TEXT.partition("### Continuing a run of Orbax")[2]
    (code,) = re.findall(
        r"^with blocking\.Checkpointer.*?^```$", section, re.DOTALL | re.MULTILINE
    )[:1]
    code = code.removesuffix("```").replace("[21]", "[13]")
    saved = {"w": np.arange(3.0)}
    orbax_writers.manager(tmp_path / "old_run", saved, **options)
    monkeypatch.chdir(tmp_path)
    names = {"blocking": blocking, "Path": Path, "KeepLast": asyncckpt.KeepLast}
    names["params"] = {"w": np.zeros(3)}
    exec(code, names)
    assert np.array_equal(names["state"]["w"], saved["w"])


def test_every_option_of_orbax_is_on_the_page() -> None:
    (table,) = [table for table in TABLES if table.startswith(OPTIONS_OF_ORBAX)]
    listed = set(re.findall(r"\b[a-z_]+\b", table))
    missing = {field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)} - listed
    assert missing == set()


def test_the_calls_that_people_come_with_are_on_the_page() -> None:
    for name in (
        *("CheckpointManager", "PyTreeCheckpointer", "StandardCheckpointer", "AsyncCheckpointer"),
        *("ocp_v1.save", "ocp_v1.load", "torch.save", "torch.load"),
        *("dcp.save", "dcp.load", "dcp.async_save", "save_file", "load_file", "safe_open"),
    ):
        assert name in TEXT
    public = {name for name in vars(ocp.CheckpointManager) if not name.startswith("_")}
    named = set(re.findall(r"`manager\.(\w+)", TEXT)) | set(re.findall(r"manager\.(\w+)", TEXT))
    assert public - named - {"directory"} == set()
