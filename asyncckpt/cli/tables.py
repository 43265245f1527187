"""Tables: wrapped to the width of a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncckpt.cli.documents import compact, crc_text, created
from asyncckpt.reports import (
    CheckpointInfo,
    DiffReport,
    LeafDifference,
    LeafInfo,
    Span,
    Timeline,
    VerifyReport,
    nbytes_text,
    rate_text,
)
from asyncckpt.reports.timeline import Stage
from asyncckpt.tree.names import escape_keys

STYLED_ROWS = 2000
"""Maximum number of rows laid out by rich, which takes a third of a millisecond per row."""

SHORT = 48
"""Maximum length of metadata and values in a table; `--json` prints them in full."""

GAP = "  "
"""Text between two columns."""

SHADES = " ░▒▓█"
"""Shades of a cell, from idle to busy all the time."""

WIDTH = 48
"""Cells of a bar in a pipe or file; a bar in a terminal has up to twice as many."""


def console() -> Console:
    """Return a console that prints text unchanged: no markup, no highlighting."""
    return Console(markup=False, highlight=False, emoji=False)


def terminal_width() -> int | None:
    """Return the width of the terminal in columns; None if standard output is a pipe or file."""
    printer = console()
    return printer.width if printer.is_terminal else None


def printable(text: str) -> str:
    """Escape terminal control characters: a checkpoint may be hostile."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode-escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table to print; columns whose title starts with ``>`` are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(grids: Iterable[Grid]) -> None:
    """Print the tables, separated by empty lines."""
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
        text = GAP.join(cell.rjust(n) if flush else cell.ljust(n) for cell, n, flush in cells)
        yield text.rstrip()


def listing(infos: Sequence[CheckpointInfo], width: int | None) -> Grid:
    """Return the steps of a run, one line each.

    Metrics and metadata share the remaining `width`; a column narrower than its title is left out.
    """
    columns = {
        ">step": [str(info.step) for info in infos],
        "time": [time_text(info) for info in infos],
        ">leaves": [str(len(info.leaves)) for info in infos],
        ">size": [nbytes_text(info.stored_nbytes) for info in infos],
        ">files": [str(len(info.files)) for info in infos],
    }
    if any(info.epoch for info in infos):
        columns[">epoch"] = [str(info.epoch) for info in infos]
    if any(info.format != "asyncckpt" for info in infos):
        columns["format"] = [info.format for info in infos]
    texts: dict[str, Callable[[CheckpointInfo, int], str]] = {
        "metrics": lambda info, room: metrics_text(info.metrics, room),
        "metadata": lambda info, room: short(compact(info.metadata), room),
    }
    for title, text in texts.items():
        room = SHORT
        if width is not None:
            taken = sum(max(map(len, (title, *cells))) for title, cells in columns.items())
            room = min(SHORT, width - taken - len(GAP) * len(columns))
        if room >= len(title):
            columns[title] = [text(info, room) for info in infos]
    return Grid(list(columns), list(zip(*columns.values(), strict=True)))


def heading(info: CheckpointInfo) -> Grid:
    """Return the location, format, size and metadata of a checkpoint."""
    by = f"by {info.library}" if info.library else ""
    save = f", save {info.save_id}" if info.save_id else ""
    rows = [
        ("checkpoint", info.location),
        ("step", "" if info.step is None else str(info.step)),
        ("format", "" if info.format == "asyncckpt" else info.format),
        ("saved", f"{time_text(info)} {by}".strip() + save),
        ("leaves", f"{len(info.leaves)} with {nbytes_text(info.nbytes)} in arrays"),
        ("files", f"{len(info.files)} with {nbytes_text(info.stored_nbytes)}"),
        ("metrics", " ".join(f"{name}={value!r}" for name, value in info.metrics.items())),
        ("metadata", compact(info.metadata)),
    ]
    return Grid(("", ""), [row for row in rows if row[1]])


def leaves(info: CheckpointInfo) -> Grid:
    """Return the tree of a checkpoint, one line per container and leaf."""
    columns = ["leaf", "type", "shape", ">size", ">chunks", "chunk shape", "notes"]
    return Grid(columns, list(_branch(info.tree, "", 0)))


