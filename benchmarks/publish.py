"""`python -m benchmarks.publish`: write the figures of `benchmarks/results/` into README and docs.

The README gets a few ratios, `docs/benchmarks.md` gets all tables, other pages get one of them, and
`docs/images/training.png` is the plot of training with saves. `--check` changes nothing, and fails
if a page differs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.remote.results import SAME
from benchmarks.results import NO_SAVES, OURS, TRAINING, median

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PICTURE = Path("docs") / "images" / "training.png"

SHORT, FULL, REMOTE = "short", "full", "remote"
COMMANDS = {
    SHORT: "make bench",
    FULL: "make bench-full",
    REMOTE: "make bench-remote",
}
FORMS = {
    SHORT: ("short.md", "Local disk, short form"),
    FULL: ("full.md", "Local disk, full form"),
    "full-2": ("full-2.md", "Local disk, full form: the largest workloads"),
    REMOTE: ("remote.md", "Object stores"),
    "remote-gcs": ("remote-gcs.md", "Object stores: simulated GCS"),
    "remote-save": ("remote-save.md", "Object stores, full form: saves"),
    "remote-restore": ("remote-restore.md", "Object stores, full form: restores"),
    "device": ("device.md", "Saves to a simulated device"),
    "cuda": ("cuda.md", "Saves from a CUDA device"),
    "scale": ("scale.md", "Ten thousand processes"),
    "dcp": ("dcp.md", "Our classes in torch.distributed.checkpoint"),
    "read_once": ("read_once.md", "Restores that read once"),
}
"""Sections of the page: the file of the results, and the title."""

NOTES = "## How to read this\n"
"""Heading of the last part of the results, which explains their columns."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of README: one verdict of one run.

    Attributes:
        text: what is compared.
        form: name of the run.
        workload: of the verdict.
        metric: of the verdict.
    """

    text: str
    form: str
    workload: str
    metric: str


_SAVE = "durable save with retention"
_RESTORE = "warm restore in place"

ROWS = (
    Row("durable save, relative to plain O_DIRECT writes", SHORT, "W1", f"{_SAVE} / raw write"),
    Row(
        "durable save, relative to safetensors + fsync",
        SHORT,
        "W1",
        f"{_SAVE} / safetensors + fsync",
    ),
    Row("durable save, relative to `torch.distributed.checkpoint`", SHORT, "W1", f"{_SAVE} / DCP"),
    Row("durable save, relative to Orbax", SHORT, "W1", f"{_SAVE} / Orbax"),
    Row(
        "restore into existing arrays, relative to safetensors",
        SHORT,
        "W1",
        f"{_RESTORE} / safetensors into the same arrays",
    ),
    Row(
        "restore from a cold disk, relative to plain reads",
        SHORT,
        "W1",
        "cold restore, own memory / raw read",
    ),
    Row(
        "save to simulated S3, relative to the client alone",
        REMOTE,
        "W1 s3",
        f"save, {SAME}, best bare client",
    ),
)
"""Rows of README that compare with a target; one more compares trainings."""


def readme(results: Path) -> str:
    """Return the rows of README; those that were not measured are left out."""
    data = {form: _json(results / f"{form}.json") for form in COMMANDS}
    lines = []
    for row in ROWS:
        for verdict in data[row.form].get("verdicts", ()):
            if (verdict["workload"], verdict["metric"]) == (row.workload, row.metric):
                measured = verdict["measured"].split(" (")[0]
                met = "met" if verdict["status"] == "PASS" else "missed"
                target = verdict["target"].split()[1]
                lines.append(
                    f"| {row.text} | {measured} | ≥ {target}: {met} | `{COMMANDS[row.form]}` |"
                )
    lines += _training_row(data[SHORT])
    head = ["| | ratio | target | |", "|---|---|---|---|"]
    return "\n".join([*head, *lines]) + "\n" if lines else ""


def _training_row(data: dict[str, Any]) -> list[str]:
    """Return how much longer a training takes with saves, ours and the other library's.

    As in the table: the median of the ratios of each round.
    """
    walls = {
        found["subject"]: [sample["wall_s"] for sample in found["samples"]]
        for found in data.get("measurements", ())
        if found["scenario"] == TRAINING and found["column"] == "JAX loop"
    }
    plain = walls.pop(NO_SAVES, None)
    if plain is None or OURS not in walls:
        return []
    longer = {
        name: median([taken / base for taken, base in zip(found, plain, strict=False)])
        for name, found in walls.items()
    }
    ours = f"{longer.pop(OURS):.2f} × with ours"
    others = "".join(f", {ratio:.2f} × with {name}" for name, ratio in longer.items())
    text = "duration of a training with two saves, to one without saves (lower is better)"
    return [f"| {text} | {ours}{others} | | `{COMMANDS[SHORT]}` |"]


def sections(results: Path) -> str:
    """Return the tables of every run that has results, one section each.

    Notes that are the same as those of an earlier section are left out.
    """
    made: list[str] = []
    explained: set[str] = set()
    for name, title in FORMS.values():
        path = results / name
        if not path.exists():
            continue
        text = re.sub(r"\A# .*\n", "", path.read_text())
        text = re.sub(r"^!\[.*\n\n?", "", text, flags=re.M)
        text, _, notes = text.partition(NOTES)
        if notes and notes not in explained:
            explained.add(notes)
            text += NOTES + notes
        text = re.sub(r"^## ", "### ", text, flags=re.M)
        made.append(f"## {title}\n\n{text.strip()}\n")
    return "\n".join(made)


def table(path: Path) -> str:
    """Return the table of one file of results."""
    lines = path.read_text().splitlines() if path.exists() else []
    return "".join(f"{line}\n" for line in lines if line.startswith("|"))


def filled(text: str, name: str, content: str) -> str:
    """Return the page with other content between its marks of this name.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"no {begin.strip()} … {end}")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}"


def pages(repository: Path = REPOSITORY, results: Path = RESULTS) -> dict[Path, str]:
    """Return what the pages are to say, by path."""
    docs = repository / "docs"
    wanted = {
        repository / "README.md": ("figures", readme(results)),
        docs / "benchmarks.md": ("tables", sections(results)),
        docs / "dcp.md": ("table", table(results / "dcp.md")),
        docs / "reading-once.md": ("table", table(results / "read_once.md")),
    }
    return {path: filled(path.read_text(), *part) for path, part in wanted.items()}


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them; return 1 where a page disagrees with the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    stale = [(path, text) for path, text in pages().items() if path.read_text() != text]
    for path, text in stale:
        print(f"{path.name}: {'differs from the results' if options.check else 'written'}")
        if not options.check:
            path.write_text(text)
    picture = RESULTS / f"{SHORT}-training.png"
    if not options.check and picture.exists():
        (REPOSITORY / PICTURE).parent.mkdir(exist_ok=True)
        shutil.copyfile(picture, REPOSITORY / PICTURE)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
