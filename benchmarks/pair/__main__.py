"""Paired timings: `python -m benchmarks.pair --before PATH` compares this checkout with another.

The two take turns, in both orders, so that the ratio holds when the machine's speed drifts. Object
stores are the simulator of this checkout for both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.pair.worker import CASES
from tests.simulator import SimulatorProcess, simulator_process

REPOSITORY = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")

REMOTE = ("save", "restore_into")
CLIENTS = ("obstore", "s3fs", "gcsfs")


class Side:
    """One checkout, measured in a process of its own."""

    def __init__(self, root: Path, size_mib: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(root), str(size_mib)],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, case: str, place: str, options: dict[str, Any]) -> float:
        """Time one case once."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"case": case, "place": place, "options": options}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{case}: the worker ended with {self._process.wait()}")
        return float(json.loads(line)["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def places(client: str, folder: Path, sim: SimulatorProcess | None) -> tuple[str, dict[str, Any]]:
    """Return where a client saves, and its arguments."""
    if sim is None:
        return str(folder), {}
    if client == "gcsfs":
        return "gs://bucket/run", {"storage_options": sim.gcs_options()}
    chosen = "obstore" if client == "obstore" else "fsspec"
    return "s3://bucket/run", {"storage_options": {"client": chosen, **sim.s3_options()}}


def compare(options: argparse.Namespace) -> None:
    """Measure all cases and print a row for each as it ends."""
    print(f"{'case':44} {'before s':>9} {'after s':>9}  after/before: median (min to max)")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        sides = [Side(options.before.resolve(), options.size), Side(REPOSITORY, options.size)]
        for side in sides:
            stack.callback(side.close)
        cases = [("local disk", "", case) for case in options.cases or CASES]
        cases = [] if options.profile else cases
        sim: SimulatorProcess | None = None
        for profile in options.profile:
            sim = stack.enter_context(simulator_process(profile))
            cases += [
                (profile, client, case)
                for client in options.client
                for case in options.cases or REMOTE
            ]
        for where, client, case in cases:
            pairs = []
            for number in range(options.samples + 1):
                taken = {}
                for turn in (0, 1) if number % 2 else (1, 0):
                    place, arguments = places(client, folder / "run", sim)
                    taken[turn] = sides[turn].seconds(case, place, arguments)
                    shutil.rmtree(folder / "run", ignore_errors=True)
                    if sim is not None:
                        sim.clear()
                if number:  # the first pair warms up
                    pairs.append((taken[0], taken[1]))
            ratios = sorted(after / before for before, after in pairs)
            before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(
                f"{f'{where} {client} {case}':44} {before:9.3f} {after:9.3f}  "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pair", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="root of the other checkout")
    parser.add_argument("--size", type=int, default=1024, help="MiB of the large state and of W5")
    parser.add_argument("--samples", type=int, default=5, help="pairs per case")
    parser.add_argument("--cases", nargs="+", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--profile", nargs="+", default=[], help="loopback, s3 or gcs; none: disk")
    parser.add_argument("--client", nargs="+", default=CLIENTS, help=f"of {' '.join(CLIENTS)}")
    parser.add_argument("--dir", type=Path, help="where local files go")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
