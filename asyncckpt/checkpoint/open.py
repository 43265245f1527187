"""Checkpoints of other libraries, opened as ours are.

Each module here makes an `OpenCheckpoint` of one family of formats; parsing is in `format/`.
"""

# Rule 1: nothing stored is executed, unpickled or handed on as a specification.
# Rule 2: a directory with a commit record is ours, also when the record is damaged.
# Rule 3: one that has only what our saves put beside the record is no checkpoint, of nobody.

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from asyncckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from asyncckpt.format.record import STEP_NAME
from asyncckpt.ports import CheckpointFiles, Entry
from asyncckpt.stages.elsewhere.ours import is_our_leftover, without_record
from asyncckpt.stages.opened import OpenCheckpoint, open_checkpoint
from asyncckpt.stages.retree import with_saved_tree

MAX_ENTRIES = 1 << 20
"""Names in one directory. Orbax without OCDBT has one per parameter."""

PROBED_ITEMS = 8
"""Directories looked into to tell what a directory without known names is."""

Open = Callable[[CheckpointFiles], Awaitable[OpenCheckpoint]]

_ORBAX_NAMES = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint", "_sharding"))
_ORBAX_ITEMS = frozenset(("default", "state", "pytree"))
_ZARR_NAMES = frozenset((".zarray", "zarr.json"))


_LIKE_OURS = frozenset((None, "orbax", "ocdbt"))
"""What our own files are taken for where there is no record, and whenever some of them are gone."""


async def open_any(files: CheckpointFiles) -> OpenCheckpoint:
    """The checkpoint at a location, whoever wrote it.

    Raises:
        CheckpointNotFoundError: there is none, or one of ours that lacks its record.
        CorruptCheckpointError: its metadata is damaged.
        UnsupportedFormatError: nothing here reads this.
    """
    try:
        return await open_checkpoint(files)
    except CheckpointNotFoundError:
        entries = await files.entries(max_entries=MAX_ENTRIES)
        name = await _format_of(files, entries)
        if name in _LIKE_OURS and is_our_leftover(entry.name for entry in entries):
            raise without_record(files.location, is_database=False) from None
        if name is None:
            raise _nothing(files.location, entries) from None
    module = importlib.import_module(f"asyncckpt.stages.elsewhere.{name}")
    opener: Open = getattr(module, f"open_{name}")
    return with_saved_tree(await opener(files))


async def _format_of(files: CheckpointFiles, entries: Sequence[Entry]) -> str | None:
    names = {entry.name for entry in entries}
    if names == {""}:
        return await _format_of_file(files, entries[0])
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    if ".metadata" in names:
        return "dcp"
    directories = {entry.name for entry in entries if entry.is_directory}
    if names & _ORBAX_NAMES or directories & _ORBAX_ITEMS:
        return "orbax"
    if "manifest.ocdbt" in names:
        return "ocdbt"
    if any(name.startswith("ocdbt.process_") for name in directories):
        return "orbax"
    items = sorted(name for name in directories if not STEP_NAME.fullmatch(name))
    for name in items[:PROBED_ITEMS]:
        # Items of an Orbax step have any name, and so have its parameters without OCDBT.
        below = await files.entries(name, max_entries=MAX_ENTRIES)
        inner = {entry.name for entry in below}
        if inner & (_ORBAX_NAMES | _ZARR_NAMES) or "manifest.ocdbt" in inner:
            return "orbax"
    return None


async def _format_of_file(files: CheckpointFiles, entry: Entry) -> str:
    head = np.zeros(min(16, entry.nbytes), np.uint8)
    await files.read_into("", 0, [head])
    if head.tobytes().startswith(b"PK\x03\x04"):
        raise UnsupportedFormatError(
            f"{files.location}: this looks like a file of torch.save, which is a pickle and is "
            "not read; load it with torch.load(path, weights_only=True), and save that",
            location=files.location,
            expected="a directory, or a safetensors file",
            found="a zip archive",
        )
    return "safetensors"


def _nothing(location: str, entries: Sequence[Entry]) -> CheckpointNotFoundError:
    if not entries:
        return CheckpointNotFoundError(
            f"{location}: there is no checkpoint here: the directory is empty, or holds links "
            "only, which are not followed; name the directory or file that they lead to",
            location=location,
        )
    steps = sorted(int(e.name) for e in entries if e.is_directory and STEP_NAME.fullmatch(e.name))
    if steps:
        return CheckpointNotFoundError(
            f"{location}: this is no checkpoint, but it has the directories of steps, of which "
            f"{steps[-1]} is the newest; name one of them, as in {location}/{steps[-1]}",
            location=location,
            found=steps,
        )
    some = ", ".join(entry.name for entry in entries[:5]) + (", …" if len(entries) > 5 else "")
    return CheckpointNotFoundError(
        f"{location}: there is no checkpoint here: no checkpoint.json, nor what Orbax, "
        f"TensorStore, safetensors or torch.distributed.checkpoint write; there is {some}",
        location=location,
        found=some,
    )
