"""`python -m tests.simulator`: serve until interrupted, or until the standard input ends."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from tests.simulator.faults import Fault
from tests.simulator.http import MIB
from tests.simulator.profiles import Profile, profile_of, with_overrides
from tests.simulator.running import Simulator

SHAPING = frozenset(f.name for f in fields(Profile))
FAULTS = frozenset(f.name for f in fields(Fault) if f.init) - {"gate", "hook", "when"}
SPARE_NBYTES = 2048 * MIB
"""By default a process of its own keeps so much memory of deleted objects for new ones."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m tests.simulator",
        description="A simulated object store with an S3 and a GCS endpoint, on 127.0.0.1.",
    )
    found.add_argument(
        "options",
        metavar="NAME=VALUE",
        nargs="*",
        help="profile=loopback|s3|gcs, a field of the profile such as put_latency_s=0.1, or "
        'another argument of Simulator such as buckets=["a","b"]; values are JSON, or text',
    )
    found.add_argument(
        "--until-eof", action="store_true", help="take commands from the standard input"
    )
    return found


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `Simulator` that the command line names."""
    found: dict[str, Any] = {"spare_nbytes": SPARE_NBYTES, "own_process": True}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    shaping = {name: found.pop(name) for name in SHAPING & found.keys()}
    found["profile"] = with_overrides(profile_of(found.get("profile", "loopback")), shaping)
    return found


class Commands:
    """Commands of a parent process; each public method is one, and returns plain values."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self.reset = simulator.reset
        self.clear = simulator.clear
        self.create_bucket = simulator.create_bucket

    def stats(self) -> dict[str, Any]:
        """Return counters."""
        return asdict(self._simulator.stats())

    def requests(self) -> list[dict[str, Any]]:
        """Return the log."""
        return [logged.as_dict() for logged in self._simulator.requests]

    def objects(self, bucket: str) -> dict[str, int]:
        """Return sizes by key."""
        return {key: item.nbytes for key, item in self._simulator.stored(bucket).items()}

    def uploads(self) -> list[str]:
        """Return bucket and key of each open upload."""
        return [f"{upload.bucket}/{upload.key}" for upload in self._simulator.uploads]

    def set_faults(self, faults: list[dict[str, Any]]) -> None:
        """Replace the script."""
        script = []
        for values in faults:
            if unknown := values.keys() - FAULTS:
                raise ValueError(f"not a plain value of a fault: {', '.join(sorted(unknown))}")
            if isinstance(values.get("kind"), list):
                values["kind"] = tuple(values["kind"])
            script.append(Fault(**values))
        self._simulator.faults[:] = script

    def answer(self, line: bytes) -> str:
        """Execute one line, a command's name and its arguments, and return its answer."""
        try:
            name, *arguments = json.loads(line)
            return json.dumps({"result": getattr(self, name)(*arguments)})
        except Exception as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both endpoints and the region as one line of JSON, and serve."""
    asked = parser().parse_args(arguments)
    try:
        simulator = Simulator(**options_of(asked.options))
    except (TypeError, ValueError) as error:
        parser().error(str(error))
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with simulator:
        endpoints = [simulator.s3_endpoint, simulator.gcs_endpoint, simulator.region]
        print(json.dumps(endpoints), flush=True)
        if asked.until_eof:
            commands = Commands(simulator)
            for line in sys.stdin.buffer:
                print(commands.answer(line), flush=True)
        else:
            stopped.wait()


if __name__ == "__main__":
    main()
