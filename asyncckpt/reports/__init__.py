"""Reports that the public functions return, and texts for sizes and rates.

Not here: how the command line prints a report (`cli`).
"""

from asyncckpt.reports.contents import CheckpointInfo, FileInfo, LeafInfo
from asyncckpt.reports.findings import Damage, DiffReport, LeafDifference, VerifyReport
from asyncckpt.reports.outcomes import (
    ConvertReport,
    ProcessPart,
    ReadItem,
    ReadRange,
    RestoreReport,
    SaveReport,
)
from asyncckpt.reports.progress import Progress, ProgressBar, progress_bar
from asyncckpt.reports.texts import nbytes_text, rate_text
from asyncckpt.reports.timeline import Span, Timeline

__all__ = [
    "CheckpointInfo",
    "ConvertReport",
    "Damage",
    "DiffReport",
    "FileInfo",
    "LeafDifference",
    "LeafInfo",
    "ProcessPart",
    "Progress",
    "ProgressBar",
    "ReadItem",
    "ReadRange",
    "RestoreReport",
    "SaveReport",
    "Span",
    "Timeline",
    "VerifyReport",
    "nbytes_text",
    "progress_bar",
    "rate_text",
]
