"""Forked processes whose imports were made before behave as processes started anew."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded import LOST, Preloaded

if sys.platform != "linux":
    pytest.skip("forks by pidfd", allow_module_level=True)

PROGRAM = """
import atexit, os, sys, threading
atexit.register(print, "the end")
what, *rest = sys.argv[1:]
print(__name__, sorted({"csv", "decimal"} & sys.modules.keys()), os.environ["COLOUR"], rest)
if what == "read":
    print(os.read(int(rest[0]), 100).decode())
if what == "raise":
    raise KeyError("odd")
if what == "wait":
    sys.stdout.flush()
    threading.Event().wait()
sys.exit(int(what) if what.isdigit() else 0)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Preloaded]:
    made = Preloaded(["csv"], {"COLOUR": "red"})
    yield made
    made.close()


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def run(server: Preloaded, program: str, out: Path, *arguments: str) -> int:
    with out.open("w") as file:
        return server.start(program, *arguments, stdout=file, stderr=file).wait(60)


def test_it_is_main_with_its_arguments_and_imports_and_ends_by_itself(
    server: Preloaded, program: str, tmp_path: Path
) -> None:
    assert run(server, program, tmp_path / "out", "7", "x") == 7
    assert (tmp_path / "out").read_text() == "__main__ ['csv'] red ['x']\nthe end\n"


def test_an_exception_has_its_traceback_and_status_1(
    server: Preloaded, program: str, tmp_path: Path
) -> None:
    assert run(server, program, tmp_path / "out", "raise") == 1
    text = (tmp_path / "out").read_text()
    assert "KeyError: 'odd'" in text
    assert "the end" in text


def test_descriptors_keep_their_numbers(server: Preloaded, program: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("some words")
    with (tmp_path / "in").open() as file, (tmp_path / "out").open("w") as out:
        number = str(file.fileno())
        process = server.start(
            program, "read", number, stdout=out, stderr=out, pass_fds=[file.fileno()]
        )
        assert process.wait(60) == 0
    assert "some words" in (tmp_path / "out").read_text()


def test_a_kill_is_seen_and_ends_no_other(server: Preloaded, program: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        one, two = (server.start(program, "wait", stdout=out, stderr=out) for _ in range(2))
    one.kill()
    assert one.wait(60) == -signal.SIGKILL
    assert one.poll() == -signal.SIGKILL
    assert two.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        two.wait(0)
    two.kill()
    assert two.wait() == -signal.SIGKILL


def test_without_its_server_a_process_is_lost(program: str, tmp_path: Path) -> None:
    server = Preloaded([], {"COLOUR": "red"})
    with (tmp_path / "out").open("w") as out:
        process = server.start(program, "wait", stdout=out, stderr=out)
    pid = process.pid
    server.close()
    assert process.wait(60) == LOST
    with pytest.raises(OSError):
        server.start(program, "0")
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
