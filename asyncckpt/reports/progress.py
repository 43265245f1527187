"""Progress of work in flight, and a bar that shows it."""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from asyncckpt.errors import UsageError
from asyncckpt.reports.texts import nbytes_text

if TYPE_CHECKING:
    import rich.progress

INSTALL_LINE = 'pip install "asyncckpt[cli]"'

REFRESH_S = 0.1
"""Time between two updates of a bar: drawing takes a millisecond of the thread that saves."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of work under way, handed to `progress=` callbacks and shown by `PendingSave`.

    Attributes:
        stage: the stage that moves at present: plan, stage, upload, commit; fetch, place; verify;
            convert; diff.
        done_nbytes: bytes that have passed the last stage.
        total_nbytes: bytes in all.
    """

    stage: str
    done_nbytes: int
    total_nbytes: int

    @property
    def fraction(self) -> float:
        """From 0.0 to 1.0."""
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 1.0

    def __str__(self) -> str:
        return f"{self.stage} {self.fraction:.0%} of {nbytes_text(self.total_nbytes)}"


class ProgressBar:
    """A bar for `progress=`, made by `progress_bar`."""

    def __init__(self, description: str | None, *, always: bool, transient: bool) -> None:
        try:
            # All of it: not on the thread that saves, later.
            import rich.progress
        except ModuleNotFoundError:
            raise UsageError(f"progress_bar() needs the package rich: {INSTALL_LINE}") from None
        self._description = description
        self._transient = transient
        self._console = console = rich.console.Console(
            file=sys.stderr,
            force_terminal=True if always else None,
            markup=False,
            highlight=False,
            emoji=False,
        )
        self._wanted = console.is_terminal or console.is_jupyter
        self._shown: rich.progress.Progress | None = None
        self._drawn = 0.0
        self._ended = False
        self._stop: weakref.finalize[[], ProgressBar] | None = None

    def __call__(self, state: Progress) -> None:
        """Show how far the work has come, at most ten times a second."""
        ended = state.done_nbytes >= state.total_nbytes
        now = time.perf_counter()
        # Work that is at 100 % may call again.
        if not self._wanted or (self._ended if ended else now - self._drawn < REFRESH_S):
            return
        self._drawn, self._ended = now, ended
        shown = self._shown or self._begin(state.total_nbytes)
        name, done = self._description or state.stage, state.done_nbytes
        task = shown.task_ids[0]
        shown.update(task, description=name, completed=done, total=state.total_nbytes)
        if ended:
            self._end()
        else:
            shown.refresh()

    def _begin(self, total_nbytes: int) -> rich.progress.Progress:
        import rich.progress as bars

        # Drawn by the calls, so that there is no thread; and standard output stays as it is.
        shown = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            console=self._console,
            transient=self._transient,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        shown.add_task(self._description or "", total=total_nbytes)
        shown.start()
        self._shown = shown
        # A terminal gets its cursor back, also where nothing closes the bar of a failed save.
        self._stop = weakref.finalize(self, shown.stop)
        return shown

    def close(self) -> None:
        """End the bar where it is, for good. Idempotent."""
        self._wanted = False
        self._end()

    def _end(self) -> None:
        stop, self._shown, self._stop = self._stop, None, None
        if stop is not None:
            stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def progress_bar(
    description: str | None = None, *, always: bool = False, transient: bool = False
) -> ProgressBar:
    """Return a progress bar on standard error, for the argument `progress` of any function.

    It is shown in terminals and notebooks only. It closes itself at 100 %; where the work fails, it
    ends with the `with` block, `close()`, or when it is dropped. It is drawn ten times a second at
    most, on the thread that calls it, and an error of it does not fail the work. Use it for one
    piece of work at a time.

    Args:
        description: text before the bar; None for the stage that moves at present.
        always: show it where standard error is no terminal, too.
        transient: remove it when it ends.

    Raises:
        UsageError: rich is not installed.
    """
    return ProgressBar(description, always=always, transient=transient)
