"""The simulator in a process of its own, which does not share the GIL with what is measured."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from asyncckpt.testing.objectstore.clients import Endpoints
from asyncckpt.testing.objectstore.profiles import Profile

CONTROL_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0


class SimulatorProcess(Endpoints):
    """A running simulator in another process; see `simulator_process`.

    Attributes:
        control_endpoint: URL at which it is asked and told.
        pid: of its process.
    """

    def __init__(self, pid: int, endpoints: Mapping[str, str]) -> None:
        self.pid = pid
        self.s3_endpoint = endpoints["s3"]
        self.gcs_endpoint = endpoints["gcs"]
        self.control_endpoint = endpoints["control"]
        self.region = endpoints["region"]

    def __repr__(self) -> str:
        return f"SimulatorProcess({self.pid}, {self.s3_endpoint}, {self.gcs_endpoint})"

    def control(self, method: str, path: str, body: Any = None) -> Any:
        """Ask or tell the simulator; see `control.Control`. Blocks."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.control_endpoint}/{path}", method=method, data=data
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=CONTROL_TIMEOUT_S) as answer:
            return json.loads(answer.read())

    def stats(self) -> dict[str, Any]:
        """As `simulator.Stats`, as a dictionary."""
        found: dict[str, Any] = self.control("GET", "stats")
        return found

    def requests(self) -> list[dict[str, Any]]:
        """The log; each entry as `requests.Logged`, as a dictionary."""
        found: list[dict[str, Any]] = self.control("GET", "requests")
        return found

    def objects(self, bucket: str = "bucket") -> dict[str, int]:
        """Sizes of the objects of a bucket by key."""
        found: dict[str, int] = self.control("GET", f"objects/{bucket}")
        return found

    def uploads(self) -> list[str]:
        """Bucket and key of each upload that is open."""
        found: list[str] = self.control("GET", "uploads")
        return found

    def create_bucket(self, name: str) -> None:
        """The bucket is there."""
        self.control("POST", f"bucket/{name}")

    def set_faults(self, faults: Iterable[Mapping[str, Any]]) -> None:
        """The script consists of these; each has attributes of a `Fault` that are plain values."""
        self.control("POST", "faults", [dict(fault) for fault in faults])

    def reset(self) -> None:
        """As `Simulator.reset`."""
        self.control("POST", "reset")

    def clear(self) -> None:
        """As `Simulator.clear`."""
        self.control("POST", "clear")


def arguments(profile: Profile | str, options: Mapping[str, Any]) -> list[str]:
    """The command line that makes this simulator."""
    found = ["--profile", profile if isinstance(profile, str) else "loopback"]
    if isinstance(profile, Profile):
        for name in profile.__slots__:
            found += ["--set", f"{name}={getattr(profile, name)}"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            found += [option] if value else [f"--no-{name.replace('_', '-')}"]
        elif isinstance(value, (list, tuple)):
            found += [text for item in value for text in (option, str(item))]
        else:
            found += [option, str(value)]
    return found


@contextmanager
def simulator_process(
    profile: Profile | str = "loopback", **options: Any
) -> Iterator[SimulatorProcess]:
    """A simulator serves in a process of its own until the block ends.

    `options` are those of the command line: ``bucket`` (a name or several), ``region``,
    ``part_min_nbytes``, ``md5_max_nbytes``, ``verify_checksums``, ``keep_log``, ``s3_port``,
    ``gcs_port``.
    """
    command = [sys.executable, "-m", "asyncckpt.testing.objectstore", "--until-eof"]
    process = subprocess.Popen(
        command + arguments(profile, options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the simulator ended at once with {process.wait()}")
        yield SimulatorProcess(process.pid, json.loads(line))
    finally:
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
