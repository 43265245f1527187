"""Tables for people: wrapped to the width of a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncckpt.cli.documents import compact, crc_text, created
from asyncckpt.reports import (
    CheckpointInfo,
    DiffReport,
    LeafDifference,
    LeafInfo,
    VerifyReport,
    nbytes_text,
)

STYLED_ROWS = 2000
"""Rows that are laid out for the terminal; rich takes a third of a millisecond for each."""

SHORT = 48
"""Characters of metadata and values shown in a table; `--json` has them whole."""


def console(file: TextIO | None = None) -> Console:
    """Prints text as it is: no markup, no highlighting, colours only on a terminal."""
    return Console(file=file or sys.stdout, markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    """The text without characters that steer a terminal: names in a checkpoint may be anyone's."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode-escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is printed; columns whose title starts with ``>`` are flush right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(grids: Iterable[Grid]) -> None:
    """The tables stand on standard output, an empty line between two of them."""
    printer = console()
    for number, grid in enumerate(grids):
        if number:
            printer.print()
        if printer.is_terminal and len(grid.rows) <= STYLED_ROWS:
            printer.print(_styled(grid))
        else:
            for line in _plain(grid):
                print(line)


def _styled(grid: Grid) -> Table:
    titles = any(grid.columns)
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=titles)
    for title in grid.columns:
        right = title.startswith(">")
        made.add_column(
            Text(title.lstrip(">")),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in grid.rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def _plain(grid: Grid) -> Iterator[str]:
    rows = [[printable(cell) for cell in row] for row in grid.rows]
    if any(grid.columns):
        rows.insert(0, [title.lstrip(">") for title in grid.columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [title.startswith(">") for title in grid.columns]
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        text = "  ".join(cell.rjust(n) if flush else cell.ljust(n) for cell, n, flush in cells)
        yield text.rstrip()


def listing(infos: Sequence[CheckpointInfo]) -> Grid:
    """The steps of a run."""
    columns = [">step", "time", ">leaves", ">size", ">files", "metrics", "metadata"]
    return Grid(
        columns,
        [
            [
                str(info.step),
                time_text(info),
                str(len(info.leaves)),
                nbytes_text(info.stored_nbytes),
                str(len(info.files)),
                metrics_text(info.metrics),
                short(compact(info.metadata)),
            ]
            for info in infos
        ],
    )


def heading(info: CheckpointInfo) -> Grid:
    """Where a checkpoint is and what it is."""
    rows = [
        ("checkpoint", info.location),
        ("step", "" if info.step is None else str(info.step)),
        ("format", "" if info.format == "asyncckpt" else info.format),
        ("saved", _saved_text(info)),
        ("leaves", f"{len(info.leaves)} with {nbytes_text(info.nbytes)} in arrays"),
        ("files", f"{len(info.files)} with {nbytes_text(info.stored_nbytes)}"),
        ("metrics", " ".join(f"{name}={value!r}" for name, value in info.metrics.items())),
        ("metadata", compact(info.metadata)),
    ]
    return Grid(("", ""), [row for row in rows if row[1]])


def _saved_text(info: CheckpointInfo) -> str:
    """When, by what and as which save, as far as the format tells."""
    when = time_text(info) if info.created_ns else ""
    by = f"by {info.library}" if info.library else ""
    save = f", save {info.save_id}" if info.save_id else ""
    return f"{when} {by}".strip() + save


def leaves(info: CheckpointInfo) -> Grid:
    """The tree of a checkpoint, one line per container and leaf."""
    columns = ["leaf", "type", "shape", ">size", ">chunks", "chunk shape", "notes"]
    return Grid(columns, list(_branch(info.tree, "", 0)))


def files(info: CheckpointInfo) -> Grid:
    """The files of a checkpoint beside its record."""
    rows = [[f.path, nbytes_text(f.nbytes), crc_text(f) or ""] for f in info.files]
    return Grid(["file", ">size", "crc32c"], rows)


def damages(reports: Sequence[VerifyReport]) -> Grid:
    """Every damaged place of some checkpoints."""
    return Grid(
        ["damaged leaf", "file", ">byte", "reason"],
        [
            [
                damage.leaf or "(metadata)",
                f"{report.location}/{damage.file}",
                "" if damage.offset is None else str(damage.offset),
                damage.reason,
            ]
            for report in reports
            for damage in report.damages
        ],
    )


def changes(report: DiffReport, limit: int) -> Grid:
    """The leaves that differ, at most `limit` of them (0: all)."""
    shown = report.changed[: limit or None]
    rows = [_change_row(leaf) for leaf in shown]
    if len(shown) < len(report.changed):
        rows.append([f"… and {len(report.changed) - len(shown)} more", *[""] * 7])
    columns = ["leaf", "differs in", "first", "second"]
    return Grid([*columns, ">elements", ">largest", ">relative", "at"], rows)


def _change_row(leaf: LeafDifference) -> Sequence[str]:
    row = [leaf.path or "(the tree itself)", leaf.what, short(leaf.first), short(leaf.second)]
    if not leaf.count:
        return [*row, *[""] * 4]
    nan = f" ({leaf.nan_count} NaN)" if leaf.nan_count else ""
    return [
        *row,
        f"{leaf.count} of {leaf.size}{nan}",
        f"{leaf.largest:.6g}",
        f"{leaf.largest_relative:.3g}",
        str(list(leaf.index)),
    ]


def time_text(info: CheckpointInfo) -> str:
    """Local time to the second."""
    return created(info).strftime("%Y-%m-%d %H:%M:%S")


def short(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """As many metrics as fit, none of them cut: the beginning of a number is another number."""
    parts = [f"{name}={value:.6g}" for name, value in metrics.items()]
    ends = itertools.accumulate(len(part) + 1 for part in parts)
    fitting = [part for part, end in zip(parts, ends, strict=True) if end <= SHORT]
    return " ".join(fitting if fitting == parts else [*fitting, "…"])


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
    if leaf.pieces:
        notes.append(f"{len(leaf.pieces)} pieces")
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
