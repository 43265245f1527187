"""What the crash tests do to a root: small saves and deletions, in a process that may be killed.

A version is a number from which a tree is made; a state is the version of every step that is
listed. `marker` leaves a line in the log of calls, which tells that a save had returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # here, so that no forked process imports it

import asyncckpt
from asyncckpt import KeepLast, SaveOptions, blocking
from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.stores.local import posix, publish
from tests.crash import controls
from tests.crash.faults import Call

State = Mapping[int, int]

IMPORTS = ("asyncckpt.checkpointer", "numpy.ma", "uvloop", "zstandard", "tests.crash.scenarios")
ACT = "tests.crash.scenarios:act"

# Chunks of which the state has several, and a file that is long enough for direct writes.
CHUNK_NBYTES = 64 << 10
OPTIONS = SaveOptions(chunk_nbytes=CHUNK_NBYTES, host_memory_nbytes=64 << 20)
ZSTD = SaveOptions(
    chunk_nbytes=CHUNK_NBYTES, host_memory_nbytes=64 << 20, compression="zstd", private=True
)
ROW_NBYTES = 1024


def state(version: int, *, rows: int = 160) -> dict[str, Any]:
    """A tree with leaves of every way to be stored; `params/w` has `rows` KiB."""
    random = np.random.default_rng(version)
    return {
        "params": {
            "w": random.standard_normal((rows, ROW_NBYTES // 4)).astype(np.float32),  # chunks
            "m": random.standard_normal((20, 20)).astype(np.float32),  # packed
            "v": random.standard_normal((20, 20)).astype(np.float32),
            "scale": random.standard_normal(5).astype(np.float32),  # inline
            "empty": np.zeros((0, 3), np.int32),
        },
        "opt": [random.integers(0, 1000, 700).astype(np.int16), np.float64(version)],
        "version": version,
        "lr": 0.1 * version,
        "name": f"run {version}",
        "done": False,
        "none": None,
    }


expected = functools.cache(state)
"""The same tree for everything that is restored to compare with; what is saved is made anew."""


def same(one: Any, two: Any) -> bool:
    """Whether two trees have the same containers, types, dtypes, shapes and bits."""
    if isinstance(one, (np.ndarray, np.generic)):
        return (
            isinstance(two, (np.ndarray, np.generic))
            and (one.dtype, one.shape) == (two.dtype, two.shape)
            and one.tobytes() == two.tobytes()
        )
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def marker(root: str, label: str) -> None:
    """The log of calls has a line from which `returned` reads the label."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(root, f"returned-{label}"))


def returned(calls: tuple[Call, ...]) -> list[str]:
    """The labels whose marker was reached; also the one before which the process was killed."""
    names = (os.path.basename(call.path) for call in calls if call.name == "unlink")
    return [name.removeprefix("returned-") for name in names if name.startswith("returned-")]


def new(root: str, options: SaveOptions = OPTIONS) -> None:
    with blocking.Checkpointer(root, save_options=options) as ckpt:
        ckpt.save(2, state(2))
        marker(root, "2")


def zstd(root: str) -> None:
    new(root, ZSTD)


def overwrite(root: str) -> None:
    with blocking.Checkpointer(root, save_options=OPTIONS) as ckpt:
        ckpt.save(1, state(2), overwrite=True)
        marker(root, "1")


def overwrite_in_two_steps(root: str) -> None:
    """As on a file system where two directories cannot change places in one step."""

    def unsupported(source: str, target: str) -> None:
        raise posix.UnsupportedCallError("renameat2")

    publish.rename_noreplace = unsupported
    publish.rename_exchange = unsupported
    overwrite(root)


def retention(root: str) -> None:
    with blocking.Checkpointer(root, save_options=OPTIONS, keep=KeepLast(2)) as ckpt:
        ckpt.save(3, state(3))
        marker(root, "3")


def delete(root: str) -> None:
    with blocking.Checkpointer(root, save_options=OPTIONS) as ckpt:
        ckpt.delete(1)
        marker(root, "delete")


def nested(root: str) -> None:
    """A save for itself, below directories that it makes."""
    blocking.save(os.path.join(root, "a", "b", "2"), state(2), options=OPTIONS)
    marker(root, "2")


