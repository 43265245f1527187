"""Progress of work in flight."""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.reports.texts import nbytes_text


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
