"""Tables for people: wrapped to the width of a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncckpt.cli.documents import compact, created
from asyncckpt.reports import CheckpointInfo, LeafInfo, VerifyReport, nbytes_text

PIPE_WIDTH = 1 << 16
"""Columns in a pipe or file: nothing is wrapped or cut there."""

SHORT = 48
"""Characters of metadata and values shown in a table; `--json` has them whole."""


def console(file: TextIO | None = None) -> Console:
    """Prints text as it is: no markup, no highlighting, colours only on a terminal."""
    file = sys.stdout if file is None else file
    return Console(
        file=file,
        markup=False,
        highlight=False,
        emoji=False,
        width=None if file.isatty() else PIPE_WIDTH,
    )


def printable(text: str) -> str:
    """The text without characters that steer a terminal: names in a checkpoint may be anyone's."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode-escape").decode() for c in text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; columns whose title starts with ``>`` are flush right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns:
        right = title.startswith(">")
        made.add_column(
            Text(title.lstrip(">")),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def listing(infos: Sequence[CheckpointInfo]) -> Table:
    """The steps of a run."""
    columns = [">step", "time", ">leaves", ">size", ">files", "metrics", "metadata"]
    return table(
        columns,
        (
            [
                str(info.step),
                time_text(info),
                str(len(info.leaves)),
                nbytes_text(info.stored_nbytes),
                str(len(info.files)),
                short(" ".join(f"{name}={value:.6g}" for name, value in info.metrics.items())),
                short(compact(info.metadata)),
            ]
            for info in infos
        ),
    )


def heading(info: CheckpointInfo) -> Table:
    """Where a checkpoint is and what it is."""
    rows = [
        ("checkpoint", info.location),
        ("step", "" if info.step is None else str(info.step)),
        ("saved", f"{time_text(info)} by {info.library}, save {info.save_id}"),
        ("leaves", f"{len(info.leaves)} with {nbytes_text(info.nbytes)} in arrays"),
        ("files", f"{len(info.files)} with {nbytes_text(info.stored_nbytes)}"),
        ("metrics", " ".join(f"{name}={value!r}" for name, value in info.metrics.items())),
        ("metadata", compact(info.metadata)),
    ]
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for title, text in rows:
        if text:
            made.add_row(title, Text(printable(text)))
    return made


def leaves(info: CheckpointInfo) -> Table:
    """The tree of a checkpoint, one line per container and leaf."""
    columns = ["leaf", "type", "shape", ">size", ">chunks", "chunk shape", "notes"]
    return table(columns, _branch(info.tree, "", 0))


def files(info: CheckpointInfo) -> Table:
    """The files of a checkpoint beside its record."""
    rows = ([f.path, nbytes_text(f.nbytes), f"{f.crc32c:08x}"] for f in info.files)
    return table(["file", ">size", "crc32c"], rows)


def damages(reports: Sequence[VerifyReport]) -> Table:
    """Every damaged place of some checkpoints."""
    return table(
        ["damaged leaf", "file", ">byte", "reason"],
        (
            [
                damage.leaf or "(metadata)",
                f"{report.location}/{damage.file}",
                "" if damage.offset is None else str(damage.offset),
                damage.reason,
            ]
            for report in reports
            for damage in report.damages
        ),
    )


def time_text(info: CheckpointInfo) -> str:
    """Local time to the second."""
    return created(info).strftime("%Y-%m-%d %H:%M:%S")


def short(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def _branch(node: Any, label: str, depth: int) -> Iterator[Sequence[str]]:
    if isinstance(node, LeafInfo):
        yield _leaf_row(node, label, depth)
        return
    indent = "  " * max(0, depth - 1)
    if node is None or not node:
        # repr: None, {}, [] or ().
        yield [f"{indent}{label}", repr(node), *[""] * 5]
        return
    if depth:
        yield [f"{indent}{label}/", type(node).__name__, *[""] * 5]
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in items:
        leaf = _first_leaf(child)
        # As paths spell it, which is what include= takes; an empty container has no path.
        part = str(key) if leaf is None else leaf.path.split("/")[depth]
        yield from _branch(child, part, depth + 1)


def _leaf_row(leaf: LeafInfo, label: str, depth: int) -> Sequence[str]:
    name = "  " * max(0, depth - 1) + (label or "(the tree itself)")
    if leaf.kind != "array":
        return [name, leaf.kind, "", "", "", "", short(_value_text(leaf.value))]
    notes = []
    if leaf.tied_to is not None:
        notes.append(f"tied to {leaf.tied_to}")
    if leaf.compression is not None:
        notes.append(f"{leaf.compression}, {nbytes_text(leaf.stored_nbytes)} stored")
    return [
        name,
        leaf.dtype,
        _shape(leaf.shape),
        nbytes_text(leaf.nbytes),
        str(leaf.chunk_count),
        _shape(leaf.chunk_shape),
        ", ".join(notes),
    ]


def _first_leaf(node: Any) -> LeafInfo | None:
    if isinstance(node, LeafInfo):
        return node
    children = node.values() if isinstance(node, dict) else node or ()
    found = (_first_leaf(child) for child in children)
    return next((leaf for leaf in found if leaf is not None), None)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "()"


def _value_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
