"""Two processes that act together, of which one is killed or stopped before one of its calls.

`batch` is a scenario for `ForkServer`: it runs in a process without threads, and forks for every
point a process that forks the two, waits for them, and then forks two more: the restart.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from asyncckpt import DirectoryCoordinator, KeepLast, SaveOptions, blocking
from asyncckpt.coordinators import handshake
from asyncckpt.errors import AsyncCheckpointError, SaveOutcomeUnknownError
from tests.crash.faults import LoadedLibrary, read_log
from tests.crash.invariant import AGAIN, leftovers, look, prepare
from tests.crash.scenarios import (
    CHUNK_NBYTES,
    SCENARIOS,
    Scenario,
    left_in_process,
    marker,
    returned,
    same,
    state,
)

IMPORTS = ("numpy.ma", "uvloop", "tests.crash.pairs")
BATCH = "tests.crash.pairs:batch"

SILENCE_S = 1.0
OPTIONS = SaveOptions(
    chunk_nbytes=CHUNK_NBYTES, host_memory_nbytes=64 << 20, silence_s=SILENCE_S, arrival_s=1.5
)
PATIENT = SaveOptions(chunk_nbytes=CHUNK_NBYTES, host_memory_nbytes=64 << 20)

LIMIT_S = 20.0
"""A process that takes longer than this hangs."""

STOPPED_S = 2.0
"""How long a process is stopped; longer than it takes the other one to find out."""


def act(root: str, process: int, name: str) -> None:
    """Play the part of one process."""
    keep = KeepLast(1) if name == "retention" else None
    coordinator = DirectoryCoordinator(
        Path(root).parent / "keys", process_index=process, process_count=2
    )
    with blocking.Checkpointer(
        root, save_options=OPTIONS, keep=keep, coordinator=coordinator
    ) as ckpt:
        if name == "delete":
            ckpt.delete(1)
        else:
            step = 1 if name == "overwrite" else 2
            ckpt.save(step, state(2), overwrite=name == "overwrite")
        marker(root, "acted")


PAIRS: dict[str, Scenario] = {
    "new": SCENARIOS["new"],
    "overwrite": SCENARIOS["overwrite"],
    "retention": Scenario(lambda _: None, ({1: 1}, {1: 1, 2: 2}, {2: 2}), {"acted": 1}, again=3),
    "delete": SCENARIOS["delete"],
}
"""What may be listed, from before to after."""


def batch(root: str, name: str, victim: int, mode: str, points: list[int], width: int) -> Any:
    """Visit the points, `width` of them at a time; return what was found at each."""
    faulthandler.cancel_dump_traceback_later()  # its thread would be missing after a fork
    top = Path(root)
    template = top / "before"
    _wait(_fork(lambda: prepare(PAIRS[name], template), top / "prepared.json"))
    results: dict[int, Any] = {}
    running: dict[int, int] = {}
    waiting = list(points)
    while waiting or running:
        while waiting and len(running) < width:
            point = waiting.pop(0)
            place = top / str(point)
            place.mkdir()
            shutil.copytree(template, place / "root")

            def visit(place: Path = place, point: int = point) -> Any:
                return _visit(place, name, victim, mode, point)

            running[point] = _fork(visit, place / "visit.json")
        done = next(iter(running))
        _wait(running.pop(done), 4 * LIMIT_S)
        results[done] = _report(top / str(done) / "visit.json")
        shutil.rmtree(top / str(done))
    return [results[point] for point in points]


def _visit(place: Path, name: str, victim: int, mode: str, point: int) -> Any:
    """Return where the victim was hit, how both ended, and everything that is wrong afterwards."""
    root, log = place / "root", place / "log"
    log.write_text("")
    began = time.monotonic()
    pids = []
    for process in (0, 1):

        def part(process: int = process) -> Any:
            return _part(root, process, name, (mode, point, log) if process == victim else None)

        pids.append(_fork(part, place / f"{process}.json"))
    if mode == "stop":
        _let_go_on(pids[victim])
    hung = [process for process in (0, 1) if not _wait(pids[process])]
    took_s = time.monotonic() - began
    calls = read_log(log)
    at = next((call for call in calls if call.verdict not in ("go",)), None)
    reports = [_report(place / f"{process}.json") for process in (0, 1)]
    wrong = [f"process {process} hangs: {reports[process]}" for process in hung]
    killed = mode == "kill" and at is not None
    for process, report in enumerate(reports):
        if not (killed and process == victim):
            wrong += _wrong_end(process, report, victim if killed else None)
    ended = ["acted"] if "acted" in returned(calls) else []
    if any(r and not r["failure"] and not r["trace"] for r in reports):
        ended = ["acted"]
    pids = []
    for process in (0, 1):

        def restart(process: int = process) -> Any:
            return _restart(root, process, name)

        pids.append(_fork(restart, place / f"restart-{process}.json"))
    wrong += [f"process {p} hangs after the restart" for p in (0, 1) if not _wait(pids[p])]
    wrong += [f"{path} is left after the restart" for path in leftovers(root)]
    for process in (0, 1):
        found = _report(place / f"restart-{process}.json") or {"wrong": [], "trace": "no report"}
        texts = [*found.get("wrong", ()), *filter(None, [found["trace"]])]
        wrong += [f"after the restart, process {process}: {text}" for text in texts]
        if process == 0:
            wrong += _wrong_outcome(PAIRS[name], name, found.get("found"), ended, reports)
    return {
        "at": str(at) if at else "",
        "calls": len(calls),
        "took_s": took_s,
        "reports": reports,
        "wrong": wrong,
    }


def _part(root: Path, process: int, name: str, fault: tuple[str, int, Path] | None) -> Any:
    """Return how a process ended."""
    handshake.ANSWER_S = 1.0
    if fault is not None:
        mode, point, log = fault
        loaded = LoadedLibrary()
        request = {"prefix": str(root.parent), "mode": mode, "n": point, "errno": 0, "only": ()}
        loaded.configure({**request, "persistent": False}, os.open(log, os.O_WRONLY | os.O_APPEND))
        loaded.arm()
    failure = None
    try:
        act(str(root), process, name)
    except AsyncCheckpointError as error:
        failure = {
            "type": type(error).__name__,
            "text": str(error),
            "unknown": isinstance(error, SaveOutcomeUnknownError),
        }
    finally:
        if fault is not None:
            loaded.disarm()
    # The thread of a coordinator that the caller has made is the caller's.
    left = [name for name in left_in_process(str(root)) if not name.endswith("-coordinator")]
    return {"failure": failure, "left": left, "trace": ""}


def _wrong_end(process: int, report: Any, victim: int | None) -> list[str]:
    """Say what is wrong with how a process ended that was not killed."""
    if report is None:
        return [f"process {process} ended without a report"]
    if report["trace"]:
        return [f"process {process}: {report['trace']}"]
    wrong = [f"process {process} leaves {path}" for path in report["left"]]
    failure = report["failure"]
    if failure and victim is not None and f"process {victim}" not in failure["text"]:
        wrong.append(f"process {process} does not say who died: {failure['text']}")
    return wrong


def _wrong_outcome(
    scenario: Scenario, name: str, found: Any, ended: list[str], reports: list[Any]
) -> list[str]:
    """Say what is listed that should not be, given what the processes were told."""
    listed = {int(step): version for step, version in (found or {}).items()}
    failures = [r["failure"] for r in reports if r and r.get("failure")]
    possible = scenario.states
    if ended:
        # Retention comes after the save, which the other process does not wait for.
        possible = possible[1:]
    elif name != "delete" and any(not failure["unknown"] for failure in failures):
        possible = possible[:1]
    wrong = []
    if listed not in possible:
        wrong.append(f"listed is {listed}, possible are {possible}")
    if ended and any(not failure["unknown"] for failure in failures):
        wrong.append(f"one process has succeeded, the other says: {failures}")
    return wrong


def _restart(root: Path, process: int, name: str) -> Any:
    """Sweep, restore and save as one of two new processes; return what is wrong."""
    scenario = PAIRS[name]
    found, wrong = None, []
    if process == 0:
        found, wrong = look(
            blocking.Checkpointer(root, save_options=OPTIONS, coordinator="single"), scenario.rows
        )
    coordinator = DirectoryCoordinator(root.parent / "keys", process_index=process, process_count=2)
    with blocking.Checkpointer(root, save_options=PATIENT, coordinator=coordinator) as ckpt:
        if found is not None and ckpt.steps() != sorted(found):
            wrong.append(f"listed after a sweep is {ckpt.steps()} instead of {found}")
        latest = ckpt.latest_step()
        tree = ckpt.restore()
        if not same(tree, state(tree["version"])):
            wrong.append(f"step {latest} restores to other values than were saved")
        ckpt.save(scenario.again, state(AGAIN), overwrite=True)
        if not same(ckpt.restore(scenario.again), state(AGAIN)):
            wrong.append(f"step {scenario.again} saved again restores to other values")
    return {"found": found, "wrong": wrong, "trace": ""}


# ------------------------------------------------------------------------------------ processes


def _fork(function: Callable[[], Any], report: Path) -> int:
    """Return the id of a forked process that leaves what the function returns in a file."""
    pid = os.fork()
    if pid == 0:
        _perform(function, report)
    return pid


def _perform(function: Callable[[], Any], path: Path) -> NoReturn:
    result: Any = None
    try:
        with path.with_suffix(".hang").open("w") as hang:
            faulthandler.register(signal.SIGUSR1, file=hang, all_threads=True)
            try:
                result = function()
            except BaseException:
                result = {"trace": traceback.format_exc(), "failure": None, "left": []}
            path.write_text(json.dumps(result))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _report(path: Path) -> Any:
    """Return what a forked process has left; what its threads did where it hung."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(path.read_text())
    hang = path.with_suffix(".hang")
    text = hang.read_text() if hang.exists() else ""
    return {"trace": text, "failure": None, "left": []} if text else None


def _wait(pid: int, limit_s: float = LIMIT_S) -> bool:
    """Return whether the process ended in time; it is killed otherwise."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(limit_s * 1000))
    os.close(pidfd)
    if not ended:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return ended


def _let_go_on(pid: int) -> None:
    """Continue the process some time after it was stopped, if it is."""
    what = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if what is not None and what.si_code == os.CLD_STOPPED:
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)
