"""Reading the archives of `torch.save` in the files of a DCP checkpoint.

Of a tensor only the head is read, which tells where its elements stand and in which order; other
values are read as a whole and decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.flow.shield import leading_error
from asyncckpt.format.allowance import Allowance
from asyncckpt.format.dcp import Entry, Item, layout_of
from asyncckpt.format.plain_values import load_value
from asyncckpt.format.strided import Layout
from asyncckpt.format.torch_pickle import DTYPES, SavedTensor
from asyncckpt.format.torch_zip import HEAD_NBYTES, LONG_HEAD_NBYTES, Archive, ShortHeadError
from asyncckpt.options import MIB
from asyncckpt.ports import CheckpointFiles
from asyncckpt.spec import ITEMSIZES
from asyncckpt.stages.elsewhere.access import located
from asyncckpt.stages.opened import StoredFile, missing

MAX_VALUE_NBYTES = 256 * MIB
"""Longest archive of a value that is no tensor: it is read whole when the checkpoint is opened."""

READ_NBYTES = 1 * MIB
"""Archives are read together up to this size."""

GAP_NBYTES = 16 << 10
"""What a read takes along between the heads of two archives."""

STREAMS = 8
"""Reads in flight: 8 MiB of memory."""

HEAD_OBJECTS_NBYTES = 1 * MIB
"""What the objects of one head may take; they are dropped again."""


class _Want(NamedTuple):
    """The first bytes of one archive: those of its head, or all of it."""

    offset: int
    nbytes: int
    number: int
    shard: int


class Archives:
    """What the archives of a checkpoint say.

    Attributes:
        stored: the files by path.
        values: decoded values, by number of the entry.
        places: by number of the entry and of its shard, the first byte of the elements in the
            file, and how they stand.
        faults: why the archives of an entry cannot be read, by its number.
    """

    def __init__(
        self, files: CheckpointFiles, stored: Mapping[str, StoredFile], allowance: Allowance
    ) -> None:
        self.stored = stored
        self.values: dict[int, object] = {}
        self.places: dict[tuple[int, int], tuple[int, Layout]] = {}
        self.faults: dict[int, AsyncCheckpointError] = {}
        self._files = files
        self._allowance = allowance
        self._heads: dict[bytes, tuple[SavedTensor, int]] = {}
        self._head_sizes: list[int] = []

    async def read(self, entries: Sequence[Entry]) -> None:
        """Every entry has its value, its places, or a fault.

        Raises:
            StoreError: reading failed.
        """
        by_file: dict[str, list[_Want]] = {path: [] for path in self.stored}
        for number, entry in enumerate(entries):
            for shard, item in enumerate(entry.items):
                nbytes = self._wanted(number, entry, item)
                if nbytes:
                    by_file[item.file].append(_Want(item.offset, nbytes, number, shard))
        streams = asyncio.Semaphore(STREAMS)
        try:
            async with asyncio.TaskGroup() as group:
                for path, wants in by_file.items():
                    for run in _runs(sorted(wants)):
                        await streams.acquire()
                        task = group.create_task(self._read_run(path, run, entries))
                        # A task cancelled before its first step never runs its `finally`.
                        task.add_done_callback(lambda _: streams.release())
        except BaseExceptionGroup as errors:
            raise leading_error(errors) from None

    def _wanted(self, number: int, entry: Entry, item: Item) -> int:
        """Bytes to read of an archive; none of what is known to be unreadable."""
        file = self.stored[item.file]
        with located(self._files, item.file) as shown:
            if item.offset + item.nbytes > file.nbytes:
                self.faults[number] = CorruptCheckpointError(
                    f"{shown}: {entry.key!r:.200} is at bytes {item.offset} to "
                    f"{item.offset + item.nbytes} of the file, which has {file.nbytes}; it is "
                    "truncated: use another checkpoint, or leave it out with include=",
                    file=item.file,
                    offset=item.offset,
                    location=self._files.location,
                    expected=item.offset + item.nbytes,
                    found=file.nbytes,
                )
            elif entry.shape is None and item.nbytes > MAX_VALUE_NBYTES:
                self._unsupported(
                    number, entry, item, f"is a value of {item.nbytes} bytes that is no tensor"
                )
            elif entry.shape is not None and DTYPES.get(entry.dtype) is None:
                self._unsupported(number, entry, item, f"has the dtype {entry.dtype}")
            else:
                return item.nbytes if entry.shape is None else min(item.nbytes, HEAD_NBYTES)
        return 0
