"""Cases that run in several real processes of one job, all in one launch.

A module of cases has `CASES`, functions by name, which run in every process in this order, and
`join(index, count, address)`, which makes the process part of the job. What a case returns is JSON.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests import children

PROGRAM = "from tests.adapters.processes import serve; serve()"


class Results:
    """What the cases returned, by process."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self._answers = answers

    def __getitem__(self, name: str) -> list[Any]:
        """What a case returned in each process; it must have raised in none."""
        answers = [answer[name] for answer in self._answers]
        faults = [f"process {n}:\n{answer['fault']}" for n, answer in enumerate(answers)]
        assert not any(answer["fault"] for answer in answers), "\n".join(faults)
        return [answer["result"] for answer in answers]


def launch(module: str, count: int) -> Results:
    """Every process has run all cases of the module and ended by itself."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    processes = [
        children.start(PROGRAM, module, index, count, address, warnings="default")
        for index in range(count)
    ]
    ends = [children.finish(process) for process in processes]
    for index, (status, out, err) in enumerate(ends):
        assert status == 0, f"process {index} ended with status {status}\n{out}\n{err}"
    return Results([json.loads(out.splitlines()[-1]) for _, out, _ in ends])


def serve() -> None:
    """Run in each process: the cases that the command line names."""
    name, index, count, address = sys.argv[1:]
    module = importlib.import_module(name)
    module.join(int(index), int(count), address)
    answers = {key: _answer(case) for key, case in module.CASES.items()}
    print(json.dumps(answers), flush=True)


def _answer(case: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": case(), "fault": None}
    except Exception:
        return {"result": None, "fault": traceback.format_exc()}
