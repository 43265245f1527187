"""Verification of foreign checkpoints by reading and decoding every chunk."""

from __future__ import annotations

import time
from collections.abc import Iterable

from asyncckpt.arguments import ProgressCallback
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.errors import CorruptCheckpointError, StoreError
from asyncckpt.reports import Damage, Progress, VerifyReport
from asyncckpt.restore.fetch import Fetch
from asyncckpt.restore.plan import Destinations, plan_reads
from asyncckpt.runtime import Runtime

_DAMAGE = ("EIO", "EBADMSG", "EUCLEAN")
"""Errors of system calls that mean the disk or its file system has lost the bytes."""


async def verify_foreign(
    runtime: Runtime,
    opened: OpenCheckpoint,
    step: int | None,
    progress: ProgressCallback | None,
    begun: float,
) -> VerifyReport:
    """Read and decode every chunk, and check its checksum if it has one.

    The report has one damage per damaged leaf, and counts the bytes of chunks, including those in
    the metadata.

    Raises:
        CorruptCheckpointError: the metadata places a chunk outside its file.
        StoreError: a file cannot be read now, which does not mean that its bytes are damaged.
    """
    paths = opened.structure().paths()
    leaf_of: dict[int, str] = {}
    unverified = []
    for path, pieces in zip(paths, opened.leaf_pieces(), strict=True):
        arrays = [piece.array for piece in pieces]
        leaf_of.update(dict.fromkeys(arrays, path))
        if not opened.is_verified(arrays):
            unverified.append(path)
    extents = await opened.read_extents(opened, None)
    inline_nbytes = sum(map(len, extents.values.values()))
    total_nbytes = int(extents.nbytes[extents.file >= 0].sum()) + inline_nbytes
    read_nbytes = inline_nbytes
    pool, compute = runtime.pool, runtime.engine.compute

    def advance(nbytes: int) -> None:
        nonlocal read_nbytes
        read_nbytes += nbytes
        if progress is not None:
            progress(Progress("verify", min(read_nbytes, total_nbytes), total_nbytes))

    async def read(arrays: Iterable[int]) -> None:
        destinations = Destinations()
        for array in arrays:
            destinations.add(leaf_of[array], array, None, None)
        reads = await compute.run(
            plan_reads, opened, extents, destinations, slot_nbytes=pool.slot_nbytes
        )
        await Fetch(reads, pool, compute, progress=advance).run()

    damages: dict[str, Damage] = {}
    try:
        await read(leaf_of)
    except (CorruptCheckpointError, StoreError) as fault:
        raise_unless_damage(fault)
        # Read again, array by array, to find all damage.
        read_nbytes = inline_nbytes
        for array, path in leaf_of.items():
            try:
                await read([array])
            except (CorruptCheckpointError, StoreError) as fault:
                raise_unless_damage(fault)
                file, offset = getattr(fault, "file", None), getattr(fault, "offset", None)
                damages.setdefault(path, Damage(path, file or "", offset, str(fault)))
    return VerifyReport(
        location=opened.location,
        step=step,
        damages=tuple(damages.values()),
        leaf_count=len(paths),
        read_nbytes=read_nbytes,
        total_s=time.perf_counter() - begun,
        unverified=tuple(unverified),
    )


def raise_unless_damage(error: Exception) -> None:
    """Raise the error unless it means damage: rights, limits or a busy store do not.

    Otherwise, intact checkpoints would be reported as damaged, and deleted.
    """
    if isinstance(error, StoreError) and error.found not in _DAMAGE:
        raise error
