"""The files a run leaves: JSON with every sample, a Markdown table, and plots."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from benchmarks import plots as pictures
from benchmarks import tables
from benchmarks.results import Results


def write(results: Results, directory: Path, *, plots: bool = True) -> list[Path]:
    """Write JSON, table and, where matplotlib is installed, plots; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / f"{results.form}.json"
    data.write_text(json_text(results))
    table = directory / f"{results.form}.md"
    made = [data, table]
    picture = directory / f"{results.form}.png"
    if plots and importlib.util.find_spec("matplotlib"):
        pictures.plot(results, picture)
        made.append(picture)
    table.write_text(markdown(results, picture.name if picture in made else None))
    return made


def json_text(results: Results) -> str:
    """Return JSON with one sample per line: small, and a change shows in a diff."""
    value = results.as_json()
    measurements = value.pop("measurements")
    head = json.dumps(value, indent=1, ensure_ascii=False)[:-2]
    lines = [f'{head},\n "measurements": [']
    for index, found in enumerate(measurements):
        samples = found.pop("samples")
        start = json.dumps(found, ensure_ascii=False)[:-1]
        rows = ",\n   ".join(json.dumps(sample) for sample in samples)
        comma = "," if index + 1 < len(measurements) else ""
        lines.append(f'  {start}, "samples": [\n   {rows}]}}{comma}')
    return "\n".join([*lines, " ]\n}\n"])


def markdown(results: Results, picture: str | None = None) -> str:
    """Return the tables, targets first."""
    parts = [f"# Benchmarks, {results.form} form\n", _facts(results.facts)]
    if results.errors:
        parts.append("## Failed\n\n" + "\n".join(f"- {error}" for error in results.errors) + "\n")
    parts.append(tables.targets(results))
    if picture:
        parts.append(f"![rates, small leaves and shardings]({picture})\n")
    parts += [*tables.all_of(results), _NOTES]
    return "\n".join(part for part in parts if part)


_NOTES = """## How to read this

Rates are GB/s (10⁹ bytes). *Of the floor* is the median of floor seconds / own seconds, where the
floor is what plain system calls or copies took for as many bytes, probed right before and after
each sample. Samples whose two probes differ by more than 10 % are taken again, at most five times;
*unsteady samples* counts those that still differed. As much free memory as a sample may need is
touched and freed right before it, because virtual machines lose free pages to their host and get
them back slowly. *Extra memory* is the peak of resident memory above what was resident before, the
pool that asyncckpt keeps for saves included. CPU seconds are those of the process; the kernel's
write-back of buffered files is not in them. *Read from disk* is the share of the bytes that came
from the device: about 100 % is cold, 0 % is warm. Every restore was compared with its source,
outside the timed part; of conversions, the first of each kind. *Until wait() returns* counts from
the call of `save()` and includes the work that goes on in the background. *Save with retention*
saves while one older step exists, which `KeepLast(1)` deletes.

*Per small leaf* is the slope from the smallest to the largest W4; *power* is the exponent with
which the time grows, fitted over all of them (1 is proportional). Planning is timed by itself: no
array is read and no file touched. Resharding runs in a process with eight devices that are emulated
on the CPU; half of an array is what one process of two would read. *Read* is what the report of the
restore says, *by system calls* what the process read meanwhile, metadata included, both relative to
the bytes that are wanted. *Through memory* is the plain way to convert: restore with one library,
save with the other.
"""


def _facts(facts: dict[str, Any]) -> str:
    lines = [f"- {key}: {_text(value)}" for key, value in facts.items()]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)
