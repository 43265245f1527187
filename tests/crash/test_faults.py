"""The fault-injection harness itself: what it counts, and that its faults arrive."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash import faults
from tests.crash.faults import Call, ForkServer, build_library, run_scenario

HERE = "tests.crash.test_faults"


def publish(root: str, payload: str = "abcdefgh") -> str:
    """Write, flush and rename one file the way a careful program does."""
    attempt = os.path.join(root, "attempt")
    os.mkdir(attempt)
    fd = os.open(os.path.join(attempt, "data"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        written = os.write(fd, payload.encode())
        os.write(fd, payload.encode()[written:])
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(attempt, os.path.join(root, "1"))
    directory = os.open(root, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return "published"


PUBLISH_CALLS = ["mkdir", "open64", "write", "write", "fsync", "rename", "fsync"]


async def publish_async(root: str) -> str:
    return publish(root)


def publish_after_setup(root: str) -> str:
    Path(root, "before").write_text("not counted")
    with faults.armed():
        return publish(root)


def write_from_threads(root: str, threads: int, writes: int) -> None:
    fds = [os.open(os.path.join(root, str(i)), os.O_WRONLY | os.O_CREAT) for i in range(threads)]

    def work(fd: int) -> None:
        for at in range(writes):
            os.pwrite(fd, b"x", at)

    workers = [threading.Thread(target=work, args=(fd,)) for fd in fds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def vectored(root: str) -> int:
    fd = os.open(os.path.join(root, "v"), os.O_WRONLY | os.O_CREAT)
    return os.pwritev(fd, [b"aaa", b"bbb", b"cc"], 0)


def rename_through_ctypes(root: str) -> int:
    """The rename that replaces nothing, by the wrapper and by the bare system call."""
    libc = ctypes.CDLL(None, use_errno=True)
    a, b, c = (os.fsencode(os.path.join(root, name)) for name in "abc")
    at_fdcwd, noreplace, renameat2 = -100, 1, {"x86_64": 316}.get(os.uname().machine, 276)
    os.mkdir(a)
    first = libc.renameat2(at_fdcwd, a, at_fdcwd, b, noreplace)
    second = libc.syscall(
        ctypes.c_long(renameat2),
        ctypes.c_long(at_fdcwd),
        b,
        ctypes.c_long(at_fdcwd),
        c,
        ctypes.c_long(noreplace),
    )
    return int(first or second)


def hang(root: str) -> None:
    threading.Event().wait()


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as running:
        yield running


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[int], dict[str, str]]:
    def make(n: int) -> dict[str, str]:
        root = tmp_path / str(n)
        root.mkdir()
        return {"root": str(root)}

    return make


def names(calls: tuple[Call, ...]) -> list[str]:
    return [call.name for call in calls]


def test_every_mutating_call_under_the_prefix_is_counted(
    server: ForkServer, tmp_path: Path
) -> None:
    outcome = server.run(f"{HERE}:publish", {"root": str(tmp_path)})
    assert (outcome.exit_status, outcome.result) == (0, "published"), outcome.describe()
    assert names(outcome.calls) == PUBLISH_CALLS
    assert [call.number for call in outcome.calls] == list(range(1, len(PUBLISH_CALLS) + 1))
    assert outcome.calls[5].second_path == str(tmp_path / "1")


def test_calls_outside_the_prefix_are_not_counted(server: ForkServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    outcome = server.run(f"{HERE}:publish", {"root": str(tmp_path)}, prefix=other)
    assert outcome.calls == ()
    assert (tmp_path / "1").exists()


def test_a_prefix_is_a_directory_and_not_the_start_of_a_name(
    server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "run2").mkdir()
    outcome = server.run(
        f"{HERE}:publish", {"root": str(tmp_path / "run2")}, prefix=tmp_path / "run"
    )
    assert outcome.calls == ()


def test_the_process_is_killed_before_each_call(
    server: ForkServer, fresh: Callable[[int], dict[str, str]]
) -> None:
    seen = []
    for n, args, outcome in server.each_call(f"{HERE}:publish", fresh):
        assert outcome.killed, outcome.describe()
        assert len(outcome.calls) == n
        assert outcome.at is not None
        seen.append(outcome.at.name)
        # Call 6 is the rename: it has happened only if call 7 was reached.
        assert (Path(args["root"]) / "1").exists() == (n == 7)
    assert seen == PUBLISH_CALLS


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_each_call_is_answered_with_the_errno(
    server: ForkServer, fresh: Callable[[int], dict[str, str]], code: int
) -> None:
    seen = []
    for n, args, outcome in server.each_call(f"{HERE}:publish", fresh, mode="error", errno=code):
        assert outcome.exit_status == 1, outcome.describe()
        assert outcome.error_type == "builtins.OSError"
        assert os.strerror(code) in outcome.error
        assert outcome.at is not None
        assert outcome.at.number == n
        assert (Path(args["root"]) / "1").exists() == (n == 7)
        seen.append(outcome.at.name)
    assert seen == PUBLISH_CALLS


def test_an_error_after_the_call_leaves_its_effect(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(
        f"{HERE}:publish", {"root": str(tmp_path)}, mode="error_after", n=1, only=("rename",)
    )
    assert outcome.error_type == "builtins.OSError"
    assert (tmp_path / "1" / "data").read_text() == "abcdefgh"


def test_a_persistent_error_meets_every_later_call(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(
        f"{HERE}:write_from_threads",
        {"root": str(tmp_path), "threads": 2, "writes": 3},
        mode="error",
        n=1,
        persistent=True,
        only=("pwrite64",),
    )
    # Each thread ends with its first error.
    assert [call.verdict for call in outcome.calls] == ["fail", "fail"]


def test_an_interrupted_call_is_made_again(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(
        f"{HERE}:publish", {"root": str(tmp_path)}, mode="error", n=3, errno=errno.EINTR
    )
    assert outcome.exit_status == 0, outcome.describe()
    assert names(outcome.calls).count("write") == 3
    assert (tmp_path / "1" / "data").read_text() == "abcdefgh"


def test_a_short_write_writes_half(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(f"{HERE}:publish", {"root": str(tmp_path)}, mode="short", n=3)
    assert outcome.at is not None
    assert (outcome.at.name, outcome.at.verdict) == ("write", "short")
    # The scenario writes the rest with its second call.
    assert (tmp_path / "1" / "data").read_text() == "abcdefgh"


def test_a_short_vectored_write_writes_half(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(f"{HERE}:vectored", {"root": str(tmp_path)}, mode="short", n=2)
    assert outcome.result == 4
    assert (tmp_path / "v").read_bytes() == b"aaab"


def test_calls_of_all_threads_share_one_count(server: ForkServer, tmp_path: Path) -> None:
    args = {"root": str(tmp_path), "threads": 4, "writes": 50}
    outcome = server.run(f"{HERE}:write_from_threads", args)
    assert [call.number for call in outcome.calls] == list(range(1, 4 + 4 * 50 + 1))


def test_no_thread_gets_a_call_in_after_the_kill(server: ForkServer, tmp_path: Path) -> None:
    args = {"root": str(tmp_path), "threads": 4, "writes": 50}
    outcome = server.run(f"{HERE}:write_from_threads", args, mode="kill", n=100)
    assert outcome.killed
    assert outcome.calls[-1].number == 100
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 95


def test_a_call_is_found_by_its_name_and_place_in_whatever_order_threads_make_it(
    server: ForkServer, tmp_path: Path
) -> None:
    args = {"root": str(tmp_path), "threads": 4, "writes": 50}
    outcome = server.run(
        f"{HERE}:write_from_threads", args, mode="error", where=r"^pwrite64 /[3] $", n=50
    )
    assert outcome.at is not None
    assert (outcome.at.name, outcome.at.path) == ("pwrite64", str(tmp_path / "3"))
    assert len([c for c in outcome.calls if c.path == outcome.at.path]) == 51
    assert [call.verdict for call in outcome.calls].count("fail") == 1


def test_every_call_is_hit_once_in_whatever_order_threads_make_them(
    server: ForkServer, fresh: Callable[[int], dict[str, str]]
) -> None:
    def places(run: int) -> dict[str, Any]:
        return {**fresh(run), "threads": 3, "writes": 4}

    hit: Counter[tuple[str, str]] = Counter()
    for run, args, outcome in server.each_call(f"{HERE}:write_from_threads", places):
        assert outcome.killed and outcome.at, (run, outcome.describe())
        hit[outcome.at.name, outcome.at.path.removeprefix(args["root"])] += 1
    assert hit == {
        **{("open64", f"/{thread}"): 1 for thread in range(3)},
        **{("pwrite64", f"/{thread}"): 4 for thread in range(3)},
    }


def test_renames_through_ctypes_are_counted(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(f"{HERE}:rename_through_ctypes", {"root": str(tmp_path)})
    assert outcome.result == 0, outcome.describe()
    assert names(outcome.calls) == ["mkdir", "renameat2", "renameat2"]
    assert outcome.calls[2].second_path == str(tmp_path / "c")


def test_async_scenarios_run(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(f"{HERE}:publish_async", {"root": str(tmp_path)})
    assert outcome.result == "published"
    assert names(outcome.calls) == PUBLISH_CALLS


def test_a_scenario_may_arm_after_its_setup(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(f"{HERE}:publish_after_setup", {"root": str(tmp_path)}, arm=False)
    assert (tmp_path / "before").exists()
    assert names(outcome.calls) == PUBLISH_CALLS


def test_a_run_that_hangs_reports_its_threads(server: ForkServer, tmp_path: Path) -> None:
    outcome = server.run(f"{HERE}:hang", {"root": str(tmp_path)}, timeout_s=0.2)
    assert outcome.timed_out
    assert "in hang" in outcome.error


def test_a_scenario_that_fails_by_itself_is_reported(
    server: ForkServer, fresh: Callable[[int], dict[str, str]]
) -> None:
    def occupied(n: int) -> dict[str, str]:
        args = fresh(n)
        Path(args["root"], "attempt").mkdir()
        return args

    with pytest.raises(RuntimeError, match="fails by itself"):
        list(server.each_call(f"{HERE}:publish", occupied, only=("fsync",)))


def test_one_run_needs_no_server(tmp_path: Path) -> None:
    outcome = run_scenario(f"{HERE}:publish", {"root": str(tmp_path)}, mode="kill", n=6)
    assert outcome.killed
    assert outcome.at is not None
    assert outcome.at.name == "rename"


def test_a_program_can_be_armed_from_its_start(tmp_path: Path) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    program = f"import os; os.mkdir({str(root)!r}); os.mkdir({str(root / 'x')!r})"
    environment = faults.environment(root, mode="kill", n=2, log=log)
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == -9
    assert [call.verdict for call in faults.read_log(log)] == ["go", "kill"]
    assert list(root.iterdir()) == []


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="install the package ziglang"):
        build_library(tmp_path, compilers=[("no-such-compiler",), (sys.executable, "-c", "1/0")])


@pytest.mark.long
def test_the_ziglang_package_builds_the_library(tmp_path: Path) -> None:
    assert build_library(tmp_path, compilers=faults.COMPILERS[-1:]).exists()
