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

# How often a call that threads have moved out of the way is looked for once more.
TRIES_PER_CALL = 40

# What differs between two runs of one scenario: ids and tokens of attempts.
_ID = re.compile(r"[0-9a-f]{16,}")


@dataclass(frozen=True, slots=True)
class Call:
    """One counted call: what it was, and what became of it."""

    number: int
    verdict: str  # go, kill, fail, fail-after, short or stop
    name: str
    path: str
    second_path: str  # of rename and link, else empty

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
        arm: bool = True,
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> Outcome:
        """Run `scenario(**args)` in a fork of the server, with the fault `mode` at call `n`.

        Calls below `prefix` count (default: `args["root"]`), and of these the ones named in `only`
        (default: all). `persistent` makes every later call fail too. With `arm=False` the scenario
        says itself, with `armed()`, when calls count.

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

        The first runs have it at call 1, 2, … up to the last. Threads make the order and number of
        calls differ from run to run, so that this may step over one: the calls of the run that
        finished before its call n, which is not yielded, are then looked for until each was hit.
        `fresh(run)` makes a new directory and returns the arguments.

        Raises:
            RuntimeError: the scenario fails without any fault, or a call was never hit.
        """
        hit: set[tuple[str, ...]] = set()
        run = 0
        while True:
            run += 1
            args = fresh(run)
            outcome = self.run(scenario, args, mode=mode, n=run, **options)
            prefix = options.get("prefix") or args["root"]
            if outcome.at is None:
                break
            hit.add(_named(outcome.calls, prefix)[outcome.at])
            yield run, args, outcome
        if outcome.exit_status != 0:
            raise RuntimeError(f"{scenario} fails by itself:\n{outcome.describe()}")
        for wanted, name in _named(outcome.calls, prefix).items():
            number = wanted.number
            for _ in range(TRIES_PER_CALL):
                if name in hit or _changes_nothing(name):
                    break
                run += 1
                args = fresh(run)
                outcome = self.run(scenario, args, mode=mode, n=number, **options)
                if outcome.at is None:
                    number = wanted.number
                    continue
                names = _named(outcome.calls, options.get("prefix") or args["root"])
                hit.add(names[outcome.at])
                # It came earlier than thought, or is still to come.
                number = next((c.number for c, n in names.items() if n == name), number + 1)
                yield run, args, outcome
            else:
                raise RuntimeError(f"{scenario}: never hit {wanted}")


def _named(calls: Sequence[Call], prefix: str | Path) -> dict[Call, tuple[str, ...]]:
    """Names of calls that stay the same in every run: what, where, and for which time."""
    names: dict[Call, tuple[str, ...]] = {}
    times: Counter[tuple[str, ...]] = Counter()
    root = os.path.realpath(prefix)
    for call in calls:
        paths = (_ID.sub("id", p.removeprefix(root)) for p in (call.path, call.second_path))
        name = (call.name, *paths)
        times[name] += 1
        names[call] = (*name, str(times[name]))
    return names


def _changes_nothing(name: tuple[str, ...]) -> bool:
    """Whether this makes a directory that another thread has just made, or is a scenario's mark.

    What the library does in the background goes on around a mark: its number is another in every
    run, and a fault there is one of the scenario.
    """
    return (name[0].startswith("mkdir") and name[-1] != "1") or "/returned-" in name[1]


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
