"""The process behind `faults.ForkServer`: `python -m tests.crash.server FD SCRATCH MODULE...`.

It reads one request per line from the socket FD, forks, waits for the forked process and answers
with one line. SCRATCH holds the log of calls and the result of the run in progress.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import inspect
import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

from tests.crash.faults import LoadedLibrary

# The forked process has so much longer than its limit to report its tracebacks and end by itself.
KILL_MARGIN_S = 10.0


def perform(request: dict[str, Any], scratch: Path) -> NoReturn:
    """In the forked process: arm, call the scenario, leave the result in `scratch`, end."""
    status = 1
    report = {"result": None, "error_type": "", "error": ""}
    with (scratch / "hang").open("w") as hang:
        faulthandler.dump_traceback_later(request["timeout_s"], exit=True, file=hang)
        log_fd = os.open(scratch / "log", os.O_WRONLY | os.O_APPEND)
        loaded = LoadedLibrary()
        loaded.configure(request, log_fd)
        try:
            module, name = request["scenario"].split(":")
            scenario = getattr(sys.modules[module], name)
            if request["arm"]:
                loaded.arm()
            if inspect.iscoroutinefunction(scenario):
                report["result"] = asyncio.run(scenario(**request["args"]))
            else:
                report["result"] = scenario(**request["args"])
            status = 0
        except BaseException as error:
            report["error_type"] = f"{type(error).__module__}.{type(error).__qualname__}"
            report["error"] = traceback.format_exc()
        finally:
            loaded.disarm()
            (scratch / "report").write_text(json.dumps(report))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def wait_for(pid: int, timeout_s: float) -> tuple[int, bool]:
    """The exit code of `pid` as `subprocess` states it, and whether it had to be killed."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(timeout_s * 1000))
    os.close(pidfd)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), not ended


def answer(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """What became of one run."""
    importlib.import_module(request["scenario"].split(":")[0])
    for name in ("log", "report", "hang"):
        (scratch / name).write_text("")
    pid = os.fork()
    if pid == 0:
        perform(request, scratch)
    status, timed_out = wait_for(pid, request["timeout_s"] + KILL_MARGIN_S)
    text = (scratch / "report").read_text()
    hang = (scratch / "hang").read_text()
    report = json.loads(text) if text else {"result": None, "error_type": "", "error": hang}
    return {**report, "exit_status": status, "timed_out": timed_out or bool(hang)}


def main() -> None:
    """Serve requests until there are no more."""
    descriptor, scratch, *imports = sys.argv[1:]
    # Forking is what this process is for, and it has no threads of its own that matter.
    warnings.filterwarnings("ignore", message=r".*os\.fork\(\)|.*use of fork\(\)")
    for name in imports:
        importlib.import_module(name)
    # Without this, every fork copies the pages that hold the reference counts of the collector.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile("rwb") as stream:
        connection.set_inheritable(False)
        for line in stream:
            stream.write(json.dumps(answer(json.loads(line), Path(scratch))).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
