"""The simulator in a process of its own, which does not share the GIL with what is measured."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tests.simulator.clients import Endpoints
from tests.simulator.profiles import Profile

END_TIMEOUT_S = 10.0


class SimulatorProcess(Endpoints):
    """A running simulator in another process; see `simulator_process`.

    Attributes:
        pid: of its process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._lock = threading.Lock()
        line = self._read()
        if not line:
            raise RuntimeError(f"the simulator ended at once with {process.wait()}")
        self.s3_endpoint, self.gcs_endpoint, self.region = json.loads(line)

    def __repr__(self) -> str:
        return f"SimulatorProcess({self.pid}, {self.s3_endpoint}, {self.gcs_endpoint})"

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call one of the `commands` of `__main__`. Raises ValueError where it refuses."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._read())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    def stats(self) -> dict[str, Any]:
        """Return `Simulator.stats()` as a dictionary."""
        return self._ask("stats")

    def requests(self) -> list[dict[str, Any]]:
        """Return the log, each entry as a dictionary."""
        return self._ask("requests")

    def objects(self, bucket: str = "bucket") -> dict[str, int]:
        """Return sizes of the objects of a bucket by key."""
        return self._ask("objects", bucket)

    def reset(self) -> None:
        """Do as `Simulator.reset`."""
        self._ask("reset")

    def clear(self) -> None:
        """Do as `Simulator.clear`."""
        self._ask("clear")


@contextmanager
def simulator_process(
    profile: Profile | str = "loopback", **options: Any
) -> Iterator[SimulatorProcess]:
    """Serve in a process of its own until the block ends; `options` are those of `Simulator`."""
    plain = asdict(profile) if isinstance(profile, Profile) else profile
    command = [sys.executable, "-m", "tests.simulator", "--until-eof"]
    command.append(json.dumps({"profile": plain, **options}))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield SimulatorProcess(process)
    finally:
        process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
