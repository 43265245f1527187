"""Reports that the public functions return, and texts for counts, sizes and rates.

Not here: how the command line prints a report (`cli`).
"""

from asyncckpt.reports.contents import CheckpointInfo as CheckpointInfo
from asyncckpt.reports.contents import FileInfo as FileInfo
from asyncckpt.reports.contents import LeafInfo as LeafInfo
from asyncckpt.reports.findings import Damage as Damage
from asyncckpt.reports.findings import DiffReport as DiffReport
from asyncckpt.reports.findings import LeafDifference as LeafDifference
from asyncckpt.reports.findings import VerifyReport as VerifyReport
from asyncckpt.reports.outcomes import ConvertReport as ConvertReport
from asyncckpt.reports.outcomes import ProcessPart as ProcessPart
from asyncckpt.reports.outcomes import ReadItem as ReadItem
from asyncckpt.reports.outcomes import ReadRange as ReadRange
from asyncckpt.reports.outcomes import RestoreReport as RestoreReport
from asyncckpt.reports.outcomes import SaveReport as SaveReport
from asyncckpt.reports.progress import Progress as Progress
from asyncckpt.reports.progress import ProgressBar as ProgressBar
from asyncckpt.reports.progress import progress_bar as progress_bar
from asyncckpt.reports.texts import counted as counted
from asyncckpt.reports.texts import nbytes_text as nbytes_text
from asyncckpt.reports.texts import rate_text as rate_text
from asyncckpt.reports.timeline import Span as Span
from asyncckpt.reports.timeline import Timeline as Timeline
