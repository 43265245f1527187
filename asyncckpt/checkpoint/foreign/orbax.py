"""Orbax checkpoints: one item, or the directory of a step with its items."""

# Rule 1: a step with one tree is that tree; a step with several is a dict by item name. JSON items
#   are always in `metadata` by name, and also in that dict.
# Rule 2: no value of the user is lost: values whose name in `metadata` another one takes, and
#   numbers that JSON lacks, are there in another form, with a note.

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from asyncckpt.checkpoint.foreign.listing import list_files, refuse_link
from asyncckpt.checkpoint.foreign.orbax_items import ABSENT, Item, read_document, read_tree
from asyncckpt.checkpoint.foreign.ours import is_our_data, without_record
from asyncckpt.checkpoint.foreign.zarr_arrays import make_checkpoint
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.format.damage import path_fault
from asyncckpt.format.foreign.foreign_tree import ForeignLeaf, structure_of
from asyncckpt.format.foreign.orbax_read import (
    CHECKPOINT_METADATA_FILE,
    PROCESS_DIRECTORY,
    UNFINISHED,
    StepMetadata,
    decode_checkpoint_metadata,
    numbers,
    parse_document,
)
from asyncckpt.format.foreign.zarr2 import METADATA_NAME as ZARR2_NAME
from asyncckpt.format.ocdbt.manifest import MANIFEST_NAME
from asyncckpt.format.orbax import METADATA_FILE
from asyncckpt.format.record import RECORD_NAME
from asyncckpt.format.scalars import JsonValue
from asyncckpt.format.zarr3 import METADATA_NAME as ZARR3_NAME
from asyncckpt.options import MAX_ENTRIES
from asyncckpt.ports import CheckpointFiles, Entry

MAX_ITEMS = 1 << 10
"""Most items of one step."""

MAX_ITEM_DEPTH = 3
"""Deepest nesting of items: Orbax nests the parts of a random state."""

_METRICS = "metrics"
_JSON_FILES = frozenset(("metadata", "data.json", _METRICS))
_JSON_HANDLERS = ("JsonCheckpointHandler", "JsonHandler")
_SUCCESS = "commit_success.txt"
_NO_ITEM = "DescriptorHandler"  # listed by version 1, although it writes nothing by default
# These handlers wrap a single leaf in a tree, under the name `_SINGLE`, and restore the leaf.
_SINGLE_HANDLERS = ("ArrayCheckpointHandler", "JaxRandomKeyCheckpointHandler")
_SINGLE = "checkpoint"
# By dtype and words: Orbax does not store the implementation of a typed key that is an item.
_IMPLEMENTATIONS = {("uint32", 2): "threefry2x32", ("uint32", 4): "rbg"}
_CUSTOM = "custom_metadata"
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


async def open_orbax(files: CheckpointFiles) -> OpenCheckpoint:
    """Open a tree that Orbax saved, of version 0 or 1: one item or a step.

    Leaves of kind `scalar` are restored as Python numbers, strings as `str`. Typed keys keep their
    PRNG implementation. Arrays are placed as the target is or on the default device, not as saved.

    Raises:
        CheckpointNotFoundError: there is no tree, Orbax has not finished it, or it is the database
            of an asyncckpt checkpoint without its record.
    """
    if UNFINISHED in posixpath.basename(files.location.rstrip("/")):
        raise CheckpointNotFoundError(
            f"{files.location}: Orbax has not finished this checkpoint, as its name says; restore "
            "another step",
            location=files.location,
        )
    entries = await files.entries(max_entries=MAX_ENTRIES)
    step = StepMetadata()
    with contextlib.suppress(CheckpointNotFoundError):
        step = await read_document(files, CHECKPOINT_METADATA_FILE, decode_checkpoint_metadata)
    lost: list[str] = []
    for name in sorted(step.handlers.keys() - {entry.name for entry in entries} - {""}):
        # Deleted or a link, neither of which may be skipped silently.
        if path_fault(name) is None:
            await refuse_link(files, name)
        if not step.handlers[name].endswith(_NO_ITEM):
            lost.append(name)
    item = await _read(files, "", entries, step.handlers, 0, lost)
    documents = item.document if isinstance(item.document, dict) else {}
    if item.tree is ABSENT:
        raise CheckpointNotFoundError(
            f"{files.location}: there is no tree in this Orbax checkpoint; it has the JSON items "
            f"{sorted(documents)}",
            location=files.location,
            found=sorted(documents),
        )
    measured = documents.get(_METRICS)
    metrics = numbers(measured)
    others = isinstance(measured, dict) and measured.keys() != metrics.keys()
    shown = {name: value for name, value in documents.items() if name != _METRICS or others}
    metadata = _finite(_merged((step.custom, item.custom, shown), item.notes), item.notes)
    return make_checkpoint(
        files,
        "orbax",
        item.tree,
        metadata=metadata,
        metrics={**step.metrics, **metrics},
        created_ns=step.committed_ns,
        database=item.directory,
        notes=item.notes,
    )


def _merged(sources: Sequence[Mapping[str, JsonValue]], notes: list[str]) -> dict[str, JsonValue]:
    """Merge JSON by name; a value with the name of a later one moves to `custom_metadata`."""
    merged: dict[str, JsonValue] = {}
    hidden: dict[str, JsonValue] = {}
    for name, value in [pair for source in sources for pair in source.items()]:
        if merged.get(name, value) != value:
            hidden[name] = merged[name]
        merged[name] = value
    if hidden:
        at = _CUSTOM
        while at in merged:
            at += "_"
        merged[at] = hidden
        names = ", ".join(map(repr, hidden))
        notes.append(f"custom metadata has the name of an item: see metadata[{at!r}] for {names}")
    return merged


