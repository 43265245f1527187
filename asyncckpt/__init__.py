"""Async-first checkpoints for JAX, PyTorch and NumPy training state.

``await save(location, tree)`` and ``tree = await restore(location)`` handle one checkpoint; a
`Checkpointer` handles those of a training run and saves in the background; `asyncckpt.blocking`
has the same names for ordinary loops; `asyncckpt.torch` has the storage plug-ins for
`torch.distributed.checkpoint`. Importing this package imports no framework.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import AsyncCheckpointError as AsyncCheckpointError
from asyncckpt.errors import CheckpointExistsError as CheckpointExistsError
from asyncckpt.errors import CheckpointNotFoundError as CheckpointNotFoundError
from asyncckpt.errors import ClosedError as ClosedError
from asyncckpt.errors import CorruptCheckpointError as CorruptCheckpointError
from asyncckpt.errors import DeadlineExceededError as DeadlineExceededError
from asyncckpt.errors import DtypeMismatchError as DtypeMismatchError
from asyncckpt.errors import EngineDiedError as EngineDiedError
from asyncckpt.errors import FencedError as FencedError
from asyncckpt.errors import MismatchError as MismatchError
from asyncckpt.errors import ResourceError as ResourceError
from asyncckpt.errors import RestoreError as RestoreError
from asyncckpt.errors import RestoreWarning as RestoreWarning
from asyncckpt.errors import SaveAbortedError as SaveAbortedError
from asyncckpt.errors import SaveError as SaveError
from asyncckpt.errors import SaveOutcomeUnknownError as SaveOutcomeUnknownError
from asyncckpt.errors import ShapeMismatchError as ShapeMismatchError
from asyncckpt.errors import StagingError as StagingError
from asyncckpt.errors import StoreError as StoreError
from asyncckpt.errors import TreeMismatchError as TreeMismatchError
from asyncckpt.errors import UnsupportedFormatError as UnsupportedFormatError
from asyncckpt.errors import UnsupportedLeafError as UnsupportedLeafError
from asyncckpt.errors import UsageError as UsageError
from asyncckpt.reports import CheckpointInfo as CheckpointInfo
from asyncckpt.reports import ConvertReport as ConvertReport
from asyncckpt.reports import Damage as Damage
from asyncckpt.reports import DiffReport as DiffReport
from asyncckpt.reports import FileInfo as FileInfo
from asyncckpt.reports import LeafDifference as LeafDifference
from asyncckpt.reports import LeafInfo as LeafInfo
from asyncckpt.reports import ProcessPart as ProcessPart
from asyncckpt.reports import Progress as Progress
from asyncckpt.reports import ProgressBar as ProgressBar
from asyncckpt.reports import ReadItem as ReadItem
from asyncckpt.reports import ReadRange as ReadRange
from asyncckpt.reports import RestoreReport as RestoreReport
from asyncckpt.reports import SaveReport as SaveReport
from asyncckpt.reports import Span as Span
from asyncckpt.reports import Timeline as Timeline
from asyncckpt.reports import VerifyReport as VerifyReport
from asyncckpt.reports import progress_bar as progress_bar
from asyncckpt.retention import KeepBest as KeepBest
from asyncckpt.retention import KeepEvery as KeepEvery
from asyncckpt.retention import KeepLast as KeepLast
from asyncckpt.retention import Retention as Retention
from asyncckpt.version import VERSION as __version__

logging.getLogger("asyncckpt").addHandler(logging.NullHandler())

_LATER = {
    "ShardedArray": "adapters.sharded_array",
    "Checkpointer": "checkpointer",
    "DirectoryCoordinator": "coordinators.directory",
    "PendingSave": "session.pending",
    "collect_garbage": "session.gc",
    "convert": "convert.convert",
    "diff": "convert.diff",
    "export": "convert.convert",
    "inspect": "checkpointer",
    "restore": "checkpointer",
    "restore_into": "checkpointer",
    "save": "checkpointer",
    "tune": "tune.measure",
    "verify": "checkpointer",
    "LeafOptions": "options",
    "RestoreOptions": "options",
    "SaveOptions": "options",
    "TunePoint": "tune.recommend",
    "TuneReport": "tune.recommend",
    "ArraySpec": "spec",
    "PerProcess": "tree.per_process",
}
"""Modules of the names that are imported at first use, because they import NumPy and more."""

_imported = {name: getattr(value, "__module__", "") for name, value in list(globals().items())}
# Not `torch`: `from asyncckpt import *` must work without PyTorch.
__all__ = [name for name, module in _imported.items() if module.startswith("asyncckpt.")]
__all__ += [*_LATER, "__version__", "blocking"]

if TYPE_CHECKING:
    import asyncckpt.blocking as blocking
    from asyncckpt import torch as torch  # not in `__all__`, see above
    from asyncckpt.adapters.sharded_array import ShardedArray as ShardedArray
    from asyncckpt.checkpointer import Checkpointer as Checkpointer
    from asyncckpt.checkpointer import inspect as inspect
    from asyncckpt.checkpointer import restore as restore
    from asyncckpt.checkpointer import restore_into as restore_into
    from asyncckpt.checkpointer import save as save
    from asyncckpt.checkpointer import verify as verify
    from asyncckpt.convert.convert import convert as convert
    from asyncckpt.convert.convert import export as export
    from asyncckpt.convert.diff import diff as diff
    from asyncckpt.coordinators.directory import DirectoryCoordinator as DirectoryCoordinator
    from asyncckpt.options import LeafOptions as LeafOptions
    from asyncckpt.options import RestoreOptions as RestoreOptions
    from asyncckpt.options import SaveOptions as SaveOptions
    from asyncckpt.session.gc import collect_garbage as collect_garbage
    from asyncckpt.session.pending import PendingSave as PendingSave
    from asyncckpt.spec import ArraySpec as ArraySpec
    from asyncckpt.tree.per_process import PerProcess as PerProcess
    from asyncckpt.tune.measure import tune as tune
    from asyncckpt.tune.recommend import TunePoint as TunePoint
    from asyncckpt.tune.recommend import TuneReport as TuneReport


def __getattr__(name: str) -> Any:
    if name in ("blocking", "torch"):
        return importlib.import_module(f"asyncckpt.{name}")
    if name in _LATER:
        value = getattr(importlib.import_module(f"asyncckpt.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'asyncckpt' has no attribute {name!r}")


class _Package(ModuleType):
    """Module type that keeps public functions apart from folders of the same name.

    Importing `asyncckpt.save.pipeline` makes the import system set the attribute `save` of this
    package to the folder. That assignment is dropped, so that `asyncckpt.save` is always the
    function; `from asyncckpt.save.pipeline import ...` works as usual.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LATER and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
