"""Conversion: a checkpoint of any format becomes one of ours, or safetensors files.

::

    reading runtime                        writing runtime
    files ──► chunks, decoded, cached ──► boxes ──► windows ──► files ──► rename
"""

# Rule 1: whoever reads and whoever writes have their own threads and slots: a thread that writes
#   waits for one that reads, never for one of its own pool.
# Rule 2: everything that can be refused is refused before the first byte is written.

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncckpt.checkpointer.capture import Capture
from asyncckpt.checkpointer.core import STEP, checked_metadata, guarded, typed
from asyncckpt.checkpointer.layout import LayoutCache, layout_key, make_layout
from asyncckpt.checkpointer.origin import Origin, open_origin, shares
from asyncckpt.checkpointer.reader import LeafReader
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.checkpointer.safetensors_out import FilesWriter
from asyncckpt.checkpointer.safetensors_plan import FilesPlan, plan_files
from asyncckpt.checkpointer.saves import Save, SaveRequest, SaveState
from asyncckpt.checkpointer.stored import capture_stored
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DeadlineExceededError,
    SaveAbortedError,
    UnsupportedLeafError,
    UsageError,
)
from asyncckpt.flow.engine import Job
from asyncckpt.flow.shield import to_completion
from asyncckpt.format.safetensors import SUFFIX
from asyncckpt.options import GIB, INLINE_NBYTES, LeafOptions, SaveOptions
from asyncckpt.planning.pack import TRAILER_NBYTES
from asyncckpt.planning.tiles import band_nbytes, chunk_shape_for
from asyncckpt.reports import ConvertReport, Progress, SaveReport, nbytes_text
from asyncckpt.spec import ArraySpec
from asyncckpt.stores.local import LocalStore

Format = Literal["asyncckpt", "safetensors"]

SET_FILE_NBYTES = 5 * GIB
"""Size at which a set of safetensors files goes on in the next one: what hubs ask for."""

LARGEST_CHUNK_NBYTES = 1 * GIB
"""Chunks of a source are kept as they are up to this size, where others would cost more reads."""

_WHOLE_NBYTES = 8 << 20
"""Leaves up to this size fit into any cache: how their chunks lie does not matter."""

