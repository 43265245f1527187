"""`python -m benchmarks.timelines`: pictures of a save, and what recording its timeline costs.

A picture shows one measured save: to a directory, and to the S3-like simulator by obstore. Of
several saves the fastest is drawn, which other work of the machine has disturbed least. The third
save of a `Checkpointer` and later ones count: plan and staging memory are there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import KeepLast, SaveReport, blocking
from asyncckpt.flow.recorder import Recorder
from asyncckpt.reports import nbytes_text, rate_text
from benchmarks.machine import facts
from tests.simulator import simulator_process

MIB = 1 << 20
IMAGES = Path(__file__).parents[1] / "docs" / "images"
BUCKET = "timelines"
WARM_UP = 2


def state(nbytes: int) -> dict[str, Any]:
    """A model of 32 layers of one size, with a norm each, and the step."""
    rng = np.random.default_rng(0)
    side = int((nbytes / 32 / 4) ** 0.5)
    layers = {
        f"layer{number}": {
            "kernel": rng.random((side, side), np.float32),
            "norm": rng.random(side, np.float32),
        }
        for number in range(32)
    }
    return {"params": layers, "step": 12}


def saves(
    root: str, tree: Any, count: int, storage_options: dict[str, Any] | None = None
) -> list[SaveReport]:
    """Return the reports of saves of the same tree, the first ones left out."""
    with blocking.Checkpointer(root, keep=KeepLast(1), storage_options=storage_options) as ckpt:
        return [ckpt.save(step, tree) for step in range(count + WARM_UP)][WARM_UP:]


def overlap(report: SaveReport) -> float:
    """Busy seconds of the data stages by seconds in which at least one was: 1.0 is no overlap."""
    stages = {"stage", "serialize", "upload"}
    spans = [(s.start_s, s.end_s) for s in report.timeline.spans if s.stage in stages]
    together, end_s = 0.0, 0.0
    for start, end in sorted(spans):
        together += max(0.0, end - max(start, end_s))
        end_s = max(end_s, end)
    return sum(report.stage_s[stage] for stage in stages) / together


def recording_s(report: SaveReport, rounds: int = 20) -> float:
    """CPU seconds that recording a save and making its timeline takes, measured by doing it again.

    What the index keeps of it is made from a timeline once more.
    """
    from asyncckpt.format.stored_timeline import encode_timeline

    spans = sorted(report.timeline.spans, key=lambda span: span.end_s)
    found: list[float] = []
    for _ in range(rounds):
        begun = time.process_time()
        recorder = Recorder(0.0)
        for span in spans:
            time.perf_counter()
            recorder.add(span.stage, span.start_s, span.nbytes, span.end_s)
        recorder.timeline()
        encode_timeline(recorder.timeline())
        found.append(time.process_time() - begun)
    return statistics.median(found)


def show(name: str, reports: Sequence[SaveReport], path: Path) -> None:
    """Draw the fastest save, and print what it says and what recording it costs."""
    report = min(reports, key=lambda report: report.total_s)
    rate = rate_text(report.nbytes, report.total_s)
    title = f"{nbytes_text(report.nbytes)} saved to {name} in {report.total_s:.2f} s ({rate})"
    report.plot(path, title=title)
    cost_s = recording_s(report)
    print(
        f"{name}: {report}; overlap {overlap(report):.2f}; {len(report.timeline.spans)} spans, "
        f"{cost_s * 1e3:.2f} ms of CPU, {cost_s / report.total_s:.2%} of the save"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the pictures of docs/seeing-a-save.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timelines", description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="where the pictures go")
    parser.add_argument("--directory", help="on the disk to save to (default: a temporary one)")
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--saves", type=int, default=7, help="saves of which one is drawn")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    tree = state(chosen.mib * MIB)
    print(facts(Path(chosen.directory or tempfile.gettempdir())))
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        found = saves(directory, tree, chosen.saves)
        show("local disk", found, chosen.out / "save-local.png")
    with simulator_process("s3", buckets=[BUCKET]) as service:
        options = service.s3_options(client="obstore")
        found = saves(f"s3://{BUCKET}/run", tree, chosen.saves, options)
        show("a simulated S3", found, chosen.out / "save-s3.png")


if __name__ == "__main__":
    main()
