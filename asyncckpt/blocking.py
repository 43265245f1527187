"""The facade for ordinary loops: the names of `asyncckpt`, without `await`.

Importing this module derives every function and method from the async facade: a call runs the
coroutine of the same name, which hands its work to the engine, and blocks the calling thread while
the coroutine waits. It may be used inside a running event loop (a notebook), which it blocks like
any other synchronous call.

Cancellation in a docstring means Ctrl-C here: it aborts the call's work, waits for its clean-up
and raises `KeyboardInterrupt`; a second Ctrl-C abandons the clean-up. Other exceptions of signal
handlers, such as a timeout by `signal.alarm`, do the same. Awaiting a `PendingSave` means
`PendingSave.result` here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from asyncckpt import checkpointer as _async
from asyncckpt.convert import convert as _convert
from asyncckpt.convert import diff as _diff
from asyncckpt.flow.driver import run_blocking
from asyncckpt.session import gc as _gc
from asyncckpt.session.pending import PendingSave
from asyncckpt.tune import measure as _tune

__all__ = [
    "Checkpointer",
    "PendingSave",
    "collect_garbage",
    "convert",
    "diff",
    "export",
    "inspect",
    "restore",
    "restore_into",
    "save",
    "tune",
    "verify",
]

P = ParamSpec("P")
R = TypeVar("R")

# Type checkers follow the ParamSpec through the derivation: signatures, overloads and docstrings
# of these names are those of the async ones, in editors too.


def _blocking(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """Derive the blocking twin of an async function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_blocking(function(*args, **kwargs))

    call.__module__ = __name__
    return call


def _method(
    function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Derive the blocking twin of an async method; `self` is of another class."""
    return _blocking(function)


class Checkpointer(_async.OpenRun):
    """The checkpoints of one training run; `asyncckpt.Checkpointer` for callers without a loop.

    Arguments, results and errors of all methods are those of `asyncckpt.Checkpointer`. Leaving a
    `with` block waits for saves in flight and raises their errors; without a block, `close` does.
    """

    def __repr__(self) -> str:
        return f"blocking.{super().__repr__()}"

    def __enter__(self) -> Self:
        run_blocking(self._enter())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run_blocking(self._leave(error))

    save = _method(_async.Checkpointer.save)
    start_save = _method(_async.Checkpointer.start_save)
    reached = _method(_async.Checkpointer.reached)
    restore = _method(_async.Checkpointer.restore)
    restore_into = _method(_async.Checkpointer.restore_into)
    prepare = _method(_async.Checkpointer.prepare)
    steps = _method(_async.Checkpointer.steps)
    latest_step = _method(_async.Checkpointer.latest_step)
    inspect = _method(_async.Checkpointer.inspect)
    verify = _method(_async.Checkpointer.verify)
    delete = _method(_async.Checkpointer.delete)
    delete_after = _method(_async.Checkpointer.delete_after)
    wait = _method(_async.Checkpointer.wait)
    close = _method(_async.Checkpointer.close)


save = _blocking(_async.save)
restore = _blocking(_async.restore)
restore_into = _blocking(_async.restore_into)
inspect = _blocking(_async.inspect)
verify = _blocking(_async.verify)
convert = _blocking(_convert.convert)
export = _blocking(_convert.export)
diff = _blocking(_diff.diff)
collect_garbage = _blocking(_gc.collect_garbage)
tune = _blocking(_tune.tune)
