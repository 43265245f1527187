"""Files of a checkpoint whose large record and chunk index are read once for all processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.format.record import RECORD_NAME
from asyncckpt.options import MAX_ENTRIES
from asyncckpt.ports import ORDINARY, Bytes, CheckpointFiles, Reading
from asyncckpt.restore.exchange.exchanger import Exchanger

SHARED_NBYTES = 1 << 20
"""Least size of metadata that are read once: reading less costs less than the agreement."""


class SharedMetadataFiles:
    """Read access to the metadata of a checkpoint, shared by all processes.

    Only the record and the reads after it are shared; each process reads the metadata of foreign
    checkpoints for itself.
    """

    def __init__(self, files: CheckpointFiles, exchanger: Exchanger) -> None:
        self.location = files.location
        self.capabilities = files.capabilities
        self.entries = files.entries
        self.reads = files.reads
        self.changed = files.changed
        self.close = files.close
        self._files = files
        self._exchanger = exchanger
        self._shares = False

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """Return the content of a file; all processes read a large record together."""
        if path == RECORD_NAME:
            nbytes = await self._exchanger.agreement.record_nbytes(self._record_nbytes)
            self._shares = nbytes > 0
            if SHARED_NBYTES <= nbytes <= max_nbytes:
                data = np.empty(nbytes, np.uint8)
                await self._exchanger.read_into(path, 0, data)
                return data.tobytes()
        return await self._files.read(path, max_nbytes=max_nbytes)

    async def read_into(
        self, path: str, offset: int, buffers: Sequence[Bytes], *, how: Reading = ORDINARY
    ) -> None:
        """Fill the buffers from a file; all processes read a large chunk index together."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if self._shares and len(buffers) == 1 and nbytes >= SHARED_NBYTES:
            await self._exchanger.read_into(path, offset, buffers[0])
            return
        await self._files.read_into(path, offset, buffers, how=how)

    async def _record_nbytes(self) -> int:
        """Return the size of the record; 0 without one."""
        try:
            entries = await self._files.entries(max_entries=MAX_ENTRIES)
        except CheckpointNotFoundError:
            return 0
        return next((entry.nbytes for entry in entries if entry.name == RECORD_NAME), 0)
