"""The files a run leaves: JSON with every sample, a Markdown table, and plots."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots as pictures
from benchmarks import tables
from benchmarks.results import Results

Draw = Callable[[Any, Path], None]
"""Draws a picture of results into a file."""


def write(results: Results, directory: Path, *, plots: bool = True) -> list[Path]:
    """Write JSON, table and, where matplotlib is installed, plots; return their paths."""
    drawn: dict[str, Draw] = {}
    if plots and pictures.panels(results):
        drawn[""] = pictures.plot
    if plots and results.timelines:
        drawn["-training"] = pictures.plot_training
    return write_files(results, directory, results.form, markdown, drawn)


def write_files(
    results: Any,
    directory: Path,
    name: str,
    text: Callable[[Any, Sequence[str]], str],
    drawn: Mapping[str, Draw],
) -> list[Path]:
    """Write the files of results of either suite; return their paths.

    Args:
        results: what was measured.
        directory: where the files go.
        name: of the files.
        text: returns the tables, given the results and the names of the pictures.
        drawn: what draws each picture, by the end of its name; none without matplotlib.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data, table = (directory / f"{name}{end}" for end in (".json", ".md"))
    data.write_text(json_text(results))
    made = [data, table]
    if importlib.util.find_spec("matplotlib"):
        for end, draw in drawn.items():
            made.append(directory / f"{name}{end}.png")
            draw(results, made[-1])
    table.write_text(text(results, [path.name for path in made[2:]]))
    return made


def write_page(directory: Path, name: str, text: str, document: Mapping[str, Any]) -> None:
    """Print figures, and write them as Markdown and as JSON."""
    print(text)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text(text)
    (directory / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def json_text(results: Any) -> str:
    """Return JSON with a line for each sample and timeline: small, and a change shows in a diff."""
    value = results.as_json()
    measurements = value.pop("measurements")
    timelines = value.pop("timelines", [])
    lines = [json.dumps(value, indent=1, ensure_ascii=False)[:-2] + ","]
    if timelines:
        rows = ",\n  ".join(json.dumps(line, separators=(",", ":")) for line in timelines)
        lines.append(f' "timelines": [\n  {rows}],')
    lines.append(' "measurements": [')
    for index, found in enumerate(measurements):
        samples = found.pop("samples")
        start = json.dumps(found, ensure_ascii=False)[:-1]
        rows = ",\n   ".join(json.dumps(sample) for sample in samples)
        comma = "," if index + 1 < len(measurements) else ""
        lines.append(f'  {start}, "samples": [\n   {rows}]}}{comma}')
    return "\n".join([*lines, " ]\n}\n"])


def markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """Return the tables, targets first."""
    parts = [f"# Benchmarks, {results.form} form\n", tables.facts(results.facts)]
    for title, lines in (("Failed", results.errors), ("Left out", results.left_out)):
        if lines:
            parts.append(f"## {title}\n\n" + "".join(f"- {line}\n" for line in lines))
    parts.append(tables.targets(results))
    parts += [f"![{name.removesuffix('.png')}]({name})\n" for name in pictures]
    parts += [*tables.all_of(results), NOTES]
    return "\n".join(part for part in parts if part)


NOTES = """## How to read this

Rates and times:

- Rates are GB/s (10⁹ bytes).
- *Of the floor* is the median of floor seconds / own seconds. The floor is the time that plain
  system calls or copies take for the same number of bytes, probed right before and after each
  sample.
- Samples whose two probes differ by more than 10 % are taken again, at most five times. *Unsteady
  samples* counts those that still differed.
- *Read from disk* is the share of the bytes that came from the device: about 100 % is cold, 0 % is
  warm.
- *Until wait() returns* is measured from the call of `save()` and includes background work.
- With `KeepLast(1)`, one older step exists, which is deleted by the save or after it.
- *One-shot* is a call of `blocking.save(path, tree)` or `restore(path)`, without a `Checkpointer`.
  *First save of a tree* is that of a `Checkpointer` that has prepared nothing.

Memory, CPU and checks:

- The memory that a sample may need is held between samples and freed right before it, because
  virtual machines return free pages to their host and get them back slowly. Those who keep memory
  of their own get none.
- *Extra memory* is the peak of resident memory above the amount that was resident before, including
  the pool that asyncckpt keeps for saves.
- CPU seconds are those of the process. They do not include the kernel's write-back of buffered
  files.
- Every restore is compared with its source, outside the timed part. Of conversions, the first one
  of each kind is compared.

Leaves, resharding and conversion:

- *Per small leaf* is the slope from the smallest to the largest W4; *power* is the exponent of the
  growth of the time, fitted over all W4 (1 is proportional).
- Planning is timed by itself: no array is read and no file is touched.
- Resharding runs in a process with eight emulated CPU devices; half of an array is what one process
  of two would read.
- *Read* is the number of bytes in the report of the restore, and *by system calls* the number that
  the process read in the meantime, metadata included. Both are relative to the bytes wanted.
- *Through memory* is the plain way to convert: restore with one library, save with the other.

Training with saves:

- A step is a matrix product on one core and an update of a part of the state, in a thread. All
  libraries save before the same steps.
- *In calls to save* is the time for which the training stood still.
- The target compares how much longer all steps took with the CPU seconds of the concurrent saves.
  The difference is time lost to locks, memory bandwidth and wake-ups.
- *Loop lag* is how much too late a task woke up that sleeps for a millisecond on the caller's loop.
"""
