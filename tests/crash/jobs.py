"""Several processes that act together, of which one is killed or stopped before one of its calls.

`batch` is a scenario for `ForkServer`: it runs in a process without threads that has imported and
computed what all need. For every visit it forks a process, which forks the job, waits for it, and
then forks another one: the restart, on as many processes or on half of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import re
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from asyncckpt import DirectoryCoordinator, KeepLast, SaveOptions, blocking
from asyncckpt.coordinators import handshake, key_values
from asyncckpt.errors import AsyncCheckpointError, SaveOutcomeUnknownError
from tests.crash.faults import LoadedLibrary, read_log
from tests.crash.invariant import AGAIN, leftovers, look, prepare
from tests.crash.scenarios import (
    CHUNK_NBYTES,
    SCENARIOS,
    Scenario,
    expected,
    left_in_process,
    marker,
    returned,
    same,
    state,
)

IMPORTS = ("numpy.ma", "uvloop", "tests.crash.jobs")
BATCH = "tests.crash.jobs:batch"

SILENCE_S = 1.5
OPTIONS = SaveOptions(
    chunk_nbytes=CHUNK_NBYTES, host_memory_nbytes=64 << 20, silence_s=SILENCE_S, arrival_s=2.0
)
PATIENT = SaveOptions(chunk_nbytes=CHUNK_NBYTES, host_memory_nbytes=64 << 20)

PAUSE_S = 0.1
"""Longest pause between two looks at a key: a hundred processes share the machine."""

LIMIT_S = 60.0
"""A process that takes longer than this hangs."""

STOPPED_S = 2.5
"""How long a process is stopped; longer than it takes the others to find out."""

OPERATIONS: dict[str, Scenario] = {
    "new": SCENARIOS["new"],
    "overwrite": SCENARIOS["overwrite"],
    "retention": Scenario(lambda _: None, ({1: 1}, {1: 1, 2: 2}, {2: 2}), {"acted": 1}, again=3),
    "delete": SCENARIOS["delete"],
}
"""What may be listed, from before to after."""

Fault = tuple[str, int, Path]
"""Mode and number of the call, and the file for the log of calls."""


class Visit(NamedTuple):
    """One call of one process that is killed or stopped there; 0 is no call.

    Attributes:
        name: of the operation.
        count: number of processes.
        victim: index of the process.
        mode: of the fault; `count` disturbs no process and counts the calls of all.
        point: number of the call.
    """

    name: str
    count: int
    victim: int
    mode: str
    point: int


def act(root: str, process: int, count: int, name: str) -> None:
    """Play the part of one process."""
    keep = KeepLast(1) if name == "retention" else None
    coordinator = DirectoryCoordinator(
        Path(root).parent / "keys", process_index=process, process_count=count
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


def batch(root: str, visits: list[Any], width: int) -> Any:
    """Make the visits, `width` of them at a time; return what was found at each."""
    faulthandler.cancel_dump_traceback_later()  # its thread would be missing after a fork
    handshake.ANSWER_S, handshake.SETTLE_S, key_values.LAST_PAUSE_S = 1.0, PAUSE_S, PAUSE_S
    top = Path(root)
    for name, scenario in OPERATIONS.items():
        # Not in a fork: tables that are computed once are then there for all.
        prepare(scenario, top / name)
    for version in (1, 2, AGAIN):
        expected(version, rows=SCENARIOS["new"].rows)
    gc.collect()
    gc.freeze()
    return visited(
        top, visits, width, lambda place, visit: _made(place, top / visit[0], Visit(*visit))
    )


def visited(
    top: Path, visits: Sequence[Any], width: int, make: Callable[[Path, Any], Any]
) -> list[Any]:
    """Make each visit in a forked process with a place of its own, `width` of them at a time.

    Return what `make` returned for each. A place is removed when its visit has ended.
    """
    results: list[Any] = [None] * len(visits)
    running: dict[int, tuple[int, int]] = {}
    ended = select.poll()

    def reap() -> None:
        for pidfd, _ in ended.poll():
            number, pid = running.pop(pidfd)
            ended.unregister(pidfd)
            os.close(pidfd)
            os.waitpid(pid, 0)
            results[number] = reported(top / f"{number}.json")
            shutil.rmtree(top / str(number), ignore_errors=True)

    for number, visit in enumerate(visits):
        if len(running) == width:
            reap()
        pid = forked(partial(make, top / str(number), visit), top / f"{number}.json")
        pidfd = os.pidfd_open(pid)
        ended.register(pidfd, select.POLLIN)
        running[pidfd] = number, pid
    while running:
        reap()
    return results


def _made(place: Path, before: Path, visit: Visit) -> Any:
    """Make a visit to a copy of `before`: return where it was, and what is wrong afterwards."""
    root = place / "root"
    place.mkdir()
    shutil.copytree(before, root)
    logs = [place / f"log-{process}" for process in range(visit.count)]
    pids = []
    began = time.monotonic()
    for process, log in enumerate(logs):
        log.write_text("")
        hit = visit.mode == "count" or process == visit.victim
        fault = (visit.mode, visit.point, log) if hit else None
        part = partial(_part, root, process, visit, fault)
        pids.append(forked(part, place / f"{process}.json"))
    if visit.mode == "stop":
        _let_go_on(pids[visit.victim])
    hung = [process for process, pid in enumerate(pids) if not waited(pid)]
    took_s = time.monotonic() - began
    calls = [read_log(log) for log in logs]
    at = next((call for call in calls[visit.victim] if call.verdict != "go"), None)
    reports = [reported(place / f"{process}.json") for process in range(visit.count)]
    wrong = [f"process {process} hangs: {reports[process]}" for process in hung]
    killed = visit.victim if visit.mode == "kill" and at is not None else None
    for process, report in enumerate(reports):
        if process != killed:
            wrong += _wrong_end(process, report, killed)
    acted = "acted" in returned(calls[visit.victim]) or any(
        r and not r["failure"] and not r["trace"] for r in reports
    )
    began = time.monotonic()
    wrong += _restarted(place, visit, acted, reports)
    return {
        "visit": visit,
        "at": str(at) if at else "",
        "calls": [len(each) for each in calls],
        "took_s": took_s,
        "again_s": time.monotonic() - began,
        "wrong": wrong,
        "reports": reports if wrong else [],
    }


def _restarted(place: Path, visit: Visit, acted: bool, reports: list[Any]) -> list[str]:
    """Start the job once more, on as many processes or on half of them; return what is wrong."""
    root = place / "root"
    count = visit.count // (1 + visit.point % 2)
    pids = [
        forked(partial(_restart, root, process, count, visit.name), place / f"again-{process}.json")
        for process in range(count)
    ]
    wrong = [
        f"process {p} hangs after the restart" for p, pid in enumerate(pids) if not waited(pid)
    ]
    wrong += [f"{path} is left after the restart" for path in leftovers(root)]
    for process in range(count):
        found = reported(place / f"again-{process}.json") or {"wrong": [], "trace": "no report"}
        texts = [*found.get("wrong", ()), *filter(None, [found["trace"]])]
        wrong += [f"after the restart, process {process}: {text}" for text in texts]
        if process == 0:
            wrong += _wrong_outcome(visit.name, found.get("found"), acted, reports)
    return wrong


def _part(root: Path, process: int, visit: Visit, fault: Fault | None) -> Any:
    """Return how a process ended."""
    if fault is not None:
        mode, point, log = fault
        loaded = LoadedLibrary()
        request = {"prefix": str(root.parent), "mode": mode, "n": point, "errno": 0}
        every: dict[str, Any] = {"persistent": False, "only": (), "where": ""}
        loaded.configure({**request, **every}, os.open(log, os.O_WRONLY | os.O_APPEND))
        loaded.arm()
    failure = None
    try:
        act(str(root), process, visit.count, visit.name)
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
    names = rf"process(es [\d, ]*)? ?\b{victim}\b"
    if failure and victim is not None and not re.search(names, failure["text"]):
        wrong.append(f"process {process} does not say who died: {failure['text']}")
    return wrong


def _wrong_outcome(name: str, found: Any, acted: bool, reports: list[Any]) -> list[str]:
    """Say what is listed that should not be, given what the processes were told."""
    listed = {int(step): version for step, version in (found or {}).items()}
    failures = [r["failure"] for r in reports if r and r.get("failure")]
    possible = OPERATIONS[name].states
    if acted:
        # Retention comes after the save, which the other processes do not wait for.
        possible = possible[1:]
    elif name != "delete" and any(not failure["unknown"] for failure in failures):
        possible = possible[:1]
    wrong = []
    if listed not in possible:
        wrong.append(f"listed is {listed}, possible are {possible}")
    if acted and any(not failure["unknown"] for failure in failures):
        wrong.append(f"one process has succeeded, another says: {failures}")
    return wrong


def _restart(root: Path, process: int, count: int, name: str) -> Any:
    """Sweep, restore and save as one of some new processes; return what is wrong."""
    scenario = OPERATIONS[name]
    found, wrong = None, []
    if process == 0:
        found, wrong = look(
            blocking.Checkpointer(root, save_options=OPTIONS, coordinator="single"), scenario.rows
        )
    coordinator: Any = "single"
    if count > 1:
        coordinator = DirectoryCoordinator(
            root.parent / "keys", process_index=process, process_count=count
        )
    with blocking.Checkpointer(root, save_options=PATIENT, coordinator=coordinator) as ckpt:
        if found is not None and ckpt.steps() != sorted(found):
            wrong.append(f"listed after a sweep is {ckpt.steps()} instead of {found}")
        latest = ckpt.latest_step()
        tree = ckpt.restore()
        if not same(tree, expected(tree["version"], rows=scenario.rows)):
            wrong.append(f"step {latest} restores to other values than were saved")
        ckpt.save(scenario.again, state(AGAIN), overwrite=True)
        if not same(ckpt.restore(scenario.again), expected(AGAIN, rows=scenario.rows)):
            wrong.append(f"step {scenario.again} saved again restores to other values")
    return {"found": found, "wrong": wrong, "trace": ""}


# ------------------------------------------------------------------------------------ processes


def forked(function: Callable[[], Any], report: Path) -> int:
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


def reported(path: Path) -> Any:
    """Return what a forked process has left; what its threads did where it hung."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(path.read_text())
    hang = path.with_suffix(".hang")
    text = hang.read_text() if hang.exists() else ""
    return {"trace": text, "failure": None, "left": []} if text else None


def waited(pid: int, limit_s: float = LIMIT_S) -> bool:
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
