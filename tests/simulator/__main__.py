"""`python -m tests.simulator`: serve until interrupted, or until the standard input ends."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.simulator.http import MIB
from tests.simulator.profiles import Profile
from tests.simulator.running import Simulator

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
        nargs="?",
        default="{}",
        help="arguments of Simulator as JSON, such as "
        '\'{"profile": "s3", "buckets": ["a", "b"]}\'; a profile is a name or has fields',
    )
    found.add_argument(
        "--until-eof", action="store_true", help="take commands from the standard input"
    )
    return found


def options_of(text: str) -> dict[str, Any]:
    """Return the arguments of `Simulator` that the command line holds."""
    found = {"spare_nbytes": SPARE_NBYTES, **json.loads(text)}
    if isinstance(profile := found.get("profile"), dict):
        found["profile"] = Profile(**profile)
    return found


def commands(simulator: Simulator) -> dict[str, Callable[..., Any]]:
    """Return the commands of a parent process; each returns plain values."""
    return {
        "stats": lambda: asdict(simulator.stats()),
        "requests": lambda: [logged.as_dict() for logged in simulator.requests],
        "objects": lambda bucket: {k: item.nbytes for k, item in simulator.stored(bucket).items()},
        "reset": simulator.reset,
        "clear": simulator.clear,
    }


def answer(known: Mapping[str, Callable[..., Any]], line: bytes) -> str:
    """Execute one line, a command's name and its arguments, and return its answer."""
    try:
        name, *arguments = json.loads(line)
        return json.dumps({"result": known[name](*arguments)})
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
            known = commands(simulator)
            for line in sys.stdin.buffer:
                print(answer(known, line), flush=True)
        else:
            stopped.wait()


if __name__ == "__main__":
    main()
