"""Run a function with one of its mutating system calls going wrong, thousands of times a minute.

A `ForkServer` is a Python process that has imported everything and started no thread. For each run
it forks; the forked process arms the C library of `faultlib.c`, calls the scenario and ends. A
scenario is a function `module:name`, plain or async, that takes JSON values as keyword arguments
and returns a JSON value; objects that must not cross a fork are made inside it.

    def save_once(root: str) -> None: ...

    with ForkServer(imports=("numpy", "asyncckpt")) as server:
        for run, args, outcome in server.each_call("tests.crash.test_kill:save_once", fresh):
            assert outcome.killed, outcome.describe()
"""

from __future__ import annotations

import atexit
import ctypes
import errno as errnos
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

Mode = Literal["count", "kill", "error", "error_after", "short", "stop"]
MODES: tuple[Mode, ...] = get_args(Mode)  # in the order of faultlib.c

SOURCE = Path(__file__).with_name("faultlib.c")
REPOSITORY = Path(__file__).parents[2]
COMPILERS = (("cc",), ("gcc",), ("clang",), (sys.executable, "-m", "ziglang", "cc"))
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE")

# A run that takes longer than this hangs; its threads' tracebacks are in the outcome.
RUN_TIMEOUT_S = 60.0
# Room for the server to report a run that it had to end.
REPLY_MARGIN_S = 30.0

# How often a run is repeated that went another way, without the call that was to be hit.
TRIES_PER_CALL = 10

# What differs between two runs of one scenario: ids and tokens of attempts.
_ID = "[0-9a-f]{16,}"


def _escaped(text: str) -> str:
    """A POSIX extended regular expression of just this text."""
    return re.sub(r"[][{}()*+?.^$|\\]", r"\\\g<0>", text)


@dataclass(frozen=True, slots=True)
class Call:
    """One counted call: what it was, and what became of it."""

    number: int
    verdict: str  # go, kill, fail, fail-after, short or stop
    name: str
    path: str
    second_path: str  # of rename and link, else empty

    def pattern(self, prefix: str) -> str:
        """A regular expression of the same call in every run of its scenario; see `run`."""
        paths = (path.removeprefix(prefix) for path in (self.path, self.second_path))
        parts = re.split(_ID, " ".join((self.name, *paths)))
        return "^" + _ID.join(map(_escaped, parts)) + "$"

    def __str__(self) -> str:
        paths = " -> ".join(filter(None, (self.path, self.second_path)))
        return f"call {self.number}: {self.name} {paths} ({self.verdict})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    `exit_status` is 0 when the scenario returned, 1 when it raised, and minus the signal otherwise.
    """

    killed: bool
    exit_status: int
    timed_out: bool
    calls: tuple[Call, ...]
    result: Any
    error_type: str  # module.QualifiedName of what the scenario raised, or empty
    error: str  # its traceback, or the tracebacks of all threads of a run that hung

    @property
    def at(self) -> Call | None:
        """The first call that was interfered with; None when the run did not get there."""
        return next((call for call in self.calls if call.verdict != "go"), None)

    def describe(self) -> str:
        """Everything known about the run, for the message of a failing test."""
        lines = [f"exit status {self.exit_status}, fault at: {self.at}", *map(str, self.calls[-8:])]
        return "\n".join([*lines, self.error])


def build_library(directory: Path, compilers: Sequence[Sequence[str]] = COMPILERS) -> Path:
    """Compile `faultlib.c` into `directory` with the first compiler that works.

    Raises:
        RuntimeError: none of the compilers works; holds the output of each.
    """
    target = directory / "faultlib.so"
    environment = {
        **os.environ,
        "ZIG_GLOBAL_CACHE_DIR": str(directory / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(directory / "zig"),
    }
    failures = []
    for compiler in compilers:
        command = [*compiler, *FLAGS, "-o", str(target), str(SOURCE), "-ldl"]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
        except FileNotFoundError as error:
            failures.append(f"{compiler[0]}: {error}")
            continue
        if done.returncode == 0:
            return target
        failures.append(f"{' '.join(compiler)}: {done.stderr.strip()}")
    raise RuntimeError("no C compiler works; install the package ziglang\n" + "\n".join(failures))


@functools.cache
def library() -> Path:
    """The compiled library, built once per process into a directory removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-faults-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return build_library(directory)


def preloaded() -> dict[str, str]:
    """The environment of a process that has the library loaded and not armed."""
    return {**os.environ, "LD_PRELOAD": str(library())}


def environment(
    prefix: str | Path,
    *,
    mode: Mode = "count",
    n: int = 0,
    errno: int = errnos.EIO,
    persistent: bool = False,
    only: Sequence[str] = (),
    log: str | Path,
) -> dict[str, str]:
    """The environment of any program that is to run with the library armed from its start.

    `log` receives the calls; `read_log` reads them. Child processes inherit all of it.
    """
    return {
        **preloaded(),
        "ASYNCCKPT_FAULTS_PREFIX": os.path.realpath(prefix),
        "ASYNCCKPT_FAULTS_MODE": str(MODES.index(mode)),
        "ASYNCCKPT_FAULTS_N": str(n),
        "ASYNCCKPT_FAULTS_ERRNO": str(errno),
        "ASYNCCKPT_FAULTS_PERSISTENT": str(int(persistent)),
        "ASYNCCKPT_FAULTS_ONLY": ",".join(only),
        "ASYNCCKPT_FAULTS_LOG": str(log),
    }


def read_log(path: str | Path) -> tuple[Call, ...]:
    """The calls of a log in the order of their numbers."""
    calls = []
    for line in Path(path).read_text(errors="surrogateescape").split("\n")[:-1]:
        number, verdict, name, one, two = line.split("\t")
        calls.append(Call(int(number), verdict, name, one, two))
    return tuple(sorted(calls, key=lambda call: call.number))


