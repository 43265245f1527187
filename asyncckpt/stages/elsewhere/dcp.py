"""Directories of `torch.distributed.checkpoint`, opened as checkpoints."""

# Rule 1: nothing is unpickled but by `format/unpickle.py`, which executes nothing.
# Rule 2: what is wrong with one archive concerns its leaf alone: whoever does not want that leaf
#   never hears of it.

from __future__ import annotations

import asyncio
from typing import Any

from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.format.allowance import Allowance
from asyncckpt.format.dcp import (
    MAX_METADATA_NBYTES,
    METADATA_NAME,
    Entry,
    decode_entries,
    nest,
)
from asyncckpt.format.faults import corrupt
from asyncckpt.format.opcodes import PickleSource
from asyncckpt.format.torch_pickle import DTYPES, metadata_names
from asyncckpt.format.unpickle import Unpickler
from asyncckpt.options import MIB
from asyncckpt.ports import CheckpointFiles
from asyncckpt.spec import array_spec
from asyncckpt.stages.elsewhere.access import located, stored_files
from asyncckpt.stages.elsewhere.archives import Archives
from asyncckpt.stages.elsewhere.runs import Run, RunTables
from asyncckpt.stages.opened import OpenCheckpoint
from asyncckpt.tree import flatten

FREE_NBYTES = 48 * MIB
"""What decoded metadata may take in memory beyond three times its size."""

OPCODES_PER_TURN = 1 << 15
"""Opcodes done before others get their turn on the event loop: some 30 ms."""


class _Placed:
    """Stands in the tree for an entry that is an array."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


async def open_dcp(files: CheckpointFiles) -> OpenCheckpoint:
    """The metadata and the head of every archive have been read; what is no tensor is decoded.

    Raises:
        CorruptCheckpointError: the metadata is malformed, or a file is missing.
        UnsupportedFormatError: it is of another version, or names what is not read here.
    """
    data = await files.read(METADATA_NAME, max_nbytes=MAX_METADATA_NBYTES)
    allowance = Allowance(3 * len(data) + FREE_NBYTES)
    with located(files, METADATA_NAME) as shown:
        source = PickleSource(data, "the metadata of torch.distributed.checkpoint", shown)
        unpickler = Unpickler(source, metadata_names(), allowance)
        while not unpickler.step(OPCODES_PER_TURN):
            await asyncio.sleep(0)
        entries = decode_entries(unpickler.value, file=shown)
    del data, source, unpickler
    stored = await stored_files(files, dict.fromkeys(i.file for e in entries for i in e.items))
    archives = Archives(files, stored, allowance)
    await archives.read(entries)
    values = [
        archives.values[number] if number in archives.values else _Placed(number)
        for number in range(len(entries))
    ]
    with located(files, METADATA_NAME) as shown:
        try:
            tree = nest([entry.path for entry in entries], values)
        except ValueError as error:
            raise corrupt("planner_data", str(error), file=shown) from None
    flat = flatten(tree)
    tables = RunTables()
    files_at = {path: number for number, path in enumerate(stored)}
    for leaf in flat.leaves:
        if isinstance(leaf, _Placed):
            _add(tables, entries[leaf.number], archives, leaf.number, files_at)
        else:
            tables.add_scalar(leaf)
    return tables.open(
        files,
        "dcp",
        flat.structure,
        list(stored.values()),
        library="torch.distributed.checkpoint",
        metadata={},
    )


def _add(
    tables: RunTables,
    entry: Entry,
    archives: Archives,
    number: int,
    files_at: dict[str, int],
) -> None:
    """The entry's array is the next leaf."""
    dtype = DTYPES.get(entry.dtype)
    fault: AsyncCheckpointError | None = archives.faults.get(number)
    if fault is not None:
        item = entry.items[0]
        start = min(item.offset, archives.stored[item.file].nbytes)
        nbytes = min(item.nbytes, archives.stored[item.file].nbytes - start)
        spec = array_spec((max(1, item.nbytes),), "uint8")
        if dtype is not None and entry.shape is not None:
            spec = array_spec(entry.shape, dtype)
        file = files_at[item.file]
        tables.add_refused("torch", spec, fault, file=file, start=start, nbytes=nbytes)
        return
    assert entry.shape is not None and dtype is not None
    runs: list[Run] = []
    for shard, (box, item) in enumerate(zip(entry.boxes, entry.items, strict=True)):
        start, layout = archives.places[number, shard]
        file = files_at[item.file]
        runs.append(Run(box.offset, box.shape, file, start, None if layout.plain else layout))
    if not runs:
        runs = [Run((0,) * len(entry.shape), entry.shape, 0, 0)]
    tables.add_array("torch", dtype, runs)
