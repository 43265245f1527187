"""The parent's side of a process in which somebody is measured."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.remote.raw import Point
from benchmarks.remote.subject import Setup
from benchmarks.remote.worker import serve
from tests.simulator.clients import KEY, SECRET, Endpoints

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

    def __init__(self, process: BaseProcess, role: Role, pipe: Connection, errors: Path) -> None:
        self._process = process
        self._pipe = pipe
        self._errors = errors
        self.role = role

    def ask(self, do: str, **arguments: Any) -> dict[str, float]:
        """Ask the process, and return its answer.

        Raises:
            Failed: it raised, ended, or took too long; after the latter two it is gone.
        """
        with contextlib.suppress(OSError):  # that it has ended is found below
            self._pipe.send((do, arguments))
        return self.answer(self.role.timeout_s)

    def answer(self, timeout_s: float) -> dict[str, float]:
        """Return the next answer of the process; the first one says that it has started."""
        try:
            if self._pipe.poll(timeout_s):
                found, why = self._pipe.recv()
            else:
                self._process.kill()
                self._process.join()
                found, why = {}, f"took more than {timeout_s:.0f} s: {self._last_words()}"
        except (EOFError, OSError):
            self._process.join()
            found, why = {}, f"ended with {self._process.exitcode}: {self._last_words()}"
        if why:
            raise Failed(f"{self.role.label}: {why}")
        values: dict[str, float] = found
        return values

    def _last_words(self) -> str:
        """Return the last lines that it printed."""
        text = self._errors.read_text() if self._errors.exists() else ""
        return " / ".join(text.strip().splitlines()[-3:])


@contextmanager
def child(
    role: Role, endpoints: Endpoints, directory: Path, prefix: str, budget_nbytes: int
) -> Iterator[Child]:
    """Run a process in this role until the block ends.

    Raises:
        Failed: it did not start.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-", dir=directory) as name:
        own, errors = Path(name, "own"), Path(name, "errors")
        own.mkdir()
        plain = Endpoints()
        plain.s3_endpoint, plain.gcs_endpoint = endpoints.s3_endpoint, endpoints.gcs_endpoint
        plain.region = endpoints.region
        setup = Setup(plain, prefix, own, budget_nbytes)
        mine, theirs = context.Pipe()
        given = (theirs, errors, setup, role.kind, role.raw, role.point, role.reads)
        process = context.Process(target=serve, args=given, daemon=True)
        with mock.patch.dict(os.environ, _environment(endpoints)):
            process.start()
        theirs.close()
        made = Child(process, role, mine, errors)
        try:
            made.answer(START_TIMEOUT_S)
            yield made
            if process.is_alive():
                made.ask("close")
        finally:
            mine.close()
            process.join(END_TIMEOUT_S)
            process.kill()
            process.join()


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
