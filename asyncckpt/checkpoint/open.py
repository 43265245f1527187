"""Opening a checkpoint of any format.

Each module of `checkpoint.foreign` opens one family of formats, which `format.foreign` parses.
"""

# Rule 1: nothing stored is executed, unpickled or passed on as a specification.
# Rule 2: a directory with a commit record, even a damaged one, is an asyncckpt checkpoint.
# Rule 3: a directory with only the other files of an asyncckpt checkpoint is not a checkpoint.

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence, Set
from typing import Literal

import numpy as np

from asyncckpt.checkpoint.foreign.ours import is_our_data, is_our_leftover, without_record
from asyncckpt.checkpoint.metadata import OpenCheckpoint, open_checkpoint
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.flow.threads import Workers
from asyncckpt.format.foreign.orbax_read import CHECKPOINT_METADATA_FILE, UNFINISHED, step_number
from asyncckpt.format.record import RECORD_NAME, STEP_NAME
from asyncckpt.log import logger
from asyncckpt.options import MAX_ENTRIES
from asyncckpt.ports import CheckpointFiles, Entry

Verb = Literal["restore", "inspect", "verify", "convert", "compare"]

PROBED_ITEMS = 8
"""Most subdirectories inspected to recognize a directory without known names."""

HEAD_NBYTES = 256
"""First bytes of a file, by which its kind is recognized."""

_ORBAX_NAMES = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint", "_sharding"))
_ORBAX_ITEMS = frozenset(("default", "state", "pytree"))
_ZARR_NAMES = frozenset((".zarray", "zarr.json"))

_LIBRARIES: Mapping[str, str] = {
    "dcp": "torch.distributed.checkpoint",
    "ocdbt": "TensorStore",
    "orbax": "Orbax",
    "safetensors": "safetensors",
}

_OUR_DATA = "default/d"
"""Directory of the data files of an asyncckpt checkpoint."""

_LIKE_OURS = frozenset((None, "orbax", "ocdbt"))
"""Formats that an asyncckpt checkpoint without its record looks like."""

_NUMPY = "load it with numpy.load, and save the arrays with asyncckpt.save"
_TORCH = "load it with torch.load(path, weights_only=True), and save that with asyncckpt.save"
_OTHER = "load it with the library that wrote it, and save that with asyncckpt.save"
_PACKED = "unpack it, and name the checkpoint that was in it"

_MAGICS = (
    (b"\x93NUMPY", "a NumPy array (.npy)", _NUMPY),
    (b"\x89HDF\r\n", "an HDF5 file, as h5py and Keras write", _OTHER),
    (b"GGUF", "a GGUF file of llama.cpp", _OTHER),
    (b"\x1f\x8b", "a file compressed with gzip", _PACKED),
    (b"\x28\xb5\x2f\xfd", "a file compressed with zstd", _PACKED),
    *((bytes((0x80, n)), "a pickle, which may execute code when loaded", _TORCH) for n in (2, 3)),
    *((bytes((0x80, n)), "a pickle, which may execute code when loaded", _OTHER) for n in (4, 5)),
)
"""First bytes of files that are not checkpoints, their kind, and advice."""


async def open_any(files: CheckpointFiles, compute: Workers) -> OpenCheckpoint:
    """Open a checkpoint of any library.

    Raises:
        CheckpointNotFoundError: there is none, or an asyncckpt checkpoint without its record.
        CorruptCheckpointError: its metadata is damaged.
        UnsupportedFormatError: its format is not supported.
    """
    try:
        return await open_checkpoint(files, compute)
    except CheckpointNotFoundError:
        entries = await files.entries(max_entries=MAX_ENTRIES)
        name = await _format_of(files, entries)
        if name in _LIKE_OURS and is_our_leftover(entry.name for entry in entries):
            raise without_record(files.location, is_database=False) from None
        if name is None:
            raise _nothing(files.location, entries) from None
    module = importlib.import_module(f"asyncckpt.checkpoint.foreign.{name}")
    opened: OpenCheckpoint = await getattr(module, f"open_{name}")(files)
    for note in opened.notes:
        logger.warning("%s: %s", files.location, note)
    return opened


async def check_unchanged(
    files: CheckpointFiles, verb: Verb, damage: CorruptCheckpointError | None = None
) -> None:
    """Raise a `CheckpointNotFoundError` if a seemingly damaged checkpoint is gone or replaced."""
    try:
        changed = await files.changed()
    except AsyncCheckpointError:
        return
    if changed is None:
        return
    next_step = f"{verb} another step" if changed == "deleted" else f"{verb} it again"
    raise CheckpointNotFoundError(
        f"{files.location}: the checkpoint was {changed} while being read; {next_step}",
        location=files.location,
        found=changed,
    ) from damage


async def library_of(files: CheckpointFiles) -> str | None:
    """Return the library that wrote a foreign checkpoint; None for anything else."""
    try:
        entries = await files.entries(max_entries=MAX_ENTRIES)
        name = await _format_of(files, entries)
    except (CheckpointNotFoundError, UnsupportedFormatError):
        return None
    names = {entry.name for entry in entries}
    if name is None or RECORD_NAME in names or (name in _LIKE_OURS and is_our_leftover(names)):
        return None
    with contextlib.suppress(CheckpointNotFoundError):
        below = await files.entries(_OUR_DATA, max_entries=MAX_ENTRIES)
        if any(is_our_data(f"d/{entry.name}") for entry in below):
            return None
    return _LIBRARIES[name]


