"""One save: plan, then stage, serialize, upload and commit."""

# Rule 1: an existing checkpoint is reported before the caller goes on: on local disk before
#   anything is staged, on object stores, where looking takes a round trip, beside the staging.
# Rule 2: the attempt ends in exactly one of publish and abort, also across repeated cancellation.
# Rule 3: once `publish` has been called, its outcome is awaited and is the save's outcome.

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncckpt import __version__
from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.checkpointer.capture import Capture
from asyncckpt.checkpointer.layout import (
    PROCESS_COUNT,
    Layout,
    LayoutCache,
    layout_key,
    make_layout,
    mirror_sources,
)
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineExceededError,
    SaveAbortedError,
)
from asyncckpt.flow.shield import forget_frames, leading_error, to_completion
from asyncckpt.format.record import (
    ArrayTable,
    CommitRecord,
    FileEntry,
    IndexExtent,
    LeafTable,
    encode_record,
)
from asyncckpt.options import MAX_RECORD_NBYTES, SLOT_NBYTES, SaveOptions
from asyncckpt.ports import Attempt, CheckpointFiles, Sizes, Store
from asyncckpt.reports import Progress, SaveReport
from asyncckpt.stages.commit import MANIFEST, Index, encode_index, file_rows, put_all, put_index
from asyncckpt.stages.opened import RECORD, is_record
from asyncckpt.stages.saving import DataStages, Payload

DATABASE = "default"
"""Directory of the OCDBT database in a checkpoint: where Orbax's `CheckpointManager` looks."""

PLANNING_LEAVES = 200
"""Trees with more leaves than this are planned in a worker thread, not on the engine's loop."""

logger = logging.getLogger("asyncckpt")


@dataclass(slots=True, eq=False)
class SaveRequest:
    """What a caller wants saved, as taken in the caller's thread.

    Attributes:
        name: name of the checkpoint in its store.
        step: its step, None for one-shot saves.
        taken: the tree.
        stall_first: copying has priority, because the caller goes on when it is done.
        begun: `perf_counter` at the call.
    """

    name: str
    step: int | None
    taken: Capture
    metadata: Mapping[str, Any]
    metrics: Mapping[str, float]
    overwrite: bool
    options: SaveOptions
    progress: Callable[[Progress], None] | None
    stall_first: bool
    begun: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, eq=False)
class SaveState:
    """What can be seen of a save from outside while it runs."""

    stage: str = "plan"
    done_nbytes: int = 0
    total_nbytes: int = 0
    blocked_s: float = 0.0

    @property
    def progress(self) -> Progress:
        """A snapshot."""
        return Progress(self.stage, self.done_nbytes, self.total_nbytes)


async def exists(store: Store, name: str) -> bool:
    """Whether a valid checkpoint stands at the name."""
    files = store.files(name)
    try:
        return await record_of(files) is not None
    finally:
        await files.close()


async def record_of(files: CheckpointFiles) -> bytes | None:
    """The commit record of a valid checkpoint, None if there is none."""
    try:
        data = await files.read(RECORD, max_nbytes=MAX_RECORD_NBYTES)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None
    return data if is_record(data) else None