logger = logging.getLogger("asyncckpt")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a conversion writes, and what.

    Attributes:
        location: path or URL as given.
        format: ``asyncckpt`` or ``safetensors``.
        orbax: Orbax must be able to restore it.
        overwrite: replace what stands there.
        max_file_nbytes: size at which a set of safetensors files goes on in the next one.
    """

    location: str | os.PathLike[str]
    format: Format
    orbax: bool
    overwrite: bool
    max_file_nbytes: int | None


def destination_of(
    location: str | os.PathLike[str],
    to: str | None,
    *,
    orbax: bool,
    overwrite: bool,
    max_file_nbytes: int | None,
) -> Destination:
    """The destination that the arguments of a call mean.

    Raises:
        UsageError: they contradict each other.
    """
    is_file = str(os.fspath(location)).endswith(SUFFIX)
    if to not in (None, "asyncckpt", "safetensors"):
        raise UsageError(
            f'to={to!r}: pass "asyncckpt" or "safetensors"',
            expected=("asyncckpt", "safetensors"),
            found=to,
        )
    format: Format = (
        "safetensors" if to == "safetensors" or (is_file and to is None) else "asyncckpt"
    )
    if format == "asyncckpt" and (is_file or max_file_nbytes is not None):
        raise UsageError(
            f"{location}: {f'a name in {SUFFIX}' if is_file else 'max_file_nbytes'} is for "
            'safetensors files; pass to="safetensors", or leave it out'
        )
    if max_file_nbytes is not None:
        if isinstance(max_file_nbytes, bool) or not isinstance(max_file_nbytes, int):
            raise UsageError(f"max_file_nbytes={max_file_nbytes!r}: pass an int (bytes)")
        if max_file_nbytes < 1:
            raise UsageError(f"max_file_nbytes={max_file_nbytes}: pass a positive number of bytes")
        if is_file:
            raise UsageError(
                f"{location}: max_file_nbytes makes a set of files, which is a directory; pass a "
                f"destination that does not end in {SUFFIX}"
            )
    elif format == "safetensors" and not is_file:
        max_file_nbytes = SET_FILE_NBYTES
    return Destination(location, format, orbax, overwrite, max_file_nbytes)


def export_destination(
    location: str | os.PathLike[str], to: str, *, overwrite: bool
) -> Destination:
    """The destination of an export.

    Raises:
        UsageError: `to` is no format that is exported to.
    """
    if to != "orbax":
        raise UsageError(f'to={to!r}: pass "orbax"', expected="orbax", found=to)
    return destination_of(
        location, "asyncckpt", orbax=True, overwrite=overwrite, max_file_nbytes=None
    )


class Conversion:
    """One conversion: `submit` it, wait for the job, then close.

    Args:
        source: path of a checkpoint, of a file, or of the root of a run (its newest step).
        destination: where and what to write.
        metadata: added to that of the source.
        options: as for saving; `host_memory_nbytes` is for reading and writing together.
        storage_options: options of the file system for URLs.
        progress: called with a `Progress` as the conversion goes.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        destination: Destination,
        *,
        metadata: Mapping[str, Any] | None,
        options: SaveOptions | None,
        storage_options: Mapping[str, Any] | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source = source
        self._destination = destination
        self._metadata = checked_metadata(metadata)
        # Nobody mutates what is read from a checkpoint: there is nothing to hold or to wait for.
        self._options = dataclasses.replace(typed("options", options, SaveOptions), snapshot="copy")
        if destination.format == "safetensors" and self._options.compression is not None:
            raise UsageError(
                f"{destination.location}: safetensors files are not compressed; leave "
                "compression out"
            )
        self._storage_options = storage_options
        self._progress = guarded(progress)
        packing = self._options.compression is not None or self._options.leaf_options is not None
        reading, self._cache_nbytes, writing = shares(
            self._options.host_memory_nbytes, packing=packing
        )
        # A chunk and what it is packed into are held at once.
        self._largest_nbytes = writing // 2 if packing else LARGEST_CHUNK_NBYTES
        self._reading = Runtime("asyncckpt-read", host_memory_nbytes=reading)
        self._writing = Runtime("asyncckpt-write", host_memory_nbytes=writing)
        self._store, self._name = self._writing.one(
            destination.location,
            direct_io=self._options.direct_io,
            storage_options=storage_options,
        )

    def submit(self) -> Job[ConvertReport]:
        """The conversion is on its way."""
        return self._writing.engine.submit(self._run)

    async def aclose(self) -> None:
        """All files are closed and all threads have ended. Idempotent."""
        try:
            await self._writing.aclose()
        finally:
            await self._reading.aclose()

    def close(self) -> None:
        """As `aclose`, blocking."""
        try:
            self._writing.close()
        finally:
            self._reading.close()

    # -- on the writing engine

    async def _run(self) -> ConvertReport:
        begun = time.perf_counter()
        deadline_s = self._options.deadline_s
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                return await self._convert(begun)
        except (TimeoutError, SaveAbortedError):
            if not deadline.expired():
                raise
            raise DeadlineExceededError(
                f"{self._destination.location}: the conversion did not finish within {deadline_s} "
                "s and was aborted; nothing of it is left. Raise SaveOptions.deadline_s",
                location=os.fspath(self._destination.location),
            ) from None

    async def _convert(self, begun: float) -> ConvertReport:
        await self._refuse_existing()
        origin = await self._reading.engine.submit(
            lambda: open_origin(
                self._reading,
                self._source,
                storage_options=self._storage_options,
                cache_nbytes=self._cache_nbytes,
            )
        ).wait()
        await self._sweep()
        reader = origin.reader
        taken = await self._writing.engine.compute.run(capture_stored, reader)
        if self._destination.format == "safetensors":
            report = await self._to_files(origin, taken)
        else:
            report = await self._to_checkpoint(origin, taken)
        leaves = [leaf for leaf in taken.array_leaf if reader.unverified(leaf)]
        return dataclasses.replace(
            report,
            read_nbytes=reader.read_nbytes,
            total_s=time.perf_counter() - begun,
            unverified=tuple(taken.paths[leaf] for leaf in leaves),
            notes=(*report.notes, *self._notes(reader, len(leaves), len(taken.array_leaf))),
        )

    async def _refuse_existing(self) -> None:
        if self._destination.overwrite:
            return
        files = self._store.files(self._name)
        try:
            entries = await files.entries(max_entries=1 << 20)
        except CheckpointNotFoundError:
            return
        finally:
            await files.close()
        if entries:
            raise CheckpointExistsError(
                f"{files.location}: something stands here already; pass overwrite=True "
                "(--overwrite) to replace it, or choose another name",
                location=files.location,
            )

    async def _sweep(self) -> None:
        """What a conversion or save that died has left beside the destination is gone."""
        try:
            await self._store.sweep()
        except AsyncCheckpointError as error:
            logger.warning("%s could not be swept: %s", self._store.url, error)

    def _notes(self, reader: LeafReader, unverified: int, arrays: int) -> list[str]:
        notes = []
        opened = reader.opened
        if unverified:
            notes.append(
                f"{unverified} of {arrays} arrays have no checksum in this {opened.format} "
                "checkpoint and could not be verified"
            )
        large = max((storage.chunk_nbytes for storage in opened.storages), default=0)
        if large > self._cache_nbytes:
            notes.append(
                f"its largest chunk takes {nbytes_text(large)} and was decoded alone, beyond the "
                f"{nbytes_text(self._cache_nbytes)} kept for reading"
            )
        return notes

    # -- to a checkpoint of ours

    async def _to_checkpoint(self, origin: Origin, taken: Capture) -> ConvertReport:
        reader = origin.reader
        small = [leaf for leaf in taken.array_leaf if _is_inline(reader, leaf)]
        others = [leaf for leaf in taken.array_leaf if not _is_inline(reader, leaf)]
        # Inline values are staged first.
        reader.in_order([*small, *others])
        options = dataclasses.replace(
            self._options, leaf_options=self._leaf_options(reader, taken), deadline_s=None
        )
        layouts = LayoutCache()
        if self._destination.orbax:
            await self._check_orbax(origin, taken, options, layouts)
        step = int(self._name) if STEP.fullmatch(self._name) else None
        save = Save(
            self._writing,
            self._store,
            layouts,
            SaveRequest(
                name=self._name,
                step=origin.step if step is None else step,
                taken=taken,
                metadata={**origin.opened.metadata, **self._metadata},
                metrics=origin.opened.metrics,
                overwrite=self._destination.overwrite,
                options=options,
                progress=self._progress,
                stall_first=False,
            ),
            SaveState(),
            _nothing,
        )
        saved = await save.run(asyncio.Lock(), _kept)
        return self._report(
            origin,
            location=saved.location,
            step=step,
            leaf_count=saved.leaf_count,
            array_count=saved.array_count,
            nbytes=saved.nbytes,
            stored_nbytes=saved.stored_nbytes,
            file_count=saved.file_count,
            orbax=saved.orbax,
            notes=saved.notes,
        )

    async def _check_orbax(
        self, origin: Origin, taken: Capture, options: SaveOptions, layouts: LayoutCache
    ) -> None:
        budget = self._writing.budget.capacity * self._writing.pool.slot_nbytes
        layout = await self._writing.engine.compute.run(make_layout, taken, options, budget)
        if layout.orbax is None:
            raise UnsupportedLeafError(
                f"{origin.opened.location}: Orbax cannot restore this tree, so it was not "
                f"exported: {'; '.join(layout.notes)}. Convert it without --orbax, or save it "
                "again without that leaf",
                location=origin.opened.location,
                found=layout.notes,
            )
        layouts.keep(layout_key(taken, options, budget), layout)

    def _leaf_options(
        self, reader: LeafReader, taken: Capture
    ) -> Callable[[str, ArraySpec], LeafOptions | None] | None:
        """The user's options, and chunks like the source's where those would be read repeatedly."""
        own = self._options.leaf_options
        shapes: dict[str, tuple[int, ...]] = {}
        for leaf in taken.array_leaf:
            spec = reader.spec(leaf)
            assert spec is not None
            if _is_banded(reader, leaf, spec):
                shape = chunk_shape_for(
                    spec.shape,
                    reader.parts(leaf),
                    spec.itemsize,
                    target_nbytes=min(self._options.chunk_nbytes, self._largest_nbytes),
                    limit_nbytes=self._largest_nbytes,
                )
                if shape is not None:
                    shapes[taken.paths[leaf]] = shape
        if not shapes:
            return own

        def leaf_options(path: str, spec: ArraySpec) -> LeafOptions | None:
            chosen = None if own is None else own(path, spec)
            if path not in shapes:
                return chosen
            if not isinstance(chosen, LeafOptions):
                return LeafOptions(chunk_shape=shapes[path]) if chosen is None else chosen
            if chosen.chunk_shape is not None or chosen.chunk_nbytes is not None:
                return chosen
            return dataclasses.replace(chosen, chunk_shape=shapes[path])

        return leaf_options

    # -- to safetensors files

    async def _to_files(self, origin: Origin, taken: Capture) -> ConvertReport:
        destination, runtime, reader = self._destination, self._writing, origin.reader
        store = self._store
        if not isinstance(store, LocalStore):
            raise UsageError(f"{destination.location}: safetensors files are written to local disk")
        plan = await runtime.engine.compute.run(self._plan, origin, taken)
        reader.in_order([taken.array_leaf[tensor.number] for tensor in plan.tensors])
        attempt = await store.begin_export(
            self._name,
            uuid.uuid4().hex,
            overwrite=destination.overwrite,
            private=self._options.private,
        )
        total = sum(plan.file_nbytes)
        done = 0

        def written(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self._progress is not None:
                self._progress(Progress("convert", min(done, total), total))

        writer = FilesWriter(
            plan,
            taken,
            lambda number: reader.parts(taken.array_leaf[number]),
            attempt,
            runtime.pool,
            runtime.engine.compute,
            concurrency=runtime.concurrency(self._options.concurrency),
            written=written,
        )
        try:
            await writer.run()
        except BaseException as error:
            try:
                await to_completion(attempt.abort())
            except AsyncCheckpointError as failure:
                error.add_note(f"cleaning up failed too: {failure}")
            raise
        single = destination.max_file_nbytes is None
        await to_completion(attempt.publish_files(plan.names[0] if single else ""))
        index = 0 if plan.index is None else len(plan.index[1])
        return self._report(
            origin,
            location=attempt.location,
            step=None,
            leaf_count=len(taken.paths),
            array_count=len(plan.tensors),
            nbytes=sum(tensor.spec.nbytes for tensor in plan.tensors),
            stored_nbytes=total + index,
            file_count=len(plan.names) + bool(index),
        )

    def _plan(self, origin: Origin, taken: Capture) -> FilesPlan:
        specs: list[ArraySpec] = []
        banded: list[bool] = []
        for number, leaf in enumerate(taken.array_leaf):
            spec = taken.sources[number].spec
            banded.append(_is_banded(origin.reader, leaf, spec))
            first = taken.tied.get(number)
            specs.append(specs[first] if first is not None else self._stored(leaf, spec, taken))
        return plan_files(
            taken,
            specs,
            metadata={**origin.opened.metadata, **self._metadata},
            metrics=origin.opened.metrics,
            max_file_nbytes=self._destination.max_file_nbytes,
            tiled=banded,
            name=self._name,
        )

    def _stored(self, leaf: int, spec: ArraySpec, taken: Capture) -> ArraySpec:
        own = self._options.leaf_options
        chosen = None if own is None else own(taken.paths[leaf], spec)
        if chosen is not None and not isinstance(chosen, LeafOptions):
            raise UsageError(
                f"{taken.paths[leaf]}: leaf_options returned {chosen!r}; return a LeafOptions or "
                "None",
                path=taken.paths[leaf],
            )
        if chosen is None or chosen.dtype is None:
            return spec
        return ArraySpec(spec.shape, chosen.dtype)

    def _report(self, origin: Origin, **facts: Any) -> ConvertReport:
        return ConvertReport(
            source=origin.opened.location,
            source_format=origin.opened.format,
            format=self._destination.format,
            read_nbytes=0,
            total_s=0.0,
            **facts,
        )


def _is_inline(reader: LeafReader, leaf: int) -> bool:
    spec = reader.spec(leaf)
    return spec is not None and spec.nbytes + TRAILER_NBYTES <= INLINE_NBYTES


def _is_banded(reader: LeafReader, leaf: int, spec: ArraySpec) -> bool:
    """Whether reading the leaf in C order would hold more chunks open than can be kept."""
    if spec.nbytes <= _WHOLE_NBYTES:
        return False
    parts = reader.parts(leaf)
    # A single chunk, however large, is read once in either order.
    largest = max(grid.chunk_size for _, grid in parts) * spec.itemsize
    return band_nbytes(parts, spec.itemsize) > max(largest, reader.cache_nbytes // 2)


def _nothing() -> None:
    """Nobody waits for the state to be copied."""


async def _kept(report: SaveReport) -> SaveReport:
    """A conversion deletes no other step."""
    return report
