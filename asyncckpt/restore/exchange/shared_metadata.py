"""Files of a checkpoint whose large record and chunk index are read once for all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from asyncckpt.checkpoint.metadata import RECORD
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.options import MAX_ENTRIES
from asyncckpt.ports import ORDINARY, Bytes, CheckpointFiles, Entry, Reading
from asyncckpt.restore.exchange.exchanger import Exchanger

SHARED_NBYTES = 1 << 20
"""Metadata from this size on are read once: smaller ones cost less than the agreement."""


class SharedMetadataFiles:
    """Read access to the metadata of a checkpoint, which all processes read alike.

    Only the record and reads after it are shared: of the metadata of other formats, each process
    reads what it wants.

    Attributes:
        location: path or URL of the checkpoint.
        capabilities: those of its store.
        read_nbytes: bytes of metadata that this process has read from the store.
    """

    def __init__(self, files: CheckpointFiles, exchanger: Exchanger) -> None:
        self.location = files.location
        self.capabilities = files.capabilities
        self._files = files
        self._exchanger = exchanger
        self._shares = False
        self.read_nbytes = 0

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """Return the content of a file; that of a large record comes from all processes."""
        if path == RECORD:
            nbytes = await self._exchanger.agreement.record_nbytes(self._record_nbytes)
            self._shares = nbytes > 0
            if SHARED_NBYTES <= nbytes <= max_nbytes:
                return (await self._exchanged(path, 0, nbytes)).tobytes()
        data = await self._files.read(path, max_nbytes=max_nbytes)
        self.read_nbytes += len(data)
        return data

    async def read_into(
        self, path: str, offset: int, buffers: Sequence[Bytes], *, how: Reading = ORDINARY
    ) -> None:
        """Fill the buffers from a file; a large chunk index comes from all processes."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if self._shares and len(buffers) == 1 and nbytes >= SHARED_NBYTES:
            np.copyto(buffers[0], await self._exchanged(path, offset, nbytes))
            return
        await self._files.read_into(path, offset, buffers, how=how)
        self.read_nbytes += nbytes

    async def _exchanged(self, path: str, offset: int, nbytes: int) -> Bytes:
        before = self._exchanger.read_nbytes
        data = await self._exchanger.read(path, offset, nbytes)
        self.read_nbytes += self._exchanger.read_nbytes - before
        return data

    async def _record_nbytes(self) -> int:
        """Return the size of the record, 0 if there is none."""
        try:
            entries = await self._files.entries(max_entries=MAX_ENTRIES)
        except CheckpointNotFoundError:
            return 0
        return next((entry.nbytes for entry in entries if entry.name == RECORD), 0)

    async def entries(self, path: str = "", *, max_entries: int) -> list[Entry]:
        """List a directory of the checkpoint."""
        return await self._files.entries(path, max_entries=max_entries)

    def reads(self, wanted: int | None) -> int:
        """Return how many reads to have in flight from now on."""
        return self._files.reads(wanted)

    async def changed(self) -> Literal["deleted", "replaced"] | None:
        """Return what happened to the checkpoint; None if it is still there."""
        return await self._files.changed()

    async def close(self) -> None:
        """Do nothing: the files belong to the restore."""
