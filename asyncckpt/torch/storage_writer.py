"""`StorageWriter`: saves an asyncckpt checkpoint through DCP."""

# Rule 1: plans carry no state of a save: with cached plans, ranks get plans of an earlier save,
#   possibly of another writer. (test_five_saves_with_cached_plans)
# Rule 2: DCP's metadata belong to its plan cache and are never changed.
# Rule 3: threads and connections start in `write_data`: before it, the writer may be pickled into
#   another process.

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.arguments import Location, check_switch, typed
from asyncckpt.coordinators.torch import TorchCoordinator, initialized_processes
from asyncckpt.errors import UsageError
from asyncckpt.log import logger
from asyncckpt.options import SaveOptions
from asyncckpt.torch.dcp_metadata import check_written, encode_layout
from asyncckpt.torch.items import resolve
from asyncckpt.torch.located import Located
from asyncckpt.torch.saving import Saving


# It stages `async_save`, as torch's own writer does: other stagers lose lazy `conj` and `neg` bits.
class StorageWriter(Located, storage.StorageWriter, BlockingAsyncStager):
    """Writes a checkpoint for `torch.distributed.checkpoint.save` and `async_save`.

    Works with any planner. `asyncckpt.restore` reads the checkpoint as a dict by the planner's
    keys. Replicas are not compared, because planners drop them. Values that are not tensors are
    stored natively, dicts of any class as dicts.

    Args:
        path: directory or URL of the checkpoint, as for `asyncckpt.save`; `checkpoint_id=` of
            DCP's functions replaces it.
        overwrite: replace a checkpoint of this name atomically.
        opaque: ``"allow"`` stores values that are not plain as the bytes of their pickle;
            ``"error"`` refuses them.
        options: options of the save; `tree` and `on_overlap` have no effect.
        storage_options: options of the file system for URLs.
        process_group: the group that DCP's functions get, if any.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        path: Location,
        *,
        overwrite: bool = False,
        opaque: Literal["error", "allow"] = "error",
        options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(path)
        BlockingAsyncStager.__init__(self)
        if opaque not in ("error", "allow"):
            raise UsageError(f'opaque={opaque!r}: pass "error" or "allow"', found=opaque)
        check_switch("overwrite", overwrite)
        self._overwrite = overwrite
        self._opaque = opaque == "allow"
        options = typed("options", options, SaveOptions)
        self._options = dataclasses.replace(options, tree="union")
        self._storage_options = storage_options
        self._group = process_group
        self._leads = self._alone = True
        self._saving: Saving | None = None
        self._dropped: weakref.finalize[Any, StorageWriter] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # In the process of `async_save`, the default group consists of the ranks that save.
        return {**self.__dict__, "_saving": None, "_dropped": None, "_group": None}

    def storage_meta(self) -> StorageMeta:
        """Return the storage metadata for planners."""
        return StorageMeta(checkpoint_id=self._location)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new checkpoint, at `checkpoint_id` if it is given."""
        self._abandon()
        super().reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank; abort an earlier one that was not finished.

        Raises:
            UsageError: the ranks that save cannot coordinate.
        """
        self._abandon()
        rank = kwargs.get("rank")
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: every rank would write its own checkpoint to the same "
                "path; leave it out, or save with no_dist=True and a path per rank",
                expected=True,
                found=False,
            )
        if is_coordinator and rank not in (None, 0):
            raise UsageError(
                f"coordinator_rank={rank}: rank 0 commits; leave coordinator_rank out",
                expected=0,
                found=rank,
            )
        self._leads = self._alone = is_coordinator
        own = initialized_processes(self._group)
        if not is_coordinator and (own is None or rank not in (None, own[0])):
            raise self._other_group(f"this is rank {rank} of the ranks that save", own)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the number of plans against the process group; return them unchanged.

        Raises:
            UsageError: the ranks that save are not those of the writer's group.
        """
        own = initialized_processes(self._group)
        if len(plans) > 1 and (own is None or own[1] != len(plans)):
            raise self._other_group(f"{len(plans)} ranks save", own)
        self._alone = self._leads and len(plans) == 1
        return plans

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's items; on return they are written, but not visible.

        Calls `resolve_data` once per item, in the calling thread.

        Raises:
            …: as `asyncckpt.save`, of any rank; nothing of the save is left.
        """
        saving = self._saving = Saving(
            self._location,
            options=self._options,
            storage_options=self._storage_options,
            coordinator="single" if self._alone else TorchCoordinator(self._group),
        )
        if self._dropped is not None:
            self._dropped.detach()
        self._dropped = weakref.finalize(self, saving.drop)
        self._dropped.atexit = False
        try:
            tree, results = resolve(plan, planner, opaque=self._opaque)
        except BaseException as error:
            saving.refuse(error)
            raise
        saving.write(tree, overwrite=self._overwrite)
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; on return the checkpoint is visible and durable.

        Raises:
            UsageError: the planner assigned an item to no rank or to several.
            …: as `asyncckpt.save`; nothing of the save is left.
        """
        saving = self._saving
        if saving is None:
            raise UsageError("finish() was called without write_data() on this writer")
        try:
            check_written(metadata, results)
            kept = encode_layout(metadata, results)
        except BaseException:
            self._abandon()
            raise
        self._saving = None
        for note in saving.commit(kept).notes:  # DCP's functions return no report
            logger.info("%s: %s", self._location, note)

    def _abandon(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if self._leads:
            saving.abandon()  # `finish` was not called
        else:
            saving.leave()

    def _other_group(self, found: str, own: tuple[int, int] | None) -> UsageError:
        return UsageError(
            f"{found}, but the writer's process group "
            f"{'has not been initialised' if own is None else f'says rank {own[0]} of {own[1]}'}; "
            "pass StorageWriter(..., process_group=...) the group that DCP's function gets",
            expected=own,
            found=found,
        )
