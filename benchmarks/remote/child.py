"""The parent's side of a process in which somebody is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.remote.raw import Point
from tests.simulator.clients import KEY, SECRET, Endpoints

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a process.

    Attributes:
        label: for tables; unique.
        kind: client library or peer.
        raw: it only puts and gets bytes.
        point: for ours: sizes and streams of saves instead of ``"auto"``.
        reads: for ours: streams of restores instead of ``"auto"``.
        timeout_s: seconds that anything asked of it may take; then it is killed.
    """

    label: str
    kind: str
    raw: bool = False
    point: Point | None = None
    reads: int | None = None
    timeout_s: float = 180.0


class Failed(Exception):
    """A request to a process failed; the message says why."""


class Child:
    """A running process; `ask` blocks."""

    def __init__(self, process: subprocess.Popen[str], role: Role, errors: IO[str]) -> None:
        self._process = process
        self._errors = errors
        self.role = role

    def ask(self, do: str, **arguments: Any) -> dict[str, float]:
        """Ask the process, and return its answer.

        Raises:
            Failed: it raised, ended, or took too long; after the latter two it is gone.
        """
        return self.send({"do": do, **arguments}, self.role.timeout_s)

    def send(self, value: Mapping[str, Any], timeout_s: float) -> dict[str, float]:
        """As `ask`, for any message."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        killer = threading.Timer(timeout_s, process.kill)
        killer.start()
        try:
            process.stdin.write(json.dumps(value) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            killer.cancel()
        if not line:
            status = process.wait()
            why = f"ended with {status}" if status != -9 else f"took more than {timeout_s:.0f} s"
            raise Failed(f"{self.role.label}: {why}: {self.last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(f"{self.role.label}: {answer['error']}")
        found: dict[str, float] = answer["ok"]
        return found

    def last_words(self) -> str:
        """Return the last lines that it printed."""
        self._errors.seek(0)
        return " / ".join(self._errors.read().strip().splitlines()[-3:])

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None


@contextmanager
def child(
    role: Role, endpoints: Endpoints, directory: Path, prefix: str, budget_nbytes: int
) -> Iterator[Child]:
    """Run a process in this role until the block ends.

    Raises:
        Failed: it did not start.
    """
    with (
        tempfile.TemporaryDirectory(prefix="asyncckpt-bench-", dir=directory) as name,
        tempfile.TemporaryFile("w+", dir=name) as errors,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.remote.worker"],
            cwd=REPOSITORY,
            env={**os.environ, **_environment(endpoints)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        made = Child(process, role, errors)
        try:
            setup = {
                "s3": endpoints.s3_endpoint,
                "gcs": endpoints.gcs_endpoint,
                "region": endpoints.region,
                "prefix": prefix,
                "directory": name,
                "budget_nbytes": budget_nbytes,
                **asdict(role),
            }
            made.send(setup, START_TIMEOUT_S)
            yield made
            if made.running:
                made.ask("close")
        finally:
            _end(process)


def _environment(endpoints: Endpoints) -> dict[str, str]:
    return {
        # gcsfs would ask a service of Google for the kind of the bucket.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # For clients of which some part does not take options.
        "STORAGE_EMULATOR_HOST": endpoints.gcs_endpoint,
        "TENSORSTORE_GCS_HTTP_URL": endpoints.gcs_endpoint,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.close()
    except OSError:
        pass
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
