"""Verification of foreign checkpoints: every chunk is read and decoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, extents_of
from asyncckpt.errors import AsyncCheckpointError, CorruptCheckpointError, StoreError
from asyncckpt.flow.shield import leading_error
from asyncckpt.options import ALIGNED_CHUNK_NBYTES
from asyncckpt.planning.restore import WholeArrays, plan_restore
from asyncckpt.reports import Damage, Progress, VerifyReport
from asyncckpt.restore.decode import Destination
from asyncckpt.restore.fetch import Fetch
from asyncckpt.runtime import Runtime


async def verify_foreign(
    runtime: Runtime,
    opened: OpenCheckpoint,
    step: int | None,
    progress: Callable[[Progress], None] | None,
    begun: float,
) -> VerifyReport:
    """Read and decode every chunk, and check its checksum if it has one.

    Raises:
        CorruptCheckpointError: the metadata places a chunk outside its file.
    """
    paths = opened.structure().paths()
    leaf_of: dict[int, str] = {}
    unverified = []
    for path, pieces in zip(paths, opened.leaf_pieces(), strict=True):
        leaf_of.update((piece.array, path) for piece in pieces)
        if not all(opened.storage(piece.array).codec.verifies for piece in pieces):
            unverified.append(path)
    extents = await extents_of(opened)
    check = _Check(runtime, opened, extents, leaf_of, progress)
    await check.run()
    return VerifyReport(
        location=opened.location,
        step=step,
        damages=tuple(check.damages),
        leaf_count=len(paths),
        read_nbytes=check.read_nbytes,
        total_s=time.perf_counter() - begun,
        unverified=tuple(unverified),
    )


@dataclass(eq=False, repr=False)
class _Check:
    """The verification of one foreign checkpoint, which reports one damage per damaged leaf.

    `read_nbytes` counts the bytes of chunks, including those in the metadata.
    """

    runtime: Runtime
    opened: OpenCheckpoint
    extents: Extents
    leaf_of: Mapping[int, str]
    progress: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        nbytes, file = self.extents.nbytes, self.extents.file
        self._inline_nbytes = sum(map(len, self.extents.values.values()))
        self._total_nbytes = int(nbytes[file >= 0].sum()) + self._inline_nbytes
        self.damages: list[Damage] = []
        self.read_nbytes = 0

    async def run(self) -> None:
        """Read all chunks; if something is damaged, read them again array by array."""
        self.read_nbytes = self._inline_nbytes
        try:
            await self._read(self.leaf_of)
        except (AsyncCheckpointError, BaseExceptionGroup) as error:
            _expected(error)
            self.read_nbytes = self._inline_nbytes
            for array in self.leaf_of:
                await self._read_one(array)

    async def _read_one(self, array: int) -> None:
        try:
            await self._read([array])
        except (AsyncCheckpointError, BaseExceptionGroup) as error:
            fault = _expected(error)
            path = self.leaf_of[array]
            if not any(damage.leaf == path for damage in self.damages):
                self.damages.append(_damage(path, fault))

    async def _read(self, arrays: Collection[int]) -> None:
        opened, runtime, extents = self.opened, self.runtime, self.extents
        plan = await runtime.engine.compute.run(
            plan_restore,
            opened.stored(),
            WholeArrays(np.array([*arrays], np.int64), np.zeros(len(arrays), np.bool_)),
            row_file=extents.file,
            row_offset=extents.offset,
            row_nbytes=extents.nbytes,
            slot_nbytes=runtime.pool.slot_nbytes,
            gap_nbytes=opened.files.capabilities.read_gap_nbytes,
            aligned_chunk_nbytes=ALIGNED_CHUNK_NBYTES,
        )
        fetch = Fetch(
            opened,
            extents,
            plan,
            [Destination(self.leaf_of[array], array, None, None) for array in arrays],
            runtime.pool,
            runtime.engine.compute,
            concurrency=partial(opened.files.reads, None),
            own_memory=True,
            arrived=lambda _: None,
            progress=self._advance,
        )
        await fetch.run()

    def _advance(self, nbytes: int) -> None:
        self.read_nbytes += nbytes
        if self.progress is not None:
            done = min(self.read_nbytes, self._total_nbytes)
            self.progress(Progress("verify", done, self._total_nbytes))


def _damage(path: str, fault: CorruptCheckpointError | StoreError) -> Damage:
    if isinstance(fault, CorruptCheckpointError):
        return Damage(path, fault.file or "", fault.offset, str(fault))
    return Damage(path, "", None, str(fault))


def _expected(error: BaseException) -> CorruptCheckpointError | StoreError:
    """Return the damage reported by an error; raise other errors."""
    if isinstance(error, BaseExceptionGroup):
        error = leading_error(error)
    if not isinstance(error, (CorruptCheckpointError, StoreError)):
        raise error
    return error
