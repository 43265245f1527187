"""Directories of `torch.distributed.checkpoint`, opened as checkpoints."""

# Rule 1: only `format.foreign.torch.unpickle` reads pickles, and it executes nothing.
# Rule 2: damage to one archive affects only its leaf: restores without that leaf succeed.

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncckpt.checkpoint.foreign.archives import Archives
from asyncckpt.checkpoint.foreign.listing import list_some, located
from asyncckpt.checkpoint.foreign.raw import Run, RunTables
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.format.damage import corrupt
from asyncckpt.format.foreign.foreign_tree import ForeignLeaf, nest, structure_of
from asyncckpt.format.foreign.torch.dcp import (
    MAX_METADATA_NBYTES,
    METADATA_NAME,
    Entry,
    decode_entries,
)
from asyncckpt.format.foreign.torch.plain_values import SavedArray
from asyncckpt.format.foreign.torch.torch_pickle import DTYPES, Dtype, SavedTensor, metadata_names
from asyncckpt.format.foreign.torch.unpickle import (
    ALLOWANCE_RATIO,
    Allowance,
    PickleSource,
    Unpickler,
)
from asyncckpt.options import MIB
from asyncckpt.planning.tiling import claimed_tiling_fault
from asyncckpt.ports import CheckpointFiles
from asyncckpt.spec import Box, array_spec

FREE_NBYTES = 48 * MIB
"""Memory that decoded metadata may take beyond `ALLOWANCE_RATIO` times its size."""

OPCODES_PER_TURN = 1 << 15
"""Opcodes interpreted before yielding to the event loop: about 30 ms."""


async def open_dcp(files: CheckpointFiles) -> OpenCheckpoint:
    """Open a checkpoint from its metadata, the heads of its tensors, and its other values."""
    data = await files.read(METADATA_NAME, max_nbytes=MAX_METADATA_NBYTES)
    allowance = Allowance(ALLOWANCE_RATIO * len(data) + FREE_NBYTES)
    with located(files):
        what = "the metadata of torch.distributed.checkpoint"
        source = PickleSource(data, what, METADATA_NAME)
        unpickler = Unpickler(source, metadata_names(), allowance)
        while True:
            if unpickler.step(OPCODES_PER_TURN):
                break
            await asyncio.sleep(0)
        entries = decode_entries(unpickler.value, file=METADATA_NAME)
        check_tiling(entries)
    notes: tuple[str, ...] = ()
    if unpickler.unknown:  # fields that torch 2.13 lacks
        notes = (
            "it was written by a newer version of torch.distributed.checkpoint than this release "
            f"was tested with ({', '.join(sorted(unpickler.unknown))}); it was read without them",
        )
    del data, source, unpickler
    listing = await list_some(files, dict.fromkeys(i.file for e in entries for i in e.items))
    archives = Archives(listing, entries, allowance)
    await archives.read()
    values = [archives.values.get(n, ForeignLeaf("torch", n)) for n in range(len(entries))]
    with located(files):
        try:
            structure, leaves = structure_of(nest([entry.path for entry in entries], values))
        except ValueError as error:
            raise corrupt("planner_data", str(error), file=METADATA_NAME) from None
    tables = RunTables()
    for leaf in leaves:
        if isinstance(leaf, SavedArray):
            tables.add_value(leaf.array)
        elif isinstance(leaf, SavedTensor):
            tables.add_array("torch", leaf.dtype, [archives.inner_runs[id(leaf)]])
        elif isinstance(leaf, Dtype):
            tables.add_scalar(f"torch.{leaf.name}")
        elif not isinstance(leaf, ForeignLeaf):
            tables.add_scalar(leaf)
        elif leaf.array in archives.faults:
            entry = entries[leaf.array]
            nbytes = entry.items[0].nbytes
            spec = array_spec((nbytes,), "uint8")
            if entry.shape is not None and entry.dtype in DTYPES:
                spec = array_spec(entry.shape, entry.dtype)
            tables.add_refused(spec, archives.faults[leaf.array], nbytes)
        else:
            number, entry = leaf.array, entries[leaf.array]
            assert entry.shape is not None
            runs = [archives.runs[number, shard] for shard in range(len(entry.items))]
            empty = Run((0,) * len(entry.shape), entry.shape, 0, 0)
            tables.add_array("torch", entry.dtype, runs or [empty])
    return tables.open(
        listing, "dcp", structure, library="torch.distributed.checkpoint", metadata={}, notes=notes
    )


def check_tiling(entries: Sequence[Entry]) -> None:
    """Check that the shards of every tensor tile it, in bounded time and memory.

    Raises:
        CorruptCheckpointError: names a tensor that they do not tile, and the reason.
    """
    for entry in entries:
        if entry.shape is None:
            continue
        reason = claimed_tiling_fault(Box.whole(entry.shape), entry.boxes)
        if reason is not None:
            raise corrupt(
                "the metadata of torch.distributed.checkpoint",
                f"the shards of {entry.key[:200]!r}, of size {list(entry.shape)}, do not tile it: "
                f"{reason}",
                file=METADATA_NAME,
            )
