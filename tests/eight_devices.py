"""Tests whose bodies run in a child process where JAX has eight CPU devices.

How many there are is settled when a process first uses JAX, and a test process may have done so.
A test file has one child, which `eight_devices` starts and ends::

    pytestmark = pytest.mark.usefixtures("eight_devices")

    @on_eight_devices
    def test_the_law(argument: str) -> None: ...

Arguments travel as JSON, paths as strings.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import children

PROGRAM = "from tests.eight_devices import serve; serve()"


class EightDevices:
    """The child, started with the first test."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        """The body has run and raised nothing."""
        if self._child is None:
            self._child = children.start(PROGRAM)
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps([module, name, arguments], default=os.fspath) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if not answer:
            self._child = None
            status, out, err = children.finish(child)
            raise AssertionError(f"the child ended with status {status}\n{out}\n{err}")
        fault = json.loads(answer)
        if fault is not None:
            pytest.fail(fault, pytrace=False)

    def close(self) -> None:
        """The child has ended, and by itself."""
        if self._child is not None:
            status, out, err = children.finish(self._child)
            assert status == 0, f"exit status {status}\n{out}\n{err}"


@pytest.fixture(scope="module")
def eight_devices() -> Iterator[EightDevices]:
    child = EightDevices()
    yield child
    child.close()


def on_eight_devices(body: Callable[..., Any]) -> Callable[..., None]:
    """A test that runs `body`, a function or a coroutine function, in the child."""
    path = Path(inspect.getfile(body)).relative_to(children.REPOSITORY)
    module = ".".join(path.with_suffix("").parts)

    def test(eight_devices: EightDevices, **arguments: Any) -> None:
        eight_devices.run(module, body.__name__, arguments)

    functools.update_wrapper(test, body)
    del test.__wrapped__  # type: ignore[attr-defined]  # whose arguments pytest would look at
    first = inspect.Parameter("eight_devices", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(body).parameters.values()
    test.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    test.body = body  # type: ignore[attr-defined]
    return test


def serve() -> None:
    """Run in the child: the bodies named on standard input, until it is closed."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    answers = sys.stdout
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        fault = None
        with contextlib.redirect_stdout(sys.stderr):
            try:
                running = getattr(importlib.import_module(module), name).body(**arguments)
                if running is not None:
                    asyncio.run(running)
            except BaseException:
                fault = traceback.format_exc()
        print(json.dumps(fault), file=answers, flush=True)