def files(info: CheckpointInfo) -> Grid:
    """Return the files of a checkpoint except its record."""
    rows = [[f.path, nbytes_text(f.nbytes), crc_text(f) or ""] for f in info.files]
    return Grid(["file", ">size", "crc32c"], rows)


def damages(reports: Sequence[VerifyReport]) -> Grid:
    """Return every damaged place of the checkpoints."""
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
    """Return the leaves that differ, up to `limit` (0: all)."""
    shown = report.changed[: limit or None]
    rows = [_change_row(leaf) for leaf in shown]
    if len(shown) < len(report.changed):
        rows.append([f"… and {len(report.changed) - len(shown)} more", *[""] * 7])
    columns = ["leaf", "differs in", "first", "second"]
    return Grid([*columns, ">elements", ">largest", ">relative", "at"], rows)


def gantt(timeline: Timeline, width: int | None) -> Grid:
    """Return a line per stage: a bar over the duration of the save, times, bytes and rate.

    `width` is the width of the terminal in columns, None for a pipe or file.
    """
    several = len(timeline.processes()) > 1
    stages = {
        f"{name} ({process})" if several else name: stage
        for process in timeline.processes()
        for name, stage in timeline.stages(process).items()
    }
    facts = [(name, *_facts(stage)) for name, stage in stages.items()]
    taken = sum(max(map(len, column)) for column in zip(*facts, strict=True))
    room = WIDTH if width is None else width - taken - len(GAP) * 6
    cells = max(10, min(room, 2 * WIDTH))
    bars = [_bar(stage.spans, timeline.end_s, cells) for stage in stages.values()]
    columns = ["stage", "", ">begin", ">end", ">busy", ">bytes", ">rate"]
    return Grid(columns, [[row[0], bar, *row[1:]] for row, bar in zip(facts, bars, strict=True)])


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
    """Return the local commit time to the second, empty if the format has none."""
    return f"{created(info):%Y-%m-%d %H:%M:%S}" if info.created_ns else ""


def short(text: str, room: int = SHORT) -> str:
    """Return the text, truncated to `room` characters."""
    return text if len(text) <= room else text[: room - 1] + "…"


def metrics_text(metrics: Mapping[str, float], room: int = SHORT) -> str:
    """Return as many metrics as fit, none truncated: that would change the number."""
    parts = [f"{name}={value:.6g}" for name, value in metrics.items()]
    whole = " ".join(parts)
    if len(whole) <= room:
        return whole
    ends = itertools.accumulate(len(part) + 1 for part in parts)
    fitting = [part for part, end in zip(parts, ends, strict=True) if end < room]
    return " ".join([*fitting, "…"])


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
    children = node if isinstance(node, dict) else dict(enumerate(node))
    # Spelled as in paths, for include=.
    parts = escape_keys(list(children), set(map(type, children)))
    for part, child in zip(parts, children.values(), strict=True):
        yield from _branch(child, part, depth + 1)


def _leaf_row(leaf: LeafInfo, label: str, depth: int) -> Sequence[str]:
    name = "  " * max(0, depth - 1) + (label or "(the tree itself)")
    if leaf.kind != "array":
        value = json.dumps(leaf.value) if isinstance(leaf.value, str) else repr(leaf.value)
        return [name, leaf.kind, "", "", "", "", short(value)]
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


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "()"


def _facts(stage: Stage) -> list[str]:
    times = [f"{s * 1e3:.1f} ms" for s in (stage.start_s, stage.end_s, stage.busy_s)]
    if not stage.nbytes:
        return [*times, "", ""]
    return [*times, nbytes_text(stage.nbytes), rate_text(stage.nbytes, stage.busy_s)]


def _bar(spans: Iterable[Span], end_s: float, cells: int) -> str:
    """Return a bar whose cells are shaded by the fraction of time that any lane was busy."""
    busy = [0.0] * cells
    done = 0.0  # in cells
    for span in spans:  # by start
        start, end = (at / end_s * cells if end_s else 0.0 for at in (span.start_s, span.end_s))
        start = max(start, done)
        done = max(done, end)
        for cell in range(int(start), min(cells, int(end) + 1)):
            busy[cell] += max(0.0, min(end, cell + 1) - max(start, cell))
    most = len(SHADES) - 1
    # Rounded up, so that even the shortest stage is visible.
    return "".join(SHADES[min(most, int(share * most + 0.999))] for share in busy)
