"""Reports that have a timeline, which can be written as a trace or drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from asyncckpt.reports.picture import draw
from asyncckpt.reports.timeline import Timeline
from asyncckpt.reports.trace import trace_document


class Timed:
    """A report with a `timeline`."""

    __slots__ = ()

    timeline: Timeline

    def marks(self) -> Mapping[str, float]:
        """Return the times that pictures mark, by what they mean: seconds from the call."""
        return {}

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as trace events, JSON that https://ui.perfetto.dev opens. Blocking."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace_document(self.timeline, str(self)), file)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw the timeline: a band for each stage, in it a line for each lane. Blocking.

        Takes about a second, most of which is the import of matplotlib.

        Args:
            path: the file, in .png or .svg; replaced if it exists.
            title: a line above the picture; None for what the report prints.

        Raises:
            UsageError: the suffix is another one, or matplotlib is not installed.
            OSError: the file cannot be written.
        """
        draw(self.timeline, path, str(self) if title is None else title, self.marks())
