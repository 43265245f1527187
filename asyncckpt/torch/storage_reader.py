"""`StorageReader`: loads an asyncckpt checkpoint through DCP."""

# Rule 1: planners are called in the thread of `read_data`, once per item: all targets are resolved
#   before reading, and committed after every byte of the load has passed its checksums.
#   (test_nothing_is_committed_before_every_checksum_has_passed)
# Rule 2: `read_metadata` takes no keywords. If it did and failed on one rank, DCP would fall back
#   to per-rank metadata there, while the other ranks wait in a collective.
# Rule 3: payload is read from the same checkpoint as the metadata: save ids are compared.

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.torch import copy_into
from asyncckpt.arguments import Location, typed
from asyncckpt.checkpoint.open import open_any
from asyncckpt.errors import UsageError
from asyncckpt.flow.driver import run_blocking
from asyncckpt.options import RestoreOptions
from asyncckpt.restore.request import RestoreRequest, TargetLeaves
from asyncckpt.session.session import Session
from asyncckpt.torch.catalog import Catalog, catalog_of
from asyncckpt.torch.load import commit, resolve, targets
from asyncckpt.torch.located import Located


class StorageReader(Located, storage.StorageReader):
    """Reads an asyncckpt checkpoint for `torch.distributed.checkpoint.load`.

    Every rank reads the items of its plan directly into the tensors. The checkpoint may have been
    saved through DCP, with any planner and number of ranks, or by `asyncckpt.save`, even with JAX
    or NumPy; it then has the keys that DCP would give its tree.

    Args:
        path: directory or URL of the checkpoint; `checkpoint_id=` of DCP's functions replaces it.
        cast: convert dtypes, with an error for values out of range; otherwise, a different dtype is
            an error.
        options: options of the restore.
        storage_options: options of the file system for URLs.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        path: Location,
        *,
        cast: bool = False,
        options: RestoreOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path)
        self._cast = cast
        self._options = typed("options", options, RestoreOptions)
        self._storage_options = storage_options
        self._catalog: Catalog | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of `checkpoint_id` if it is given."""
        self._catalog = None
        super().reset(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Return keys, shapes, dtypes and saved shards.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            UnsupportedFormatError: another library wrote it, or DCP has no keys for its tree; says
                how to read it.
            CorruptCheckpointError: its metadata is damaged.
        """

        async def read() -> Catalog:
            files = session.root.store.files(session.root.name)
            try:
                return catalog_of(await open_any(files, session.runtime.engine.compute))
            finally:
                await files.close()

        with self._opened() as session:
            catalog = self._catalog = session.call(read).result()
        return catalog.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: ranks read independently."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read the items of the plan into the planner's tensors, then commit them.

        After an error, nothing has been committed, and the contents of the tensors are undefined.

        Raises:
            TreeMismatchError: an item is not in the checkpoint.
            ShapeMismatchError: a tensor does not have the shape of its item.
            DtypeMismatchError: a tensor does not have the saved dtype; see `cast`.
            CorruptCheckpointError: names key, file and offset.
        """
        catalog = self._catalog
        if catalog is None:
            raise UsageError("read_data() was called without read_metadata()")
        items = resolve(plan, planner, catalog)
        wanted, copies = targets(items)
        read: dict[str, Any] = {}
        if wanted:
            request = RestoreRequest(
                mode="into",
                wanted=TargetLeaves.of(wanted),
                framework=NumpyAdapter(),
                include=None,
                strict=False,  # a plan may cover a part of the checkpoint
                cast=self._cast,
                options=self._options,
                progress=None,
                save_id=catalog.save_id,
            )
            with self._opened() as session:
                session.processes.check_broadcast(self._options.broadcast)
                outcome = session.call(lambda: session.reads.restore(None, request)).result()
            read = {path: value for path, _, value in outcome.replaced}
            for source, target in copies:
                copy_into(target.tensor, source.tensor)
        commit(items, planner, read)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Session]:
        session = Session(
            self._location,
            one_shot=True,
            restore_options=self._options,
            storage_options=self._storage_options,
            coordinator="single",
        )
        try:
            yield session
        finally:
            run_blocking(session.aclose())
