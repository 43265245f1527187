"""Cases that run in several real processes of one job, all in one launch.

A module of cases has `CASES`, functions by name, which run in every process in this order, and
`join(index, count, address)`, which makes the process part of the job. What a case returns is JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncckpt.planning.tiling import tiling_fault
from asyncckpt.spec import Box
from tests import children
from tests.ports import free_port
from tests.processes.pool import server_of

PROGRAM = "tests.adapters.processes"


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


def launch(kind: str, module: str, count: int) -> Results:
    """Every process, of `jax` or `torch`, has run all cases of the module and ended by itself."""
    address = f"localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        outs, errs = (
            [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
            for _ in range(2)
        )
        processes = [
            server_of(kind, index).start(
                PROGRAM, module, str(index), str(count), address, stdout=out, stderr=err
            )
            for index, (out, err) in enumerate(zip(outs, errs, strict=True))
        ]
        try:
            statuses = [process.wait(children.TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for file in (*outs, *errs):
            file.seek(0)
        printed = [out.read() for out in outs]
        for index, (status, out, err) in enumerate(zip(statuses, printed, errs, strict=True)):
            assert status == 0, f"process {index} ended with status {status}\n{out}\n{err.read()}"
    return Results([json.loads(out.splitlines()[-1]) for out in printed])


def check_whole(found: Sequence[Mapping[str, Any]]) -> None:
    """The shards of all processes tile the array along its cuts, and name their holders.

    Each has the `shape`, `partition` and `shards` of a source in one of the processes.
    """
    one = found[0]
    assert all(answer["partition"] == one["partition"] for answer in found)
    assert all(answer["shape"] == one["shape"] for answer in found)
    held: dict[Box, list[int]] = {}
    stated: dict[Box, list[int]] = {}
    for process, answer in enumerate(found):
        for offset, shape, holders in answer["shards"]:
            box = Box(tuple(offset), tuple(shape))
            held.setdefault(box, []).append(process)
            assert stated.setdefault(box, holders) == holders
    assert held == stated
    assert tiling_fault(Box.whole(tuple(one["shape"])), list(held)) is None
    cuts, _, processes = one["partition"]
    assert {process for holders in held.values() for process in holders} <= set(processes)
    for axis, (cut, length) in enumerate(zip(cuts, one["shape"], strict=True)):
        if held:
            starts = sorted({box.offset[axis] for box in held})
            assert starts == ([0, *cut] if isinstance(cut, list) else [*range(0, length, cut)])


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


if __name__ == "__main__":
    serve()