def background(root: str) -> None:
    async def main() -> None:
        async with asyncckpt.Checkpointer(root, save_options=OPTIONS) as ckpt:
            first = await ckpt.start_save(2, state(2))
            await ckpt.start_save(3, state(3))
            await first
            marker(root, "2")
        marker(root, "3")

    asyncio.run(main())


def large(root: str) -> None:
    """Several windows of the staging memory in several data files."""
    options = SaveOptions(
        chunk_nbytes=3 << 20, target_data_file_nbytes=8 << 20, host_memory_nbytes=64 << 20
    )
    with blocking.Checkpointer(root, save_options=options) as ckpt:
        ckpt.save(2, state(2, rows=LARGE_ROWS))
        marker(root, "2")


LARGE_ROWS = 20 << 10


@dataclass(frozen=True, slots=True)
class Scenario:
    """One operation, and what may be listed after it was interrupted.

    Attributes:
        run: the operation.
        states: what may be listed, from the state before to the state after, in order.
        floor: by label of a marker, the first of `states` that is possible once it was reached.
        after_error: what may be listed when it raised, `states[0]` if empty.
        again: the step that is saved again afterwards.
        below: path of the steps' directory below the root.
        between: what may be listed before a sweep besides `states`.
        rows: size of the trees that are saved.
    """

    run: Callable[[str], None]
    states: tuple[State, ...]
    floor: Mapping[str, int]
    after_error: tuple[State, ...] = ()
    again: int = 2
    below: str = ""
    between: tuple[State, ...] = ()
    rows: int = 160

    @property
    def before(self) -> State:
        """The state before."""
        return self.states[0]

    def steps(self, root: Path) -> Path:
        """The directory of the steps."""
        return root / self.below

    def possible(self, labels: list[str]) -> tuple[State, ...]:
        """What may be listed once these markers were reached."""
        return self.states[max((self.floor[label] for label in labels), default=0) :]


DELETED: tuple[State, ...] = ({1: 1, 2: 2}, {2: 2})

SCENARIOS: dict[str, Scenario] = {
    "new": Scenario(new, ({1: 1}, {1: 1, 2: 2}), {"2": 1}),
    "overwrite": Scenario(overwrite, ({1: 1}, {1: 2}), {"1": 1}, again=1),
    "retention": Scenario(
        retention, ({1: 1, 2: 2}, {1: 1, 2: 2, 3: 3}, {2: 2, 3: 3}), {"3": 2}, again=3
    ),
    "delete": Scenario(delete, DELETED, {"delete": 1}, after_error=DELETED, again=1),
    "nested": Scenario(nested, ({}, {2: 2}), {"2": 1}, below="a/b"),
    "background": Scenario(
        background,
        ({1: 1}, {1: 1, 2: 2}, {1: 1, 2: 2, 3: 3}),
        {"2": 1, "3": 2},
        after_error=({1: 1}, {1: 1, 2: 2}, {1: 1, 3: 3}),
        again=3,
    ),
    "zstd": Scenario(zstd, ({1: 1}, {1: 1, 2: 2}), {"2": 1}),
    "overwrite_in_two_steps": Scenario(
        overwrite_in_two_steps, ({1: 1}, {1: 2}), {"1": 1}, again=1, between=({},)
    ),
    "large": Scenario(large, ({}, {2: 2}), {"2": 1}, rows=LARGE_ROWS),
}


def act(root: str, name: str, control: str = "") -> dict[str, Any]:
    """Carry a scenario out; returns what it raised, if anything, and what it left in the process.

    `control` names a function of `tests.crash.controls` that breaks a rule of the library first.
    """
    if control:
        getattr(controls, control)()
    failure: dict[str, Any] | None = None
    try:
        SCENARIOS[name].run(root)
    except BaseException as error:
        failure = {
            "ours": isinstance(error, AsyncCheckpointError),
            "type": type(error).__qualname__,
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
            "location": getattr(error, "location", None),
            "visible": getattr(error, "visible", False),
            "trace": traceback.format_exc(),
        }
    return {"failure": failure, "left": left_in_process(root)}


def left_in_process(root: str) -> list[str]:
    """Threads of the library and descriptors below the root that are still there."""
    left = [t.name for t in threading.enumerate() if t.name.startswith("asyncckpt")]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(os.path.realpath(root)):
                left.append(target)
    return left