class LoadedLibrary:
    """The preloaded library as seen from inside a process that runs a scenario."""

    def __init__(self) -> None:
        loaded = ctypes.CDLL(None)
        self._configure = loaded.faults_configure
        self._configure.argtypes = [
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_long,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_int,
        ]
        self._configure.restype = None
        self.arm = loaded.faults_arm
        self.disarm = loaded.faults_disarm

    def configure(self, request: Mapping[str, Any], log_fd: int) -> None:
        """The next run is the one of `request`; the count is 0 and nothing counts yet."""
        self._configure(
            os.fsencode(request["prefix"]),
            MODES.index(request["mode"]),
            request["n"],
            request["errno"],
            int(request["persistent"]),
            ",".join(request["only"]).encode(),
            os.fsencode(request["where"]),
            log_fd,
        )


@contextmanager
def armed() -> Iterator[None]:
    """Calls count inside the block; for scenarios run with `arm=False`, which set something up."""
    loaded = LoadedLibrary()
    loaded.arm()
    try:
        yield
    finally:
        loaded.disarm()


class ForkServer:
    """A process that forks once per run; everything in `imports` is imported before."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._imports = tuple(imports)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ForkServer:
        self._scratch = Path(tempfile.mkdtemp(prefix="asyncckpt-faults-run-"))
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.crash.server", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, str(self._scratch), *self._imports],
            env=preloaded(),
            cwd=REPOSITORY,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._socket = ours
        self._replies = ours.makefile("rb")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._replies.close()
        self._socket.close()  # the server ends at the end of its requests
        try:
            self._process.wait(REPLY_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def run(
        self,
        scenario: str,
        args: Mapping[str, Any],
        *,
        prefix: str | Path | None = None,
        mode: Mode = "count",
        n: int = 0,
        errno: int = errnos.EIO,
        persistent: bool = False,
        only: Sequence[str] = (),
        where: str = "",
        arm: bool = True,
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> Outcome:
        """Run `scenario(**args)` in a fork of the server, with the fault `mode` at call `n`.

        Calls below `prefix` count (default: `args["root"]`), and of these the ones named in `only`
        (default: all). With `where`, a POSIX extended regular expression, `n` counts only calls
        whose line "name path second-path" it matches, with paths below `prefix`. `persistent` makes
        every later call fail too. With `arm=False` the scenario says itself, with `armed()`, when
        calls count.

        Raises:
            RuntimeError: the server ended or did not answer.
        """
        directory = args["root"] if prefix is None else prefix
        request = {
            "scenario": scenario,
            "args": dict(args),
            "prefix": os.path.realpath(directory),
            "mode": mode,
            "n": n,
            "errno": errno,
            "persistent": persistent,
            "only": list(only),
            "where": where,
            "arm": arm,
            "timeout_s": timeout_s,
        }
        self._socket.settimeout(timeout_s + REPLY_MARGIN_S)
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._replies.readline()
        except OSError as error:
            raise RuntimeError(f"{scenario}: the fork server does not answer: {error}") from error
        if not line:
            raise RuntimeError(f"{scenario}: the fork server ended; its output says why")
        reply = json.loads(line)
        calls = read_log(self._scratch / "log")
        return Outcome(
            killed=reply["exit_status"] == -9 and any(call.verdict == "kill" for call in calls),
            exit_status=reply["exit_status"],
            timed_out=reply["timed_out"],
            calls=calls,
            result=reply["result"],
            error_type=reply["error_type"],
            error=reply["error"],
        )

    def each_call(
        self,
        scenario: str,
        fresh: Callable[[int], Mapping[str, Any]],
        *,
        mode: Mode = "kill",
        **options: Any,
    ) -> Iterator[tuple[int, Mapping[str, Any], Outcome]]:
        """Run with the fault at every call; yields the run's number, its arguments, the outcome.

        The run without a fault, number 0, is not yielded: its calls, in their order, are the ones
        of the others. Threads make that order differ from run to run, so that each is found by
        what it does and where. `fresh(run)` makes a new directory and returns the arguments.

        Raises:
            RuntimeError: the scenario fails without any fault, or the first call of its kind was
                never hit.
        """

        def once(run: int, **fault: Any) -> tuple[Mapping[str, Any], Outcome, str]:
            args = fresh(run)
            outcome = self.run(scenario, args, **options, **fault)
            return args, outcome, os.path.realpath(options.get("prefix") or args["root"])

        _, outcome, prefix = once(0)
        if outcome.exit_status != 0:
            raise RuntimeError(f"{scenario} fails by itself:\n{outcome.describe()}")
        run = 0
        times: Counter[str] = Counter()
        for call in outcome.calls:
            where = call.pattern(prefix)
            times[where] += 1
            if call.name.startswith("mkdir") and times[where] > 1:
                continue  # in this run, another thread had just made the same directory
            for _ in range(TRIES_PER_CALL):
                run += 1
                args, outcome, _ = once(run, mode=mode, where=where, n=times[where])
                if outcome.at is not None:
                    yield run, args, outcome
                    break
            else:
                if times[where] == 1:  # how often a process looks for another differs by run
                    raise RuntimeError(f"{scenario}: never hit {call}")


def run_scenario(
    scenario: str,
    args: Mapping[str, Any],
    *,
    mode: Mode = "count",
    n: int = 0,
    errno: int = errnos.EIO,
    **options: Any,
) -> Outcome:
    """One run in a process of its own; for many, keep a `ForkServer`."""
    with ForkServer() as server:
        return server.run(scenario, args, mode=mode, n=n, errno=errno, **options)