def _finite(metadata: dict[str, JsonValue], notes: list[str]) -> dict[str, JsonValue]:
    """Replace numbers that JSON lacks with their names, as in the metrics of a commit record."""
    found = dict(metadata)
    for name, value in metadata.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            found[name] = json.loads(json.dumps(value), parse_constant=_NOT_FINITE.__getitem__)
            notes.append(f"metadata[{name!r}] has numbers that JSON lacks, as text: 'nan', 'inf'")
    return found


async def _read(
    files: CheckpointFiles,
    directory: str,
    entries: Sequence[Entry],
    handlers: Mapping[str, str],
    depth: int,
    lost: Sequence[str] = (),
) -> Item:
    """Read the content of a directory: a tree, a JSON document, items, or something unknown.

    `lost` are missing items.
    """
    names = {entry.name for entry in entries}
    handler = handlers.get("", "")
    below = [entry.name for entry in entries if _is_item(entry, handlers)]
    if names & {METADATA_FILE, MANIFEST_NAME} or any(map(PROCESS_DIRECTORY.fullmatch, names)):
        return await _read_tree(files, directory, handler)
    documents = [e.name for e in entries if not e.is_directory and e.name != _SUCCESS]
    if depth and not below and len(documents) == 1:
        if documents[0] in _JSON_FILES or handler.endswith(_JSON_HANDLERS):
            path = posixpath.join(directory, documents[0])
            parse = partial(parse_document, what="the JSON item")
            return Item(document=await read_document(files, path, parse))
    if len(below) > MAX_ITEMS or depth > MAX_ITEM_DEPTH:
        raise CheckpointNotFoundError(
            f"{files.location}: this is not a checkpoint: no tree was found in {directory!r}, "
            f"which has {len(below)} subdirectories; pass the directory of a checkpoint",
            location=files.location,
            expected=MAX_ITEMS,
            found=len(below),
        )
    items: dict[str, Item] = {}
    for name in below:
        path = posixpath.join(directory, name)
        inner = await files.entries(path, max_entries=MAX_ENTRIES)
        within = {entry.name for entry in inner}
        if name == "d" and any(is_our_data(f"d/{part}") for part in within):
            raise without_record(files.location, is_database=not directory)
        if RECORD_NAME in within:
            raise CheckpointNotFoundError(
                f"{files.location}: this is not a checkpoint, but has an asyncckpt checkpoint in "
                f"{path!r}; pass {posixpath.join(files.location, path)}",
                location=files.location,
                found=path,
            )
        if within & {ZARR2_NAME, ZARR3_NAME}:
            # Parameters of a tree without metadata.
            return await _read_tree(files, directory, handler)
        own = {"": handlers.get(name, "")}
        item = items[name] = await _read(files, path, inner, own, depth + 1)
        if item.tree is ABSENT and item.document is ABSENT:
            item.notes.append(f"the item {path!r} was not read: its kind is unknown")
    return _unwrapped(_joined(items, lost), handler)


def _is_item(entry: Entry, handlers: Mapping[str, str]) -> bool:
    # Names of Orbax's own directories begin with an underscore or a dot.
    return (
        entry.is_directory
        and (entry.name in handlers or not entry.name.startswith(("_", ".")))
        and UNFINISHED not in entry.name
        and path_fault(entry.name) is None
    )


async def _read_tree(files: CheckpointFiles, directory: str, handler: str) -> Item:
    return _unwrapped(await read_tree(await list_files(files, directory)), handler)


def _unwrapped(item: Item, handler: str) -> Item:
    """Replace a tree that wraps a single leaf with that leaf, a typed PRNG key if JSON says so."""
    tree, documents = item.tree, item.document
    if handler.endswith(_SINGLE_HANDLERS) and isinstance(tree, dict) and tree.keys() == {_SINGLE}:
        leaf = item.tree = tree[_SINGLE]
        facts = documents.values() if isinstance(documents, dict) else ()
        typed = any(isinstance(one, dict) and one.get("typed") is True for one in facts)
        if typed and isinstance(leaf, ForeignLeaf):
            spec = leaf.array.zarr.spec
            if found := _IMPLEMENTATIONS.get((spec.dtype, *spec.shape[-1:])):
                item.tree = replace(leaf, extra={"prng_impl": found})
            if found == "rbg":
                item.notes.append("Orbax stores keys of rbg and unsafe_rbg alike: read as rbg")
    return item


def _joined(items: Mapping[str, Item], lost: Sequence[str]) -> Item:
    """Merge several items into one."""
    documents = {n: item.document for n, item in items.items() if item.document is not ABSENT}
    result = Item(document=documents or ABSENT)
    result.notes = [note for item in items.values() for note in item.notes]
    result.notes += [
        f"the item {name!r} is missing, {CHECKPOINT_METADATA_FILE} lists it" for name in lost
    ]
    trees = {name: item.tree for name, item in items.items() if item.tree is not ABSENT}
    if len(trees) == 1 and not lost:
        (name,) = trees
        result.tree, result.directory = trees[name], items[name].directory
        result.custom = items[name].custom
        return result
    result.custom = {name: items[name].custom for name in trees if items[name].custom}
    if trees:
        for name, document in documents.items():
            # JSON too deep for a tree is only in `metadata`.
            with contextlib.suppress(ValueError):
                structure_of({name: document})
                trees.setdefault(name, document)
        result.tree = dict(sorted(trees.items()))
    return result