async def _format_of(files: CheckpointFiles, entries: Sequence[Entry]) -> str | None:
    """Return the format that the files look like, None if they look like no checkpoint.

    Those of asyncckpt may look like Orbax or OCDBT.
    """
    names = {entry.name for entry in entries}
    if names == {""}:
        await _check_file(files, entries[0])
        return "safetensors"
    directories = {e.name for e in entries if e.is_directory and UNFINISHED not in e.name}
    steps = sorted((name for name in directories if STEP_NAME.fullmatch(name)), key=int)
    items = sorted(directories.difference(steps), key=lambda name: (-step_number(name), name))
    found = _format_named(names, directories)
    marks = {RECORD_NAME} if found else {RECORD_NAME, CHECKPOINT_METADATA_FILE}
    for name in steps[: -PROBED_ITEMS - 1 : -1] if found or items else ():
        below = await files.entries(name, max_entries=MAX_ENTRIES)
        if any(entry.name in marks for entry in below):
            return None  # the root of a run, which may also hold foreign checkpoints
    if found is not None:
        return found
    for name in items[:PROBED_ITEMS]:
        # Items of an Orbax step, and parameters without OCDBT, may have any name.
        below = await files.entries(name, max_entries=MAX_ENTRIES)
        inner = {entry.name for entry in below}
        if CHECKPOINT_METADATA_FILE in inner and step_number(name) >= 0:
            raise _run_error(files.location, [name])
        if inner & (_ORBAX_NAMES | _ZARR_NAMES) or "manifest.ocdbt" in inner:
            return "orbax"
    return None


def _format_named(names: Set[str], directories: Set[str]) -> str | None:
    """Return the format that names in a directory show, or None; directories are in both sets."""
    weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    if ".metadata" in names:
        return "dcp"
    # Weights may lie beside a directory of any name.
    if names & _ORBAX_NAMES or (directories & _ORBAX_ITEMS and not weights):
        return "orbax"
    if "manifest.ocdbt" in names:
        return "ocdbt"
    if any(name.startswith("ocdbt.process_") for name in directories):
        return "orbax"
    # Last: weights may lie in the directory of a checkpoint, and their own path can be passed.
    return "safetensors" if weights else None


async def _check_file(files: CheckpointFiles, entry: Entry) -> None:
    """Check that a file is a safetensors file."""
    head = np.zeros(min(HEAD_NBYTES, entry.nbytes), np.uint8)
    await files.read_into("", 0, [head])
    found = _kind_of_file(head.tobytes(), files.location.endswith(".safetensors"))
    if found is not None:
        kind, advice = found
        raise UnsupportedFormatError(
            f"{files.location}: this is {kind}, not a checkpoint that asyncckpt reads; {advice}",
            location=files.location,
            expected="a directory, or a safetensors file",
            found=kind,
        )


def _kind_of_file(head: bytes, named_safetensors: bool) -> tuple[str, str] | None:
    """Return the kind of a file with these first bytes, and advice; None for safetensors."""
    if head[5:9] == b"\0\0\0{":  # the length of a header below 2^40 bytes, and its first byte
        return None
    if head.startswith(b"PK\x03\x04"):
        # A zip file; the name of its first member follows a header of 30 bytes.
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        if name.endswith(b".npy"):
            return "an archive of NumPy arrays (.npz)", _NUMPY
        if name.endswith(b"data.pkl"):
            return "a file of torch.save, which is a pickle", _TORCH
        return "a zip archive", _OTHER
    for magic, kind, advice in _MAGICS:
        if head.startswith(magic):
            return kind, advice
    if named_safetensors:
        return None  # damaged: its reader reports that
    if not head:
        return "an empty file", "name the directory of a checkpoint"
    text = head.decode("utf-8", "ignore")
    if len(text.encode()) >= len(head) - 3 and not any(c < " " and c not in "\t\n\r" for c in text):
        return "a text file", "name the directory of a checkpoint"
    return f"a file of unknown kind that begins with {head[:8]!r}", _OTHER


def _nothing(location: str, entries: Sequence[Entry]) -> CheckpointNotFoundError:
    if not entries:
        return CheckpointNotFoundError(
            f"{location}: there is no checkpoint here: the directory is empty, or holds links "
            "only, which are not followed; name the directory or file that they lead to",
            location=location,
        )
    steps = sorted(int(e.name) for e in entries if e.is_directory and STEP_NAME.fullmatch(e.name))
    if steps:
        return _run_error(location, steps, f", or use Checkpointer({location!r})")
    begun = [e.name.partition(UNFINISHED)[0] for e in entries if UNFINISHED in e.name]
    what = "no checkpoint.json, and nothing that Orbax, TensorStore, safetensors or "
    what += "torch.distributed.checkpoint write"
    if begun:
        what = f"Orbax has begun {', '.join(begun)}, and finished no step"
    some = ", ".join(entry.name for entry in entries[:5]) + (", …" if len(entries) > 5 else "")
    return CheckpointNotFoundError(
        f"{location}: there is no checkpoint here: {what}; there is {some}",
        location=location,
        found=some,
    )


def _run_error(location: str, steps: Sequence[object], also: str = "") -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{location}: this is the root of a run, not a checkpoint; its newest step is "
        f"{steps[-1]}: pass {location}/{steps[-1]}{also}",
        location=location,
        found=steps,
    )
