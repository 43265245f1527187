"""Progress of work in flight, and a bar that shows it."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from asyncckpt.errors import UsageError
from asyncckpt.pickled import PickledByName
from asyncckpt.reports.texts import nbytes_text

if TYPE_CHECKING:
    import rich.progress

INSTALL_LINE = 'pip install "asyncckpt[cli]"'

REFRESH_S = 0.1
"""Minimum seconds between updates of a bar: drawing costs the saving thread a millisecond."""


@dataclass(frozen=True, slots=True)
class Progress(PickledByName):
    """Progress of an operation, passed to `progress=` callbacks and shown by `PendingSave`.

    Attributes:
        stage: the current stage: plan, stage, upload, commit; fetch; verify; convert; diff; tune.
        done_nbytes: bytes that have completed the last stage.
        total_nbytes: total bytes.
    """

    stage: str
    done_nbytes: int
    total_nbytes: int

    @property
    def fraction(self) -> float:
        """Share of the bytes that are done, from 0.0 to 1.0."""
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 1.0

    def __str__(self) -> str:
        return f"{self.stage} {self.fraction:.0%} of {nbytes_text(self.total_nbytes)}"


class ProgressBar:
    """A bar for `progress=`, made by `progress_bar`."""

    def __init__(self, description: str | None, *, always: bool, transient: bool) -> None:
        try:
            import rich.progress as bars
            from rich.console import Console
        except ModuleNotFoundError:
            raise UsageError(f"progress_bar() needs the package rich: {INSTALL_LINE}") from None
        console = Console(file=sys.stderr, force_terminal=True if always else None)
        self._description = description
        # If standard error is closed, rich takes standard output instead.
        self._wanted = sys.stderr is not None and (console.is_terminal or console.is_jupyter)
        self._drawn = 0.0
        self._ended = False
        # Callers draw the bar, so it needs no thread; standard output is not redirected.
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            console=console,
            transient=transient,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(description or "", total=None)
        # Restores the terminal's cursor even if the bar of a failed save is never closed.
        weakref.finalize(self, _stop, self._bar)

    def __call__(self, state: Progress) -> None:
        """Show the progress, at most ten times a second."""
        ended = state.done_nbytes >= state.total_nbytes
        now = time.perf_counter()
        # The operation may call again at 100 %.
        if not self._wanted or (self._ended if ended else now - self._drawn < REFRESH_S):
            return
        if self._ended:
            self._bar.reset(self._task)  # another operation begins
        self._drawn, self._ended = now, ended
        name, done = self._description or state.stage, state.done_nbytes
        self._bar.update(self._task, description=name, completed=done, total=state.total_nbytes)
        self._bar.start()  # idempotent
        self._bar.refresh()
        if ended:
            self._bar.live.stop()

    def close(self) -> None:
        """End the bar. Idempotent."""
        self._wanted = False
        _stop(self._bar)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop(bar: rich.progress.Progress) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        bar.live.stop()


def progress_bar(
    description: str | None = None, *, always: bool = False, transient: bool = False
) -> ProgressBar:
    """Return a progress bar on standard error, for the `progress` argument of any function.

    It appears only in terminals and notebooks. It closes at 100 %; after a failure, at the end of
    the `with` block, on `close()`, or when it is garbage-collected. The calling thread draws it, at
    most ten times a second, and its errors do not fail the operation. Use it for one operation at a
    time.

    Args:
        description: text before the bar; None for the current stage.
        always: show the bar even if standard error is not a terminal, but not if it is closed.
        transient: remove the bar when it ends.

    Raises:
        UsageError: rich is not installed.
    """
    return ProgressBar(description, always=always, transient=transient)
