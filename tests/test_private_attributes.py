"""Private attributes of other libraries: which are used, why, and that they still exist."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import torch

# Underscores that are public, or no attributes.
PUBLIC = {
    "_replace": "of named tuples",
    "_x2": "the end of a dtype's name",
    "_extra_state": "the end of a key in the state dict of a module",
}

PACKAGE = Path(__file__).parent.parent / "asyncckpt"

PRIVATE: dict[tuple[str, str], str] = {
    # fsspec documents these coroutines as the API of its async filesystems; their sync twins run
    # on a loop of fsspec's own, in another thread.
    ("fsspec.asyn.AsyncFileSystem", "_pipe_file"): "write an object",
    ("fsspec.asyn.AsyncFileSystem", "_cat_file"): "read a range",
    ("fsspec.asyn.AsyncFileSystem", "_info"): "size and version of an object",
    ("fsspec.asyn.AsyncFileSystem", "_find"): "list all objects below a prefix",
    ("fsspec.asyn.AsyncFileSystem", "_ls"): "list one level",
    ("fsspec.asyn.AsyncFileSystem", "_rm_file"): "delete an object",
    ("fsspec.asyn.AsyncFileSystem", "_makedirs"): "filesystems with real directories",
    ("fsspec.spec.AbstractFileSystem", "_strip_protocol"): "from a URL to a path; each class knows",
    ("fsspec.spec.AbstractFileSystem", "_get_kwargs_from_urls"): "the host of a URL as an option",
    # Requests that no method of fsspec makes.
    ("s3fs.S3FileSystem", "_call_s3"): "conditional requests and multipart uploads",
    ("gcsfs.core.GCSFileSystem", "_call"): "conditional requests and resumable uploads",
    # Tells a model whose loading its user has changed: paths of its state dict may not be keys.
    ("torch.optim.Optimizer", "_optimizer_load_state_dict_pre_hooks"): "hooks that rename keys",
    ("torch.nn.Module", "_load_state_dict_pre_hooks"): "hooks that rename keys",
    ("torch.nn.Module", "_load_state_dict_post_hooks"): "hooks that drop keys",
    ("torch.nn.Module", "_load_from_state_dict"): "a method that classes override to rename keys",
    # 4 microseconds per leaf faster than the public way, which is taken where it is missing.
    ("jax.Array", "_single_device_array_to_np_array_did_copy"): "a view of an array on a CPU",
    # Set where XLA has put the devices in an order that no spec can say; no public way to see it.
    ("jax.sharding.NamedSharding", "_logical_device_ids"): "whether mesh and spec say it all",
    # The coordinator's keys live there, and no public function returns it.
    ("torch.distributed.distributed_c10d", "_get_default_store"): "the store to clone",
    ("threading", "_register_atexit"): "the only hook that runs before threads are joined",
    ("sys", "_getframe"): "the line of the user's code that a warning names",
}
"""Where the attribute is defined, its name, and what for."""


def own_names(tree: ast.Module) -> set[str]:
    """Return the names with an underscore that a module defines itself."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
    return found


def accesses(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every underscore attribute of an object that is not the module's own.

    Names as strings count too, wherever they are passed: `getattr` may be further down.
    """
    tree = ast.parse(path.read_text())
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
                continue  # a subclass of our own, or of a class whose name is in the table
        elif isinstance(node, ast.Call):
            strings = [
                (argument.lineno, argument.value)
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            yield from (
                (line, value) for line, value in strings if re.fullmatch(r"_[a-z]\w*", value)
            )
            continue
        else:
            continue
        if re.fullmatch(r"_[A-Za-z]\w*", name) and name not in own:
            yield node.lineno, name


def defined_in_package() -> set[str]:
    """Return every underscore name that some module of the package defines."""
    return set().union(*(own_names(ast.parse(p.read_text())) for p in PACKAGE.rglob("*.py")))


def test_private_attributes_of_others_are_those_of_the_table() -> None:
    allowed = {name for _, name in PRIVATE}
    ours = defined_in_package()
    clients = PACKAGE / "stores" / "objects" / "clients"
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, name in accesses(path):
            # Elsewhere a name that the package defines is taken for its own.
            if path.is_relative_to(clients) or name not in ours:
                found.setdefault(name, []).append(f"{path.relative_to(PACKAGE)}:{line}")
    unknown = {name: where for name, where in found.items() if name not in allowed | PUBLIC.keys()}
    assert not unknown, f"not in the table: {unknown}"
    assert allowed <= found.keys(), f"not used any more: {allowed - found.keys()}"


@pytest.mark.parametrize(("owner", "name"), PRIVATE)
def test_a_private_attribute_still_exists(owner: str, name: str) -> None:
    """A library that drops one breaks this test, and not a save."""
    found, rest = owner.split("."), []
    while True:
        try:
            target = importlib.import_module(".".join(found))
            break
        except ImportError:
            rest.insert(0, found.pop())
    for part in rest:
        target = getattr(target, part)
    if isinstance(target, type) and target.__module__.startswith("torch"):
        target = {"Module": torch.nn.Identity(), "Optimizer": sgd()}[target.__name__]
    elif target is jax.Array:
        target = jax.numpy.zeros(2)
    elif target is jax.sharding.NamedSharding:
        target = target(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec("x"))
    assert hasattr(target, name)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize(
    "line",
    ["filesystem._private", "getattr(filesystem, '_private')", "session.call('_private', 1)"],
)
def test_an_access_is_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"def f(filesystem, session):\n    return {line}\n")
    assert list(accesses(path)) == [(2, "_private")]