class Save:
    """One save on its way through the engine."""

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        layouts: LayoutCache,
        request: SaveRequest,
        state: SaveState,
        staged: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._layouts = layouts
        self._request = request
        self._state = state
        self._staged = staged
        self._save_id = uuid.uuid4().hex
        self._location = f"{store.url.rstrip('/')}/{request.name}"

    async def run(
        self,
        turn: asyncio.Lock,
        retain: Callable[[SaveReport], Coroutine[Any, Any, SaveReport]],
    ) -> SaveReport:
        """The checkpoint is committed and durable, and `retain` has seen to the older ones.

        Args:
            turn: held meanwhile; waiting for it counts against `deadline_s`.
            retain: called with the report of the committed save.

        Cancellation: aborts the attempt and cleans up, unless publication has begun.

        Raises:
            CheckpointExistsError: the name is taken; nothing of this save is left.
            DeadlineExceededError: `deadline_s` passed; nothing is left.
            SaveAbortedError: cancelled; nothing is left.
            SaveError, StoreError: names stage, leaf or file; nothing is left.
        """
        try:
            return await self._within_deadline(turn, retain)
        except BaseException as error:
            # Whoever keeps the error keeps no staging memory with it.
            forget_frames(error)
            raise

    async def _within_deadline(
        self,
        turn: asyncio.Lock,
        retain: Callable[[SaveReport], Coroutine[Any, Any, SaveReport]],
    ) -> SaveReport:
        request = self._request
        try:
            async with asyncio.timeout(request.options.deadline_s), turn:
                report = await self._run()
                # The checkpoint stands, whatever becomes of the older ones.
                return await to_completion(retain(report))
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._location}: the save did not finish within "
                f"{request.options.deadline_s} s (it was in {self._state.stage}, at "
                f"{self._state.progress.fraction:.0%}) and was aborted; earlier checkpoints are "
                "intact. Raise SaveOptions.deadline_s or save less",
                stage=self._state.stage,
                location=self._location,
            ) from None
        except asyncio.CancelledError:
            raise SaveAbortedError(
                f"{self._location}: the save was cancelled in {self._state.stage} and cleaned up; "
                "earlier checkpoints are intact",
                stage=self._state.stage,
                location=self._location,
            ) from None
        except BaseExceptionGroup as group:
            raise leading_error(group) from None

    async def _run(self) -> SaveReport:
        request, runtime = self._request, self._runtime
        if not request.overwrite and self._store.capabilities.positional_writes:
            await self._refuse_existing()
        sizes = self._sizes()
        layout, cached = await self._layout(sizes)
        plan = layout.plan
        packed = np.isin(plan.row_array, plan.compressed)
        self._state.total_nbytes = sum(plan.file_nbytes) + int(plan.row_payload[packed].sum())
        runtime.budget.peak = runtime.budget.in_use
        attempt = await self._store.begin(
            request.name,
            self._save_id,
            overwrite=request.overwrite,
            private=request.options.private,
        )
        try:
            data, (record, stored_nbytes, file_count) = await self._data(attempt, layout, sizes)
        except BaseException as error:
            # Shielded: a second cancellation must not leave half an attempt behind.
            try:
                await to_completion(attempt.abort())
            except AsyncCheckpointError as failure:
                error.add_note(f"cleaning up failed too: {failure}")
            raise
        self._state.stage = "commit"
        await to_completion(attempt.publish(record))
        self._state.done_nbytes = self._state.total_nbytes
        return SaveReport(
            location=self._location,
            step=request.step,
            save_id=self._save_id,
            leaf_count=len(request.taken.paths),
            array_count=len(plan.arrays.names) - len(plan.arrays.tied) - len(layout.mirrors),
            nbytes=array_nbytes(request.taken),
            stored_nbytes=stored_nbytes,
            file_count=file_count,
            blocked_s=self._state.blocked_s,
            total_s=time.perf_counter() - request.begun,
            stage_s=dict(data.clock.busy_s),
            plan_cached=cached,
            plan_cache_hits=self._layouts.hits,
            plan_cache_misses=self._layouts.misses,
            referenced_nbytes=data.referenced_nbytes,
            peak_staged_nbytes=runtime.budget.peak * SLOT_NBYTES,
            orbax=layout.orbax is not None,
            notes=layout.notes,
        )

    async def _refuse_existing(self) -> None:
        if await exists(self._store, self._request.name):
            raise CheckpointExistsError(
                f"{self._location}: a checkpoint stands here already; pass overwrite=True to "
                "replace it, or save another step",
                location=self._location,
            )

    def _sizes(self) -> Sizes:
        nbytes = array_nbytes(self._request.taken)
        return sizes_for(self._runtime, self._store, nbytes, self._request.options)

    async def _layout(self, sizes: Sizes) -> tuple[Layout, bool]:
        taken, options = self._request.taken, self._request.options
        budget = packing_nbytes(self._runtime, self._store)
        key = layout_key(taken, options, budget, sizes)
        layout = self._layouts.find(key)
        if layout is not None:
            return layout, True
        if len(taken.paths) > PLANNING_LEAVES or options.leaf_options is not None:
            layout = await self._runtime.engine.compute.run(
                make_layout, taken, options, budget, sizes
            )
        else:
            layout = make_layout(taken, options, budget, sizes)
        self._layouts.keep(key, layout)
        return layout, False

    async def _data(
        self, attempt: Attempt, layout: Layout, sizes: Sizes
    ) -> tuple[DataStages, tuple[bytes, int, int]]:
        request, runtime = self._request, self._runtime
        taken = request.taken
        mirrors, owners = mirror_sources(taken, layout.mirrors, NumpyAdapter())
        capabilities = self._store.capabilities
        copied = asyncio.Event()
        data = DataStages(
            layout.plan,
            [*taken.sources, *mirrors],
            [*taken.adapters, *owners],
            [*taken.array_paths, *(taken.paths[leaf] for leaf in layout.mirrors)],
            save_id=self._save_id,
            database=DATABASE,
            attempt=attempt,
            sizes=sizes,
            positional=capabilities.positional_writes,
            pool=runtime.pool,
            window_pool=runtime.window_pool(capabilities, sizes),
            compute=runtime.engine.compute,
            stall_first=request.stall_first,
            reference=request.options.snapshot == "reference",
            staged=copied.set,
            progress=self._progressed,
        )
        self._state.stage = "stage"
        orbax = {f"{DATABASE}/{path}": content for path, content in (layout.orbax or {}).items()}
        compatibility = file_rows(list(orbax.items()))
        indexed = itertools.count()

        async def index(payload: Payload) -> tuple[bytes, int, int]:
            return await self._index(attempt, layout, payload, compatibility, next(indexed))

        async def let_go() -> None:
            # What an attempt writes before its record, nobody else can see.
            if not request.overwrite and not capabilities.positional_writes:
                await self._refuse_existing()
            await copied.wait()
            self._all_staged()

        async with asyncio.TaskGroup() as group:
            group.create_task(let_go())
            group.create_task(put_all(attempt, orbax))
            record = await data.run(index)
        return data, record

    async def _index(
        self,
        attempt: Attempt,
        layout: Layout,
        payload: Payload,
        compatibility: list[tuple[str, int, int]],
        number: int,
    ) -> tuple[bytes, int, int]:
        """The index is durable; returns the record, the bytes of all files, and their number."""
        compute = self._runtime.engine.compute
        # Made again, it has another name: the first one may still be on its way.
        path = f"d/{self._save_id}-index" + (f"{number}" if number else "")
        now_ns = time.time_ns()
        index = await compute.run(
            encode_index,
            layout.catalog,
            layout.plan,
            payload,
            path=path,
            save_id=bytes.fromhex(self._save_id),
            now_ns=now_ns,
        )
        files = [
            *((f"{DATABASE}/{name}", nbytes, crc) for name, nbytes, crc in payload.files),
            (f"{DATABASE}/{path}", index.nbytes, index.crc),
            *file_rows([(f"{DATABASE}/{MANIFEST}", index.manifest)]),
            *compatibility,
        ]
        async with asyncio.TaskGroup() as group:
            group.create_task(
                put_index(attempt, index, database=DATABASE, path=path, compute=compute)
            )
            record = await compute.run(
                self._record, layout, index, files, len(payload.files), now_ns
            )
        stored_nbytes = sum(nbytes for _, nbytes, _ in files) + len(record)
        return record, stored_nbytes, len(files) + 1

    def _record(
        self,
        layout: Layout,
        index: Index,
        files: list[tuple[str, int, int]],
        index_file: int,
        now_ns: int,
    ) -> bytes:
        request = self._request
        taken, arrays = request.taken, layout.plan.arrays
        return encode_record(
            CommitRecord(
                save_id=self._save_id,
                step=request.step,
                epoch=0,
                writer=0,
                writers=PROCESS_COUNT,
                plan_digest=layout.plan.digest,
                created_ns=now_ns,
                library=f"asyncckpt {__version__}",
                tree=taken.structure.to_json(),
                leaves=LeafTable(taken.kinds, taken.values, taken.extra, layout.pieces),
                specs=layout.specs,
                arrays=ArrayTable(list(arrays.names), layout.spec_of, arrays.tied),
                files=tuple(FileEntry(*entry) for entry in files),
                chunk_index=IndexExtent(
                    index_file,
                    index.chunks_offset,
                    index.nbytes - index.chunks_offset,
                    index.chunks_crc,
                ),
                manifest=index.manifest,
                metadata=request.metadata,
                metrics=request.metrics,
                database=DATABASE,
            )
        )

    def _all_staged(self) -> None:
        self._state.blocked_s = time.perf_counter() - self._request.begun
        self._state.stage = "upload"
        self._staged()

    def _progressed(self, stage: str, nbytes: int) -> None:
        state = self._state
        state.done_nbytes = min(state.total_nbytes, state.done_nbytes + nbytes)
        if self._request.progress is not None:
            with contextlib.suppress(Exception):
                self._request.progress(state.progress)


def sizes_for(runtime: Runtime, store: Store, nbytes: int, options: SaveOptions) -> Sizes:
    """How a save of so many bytes goes to this store."""
    size, streams = options.target_data_file_nbytes, options.concurrency
    return store.sizes(
        nbytes,
        budget_nbytes=runtime.budget_nbytes,
        chunk_nbytes=options.chunk_nbytes,
        data_file_nbytes=None if size == "auto" else size,
        concurrency=None if streams == "auto" else streams,
    )


def packing_nbytes(runtime: Runtime, store: Store) -> int:
    """Budget for chunks that are compressed."""
    if store.capabilities.positional_writes:
        return runtime.budget_nbytes
    return runtime.budget_nbytes // 2  # the other half holds the files that they are packed into


def array_nbytes(taken: Capture) -> int:
    """Bytes of all arrays, shared ones once."""
    return int(
        np.sum(
            [s.spec.nbytes for n, s in enumerate(taken.sources) if n not in taken.tied],
            dtype=np.int64,
        )
    )
