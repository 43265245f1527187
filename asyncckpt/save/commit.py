"""Commit: the index of everything written, and the record that makes the checkpoint exist."""

# Rule 1: the record is published last; before it, the checkpoint does not exist.
# Rule 2: everything that depends only on the plan (keys, templates, Orbax's files) is made once per
#   plan and written during the uploads; only the index waits for the last checksum.
# Rule 3: an index that is written again gets another name: a late request for the first one could
#   otherwise replace its successor in an object store.

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter

import numpy as np

from asyncckpt.flow.threads import Workers
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.manifest import MANIFEST_NAME
from asyncckpt.format.record import encode_record
from asyncckpt.format.record_values import CommitRecord, FixedName, IndexExtent, LeafTable
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import KIB
from asyncckpt.planning.table import Column
from asyncckpt.ports import Attempt, AttemptFiles
from asyncckpt.reports import FileInfo, ProcessPart, Timeline
from asyncckpt.save.index import Index, Payload, encode_index
from asyncckpt.save.plan_cache import Layout
from asyncckpt.save.snapshot import SaveRequest
from asyncckpt.version import VERSION

DATABASE = "default"
"""Directory of the OCDBT database in a checkpoint: where Orbax's `CheckpointManager` looks."""

INDEX_IN_RECORD_NBYTES = 24 * KIB
"""Largest chunk index that the record repeats, which saves a restore one round trip: 1,000 chunks,
16 GiB. Reading the record still takes one request (1 MiB)."""

Opened = Callable[[], Awaitable[AttemptFiles]]
"""Returns the attempt of a save, once it is open."""


@dataclass(frozen=True, slots=True, eq=False)
class Committable:
    """A save whose files are all durable.

    Attributes:
        record: its commit record; on processes other than 0, the path of their entries.
        stored_nbytes: bytes of all files, the record included.
        file_count: number of files, the record included.
        parts: part of each process, for the report; none if one process saves alone.
        timelines: the known timelines of other processes.
    """

    record: bytes
    stored_nbytes: int
    file_count: int
    parts: tuple[ProcessPart, ...] = ()
    timelines: Sequence[Timeline] = ()


@dataclass(eq=False, repr=False)
class Commit:
    """Orbax's files, index and record of one save: everything except its data.

    Attributes:
        opened: returns the attempt, once it is open; not called if another process commits.
        save_id: identity of the save, 32 hex digits.
        epoch: the claim under which the processes save.
        writers: number of processes that save together.
        after_data: with positional writes, `put_index` is called only once the data are durable, so
            that consent is asked for after this process has written its part.
        checked: rows whose checksums are compared with those of replicas in other processes.
    """

    opened: Callable[[], Awaitable[Attempt]]
    layout: Layout
    request: SaveRequest
    _: KW_ONLY
    save_id: str
    compute: Workers
    epoch: int = 0

    def __post_init__(self) -> None:
        self.writers = 1
        self._metadata = self.request.metadata
        self.after_data = self.request.consent is not None
        self.checked: Column = np.zeros(0, np.int64)
        self._numbers = itertools.count()
        orbax = self.layout.orbax or {}
        self._orbax = [(f"{DATABASE}/{name}", data) for name, data in orbax.items()]

    async def put_orbax(self) -> None:
        """Write Orbax's files concurrently; on return they are durable."""
        if self._orbax:
            attempt = await self.opened()
            async with asyncio.TaskGroup() as group:
                for path, data in self._orbax:
                    group.create_task(attempt.put(path, data))

    async def put_index(self, payload: Payload) -> Committable:
        """Write index file and manifest, and encode the record; on return the files are durable.

        Waits for the request's `consent` before writing. May be called again if paths of data
        files have changed; the last result counts.

        Cancellation: waits for running writes.
        """
        assert self.layout.catalog is not None
        attempt = await self.opened()
        consent = self.request.consent
        if consent is not None:
            consent.asked()
            self._metadata = {**self.request.metadata, **await consent.given()}
        number = next(self._numbers)
        path = f"d/{self.save_id}-index{number or ''}"
        now_ns = time.time_ns()
        run = self.compute.run
        index = await run(
            encode_index,
            self.layout.catalog,
            payload,
            path=path,
            save_id=bytes.fromhex(self.save_id),
            now_ns=now_ns,
        )
        written = (*payload.files, FileInfo(path, index.nbytes, index.crc))
        files = [FileInfo(f"{DATABASE}/{one.path}", one.nbytes, one.crc32c) for one in written]
        index_file = len(payload.files)
        manifest = f"{DATABASE}/{MANIFEST_NAME}"
        small = [(manifest, index.manifest), *self._orbax]
        sources = [attempt.source(name) for name, _ in small]
        async with asyncio.TaskGroup() as group:
            group.create_task(attempt.put(files[index_file].path, *index.blocks))
            group.create_task(attempt.put(manifest, index.manifest, in_record=True))
            record = await run(self._record, index, files, index_file, small, sources, now_ns)
        stored_nbytes = sum(map(attrgetter("nbytes"), files))
        return Committable(record, stored_nbytes + len(record), len(files) + 1)

    def _record(
        self,
        index: Index,
        files: list[FileInfo],
        index_file: int,
        small: Sequence[tuple[str, bytes]],
        sources: Sequence[str | None],
        now_ns: int,
    ) -> bytes:
        """Encode the record, and add small files to `files`. Blocking."""
        for (name, data), source in zip(small, sources, strict=True):
            # Files with a source get their fixed names only after the record is published. The
            # manifest is in the record itself.
            if source is None:
                files.append(FileInfo(name, len(data), crc32c(data)))
            else:
                source = None if data is index.manifest else source
                files.append(FixedName.of(name, data, source))
        request, layout = self.request, self.layout
        snapshot = request.snapshot
        # Without the CRC at the end of the chunk index: the CRC of data followed by their own CRC
        # is a constant, and would verify nothing.
        chunks = index.chunk_index
        return encode_record(
            CommitRecord(
                save_id=self.save_id,
                step=request.step,
                epoch=self.epoch,
                writer=0,
                writers=self.writers,
                plan_digest=layout.digest,
                created_ns=now_ns,
                library=f"asyncckpt {VERSION}",
                tree=snapshot.structure.to_json(),
                leaves=LeafTable(snapshot.kinds, snapshot.values, snapshot.extra, layout.pieces),
                specs=layout.specs,
                arrays=layout.arrays,
                files=tuple(files),
                chunk_index=IndexExtent(
                    index_file,
                    index.nbytes - len(chunks),
                    len(chunks),
                    crc32c(memoryview(chunks)[:-CRC_NBYTES]),
                    chunks if len(chunks) <= INDEX_IN_RECORD_NBYTES else None,
                ),
                manifest=index.manifest,
                metadata=self._metadata,
                metrics=request.metrics,
                database=DATABASE,
            ),
            layout.tables,
        )
