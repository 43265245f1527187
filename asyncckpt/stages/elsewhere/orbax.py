"""Checkpoints of Orbax: one item, or the directory of a step with its items."""

# Rule 1: a step with one tree is that tree, one with several is a dict by item name. JSON items are
#   in `metadata` by their names in any case, and in the dict where there is one.

from __future__ import annotations

import logging
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.format.fields import depth_fault
from asyncckpt.format.foreign_tree import Branch, ForeignLeaf, tree_of_json
from asyncckpt.format.ocdbt import MANIFEST_NAME
from asyncckpt.format.orbax_read import (
    CHECKPOINT_METADATA_FILE,
    MAX_DOCUMENT_NBYTES,
    METADATA_FILE,
    PROCESS_DIRECTORY,
    UNFINISHED,
    StepMetadata,
    decode_checkpoint_metadata,
    numbers,
    parse_document,
)
from asyncckpt.format.paths import path_fault
from asyncckpt.format.scalars import JsonValue
from asyncckpt.ports import CheckpointFiles, Entry
from asyncckpt.stages.elsewhere.arrays import make_checkpoint
from asyncckpt.stages.elsewhere.listing import MAX_FILES, located
from asyncckpt.stages.elsewhere.orbax_items import read_tree
from asyncckpt.stages.opened import OpenCheckpoint

MAX_ITEMS = 1 << 10
"""Items of one step."""

MAX_ITEM_DEPTH = 4
"""Items inside of items: Orbax itself puts the parts of a random state into one."""

_METRICS = "metrics"
_JSON_FILES = frozenset(("metadata", "data.json", _METRICS))
_SUCCESS = "commit_success.txt"
# These write a tree of one leaf, and restore that leaf.
_SINGLE = ("ArrayCheckpointHandler", "JaxRandomKeyCheckpointHandler")

logger = logging.getLogger("asyncckpt")


@dataclass(slots=True, eq=False)
class _Step:
    """What was found: trees by item name, and JSON by item name."""

    trees: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, JsonValue] = field(default_factory=dict)
    custom: dict[str, JsonValue] = field(default_factory=dict)
    directory: str = ""

    def result(self) -> Any:
        """The tree, or the dict of trees and documents."""
        if len(self.trees) == 1:
            return next(iter(self.trees.values()))
        trees = dict(self.trees)
        for name, document in self.documents.items():
            trees.setdefault(name, tree_of_json(document))
        return Branch("dict", dict(sorted(trees.items())))


async def open_orbax(files: CheckpointFiles) -> OpenCheckpoint:
    """The tree that Orbax saved: of version 0 or 1, one item or a step.

    Values of `scalar` leaves restore as Python numbers, strings as `str`. Keys keep their PRNG
    implementation. Where arrays were placed is not kept: the target or the default device decides.

    Raises:
        CheckpointNotFoundError: there is no tree, Orbax has not finished it, or it is the database
            of a checkpoint of ours that lacks its record.
        CorruptCheckpointError: it is damaged or passes a limit.
        UnsupportedFormatError: it holds something that is not read here.
    """
    if UNFINISHED in posixpath.basename(files.location.rstrip("/")):
        raise CheckpointNotFoundError(
            f"{files.location}: Orbax has not finished this checkpoint, as its name says; restore "
            "another step",
            location=files.location,
        )
    entries = await files.entries(max_entries=MAX_FILES)
    step = StepMetadata()
    if any(entry.name == CHECKPOINT_METADATA_FILE for entry in entries):
        data = await files.read(CHECKPOINT_METADATA_FILE, max_nbytes=MAX_DOCUMENT_NBYTES)
        with located(files):
            step = decode_checkpoint_metadata(data, file=CHECKPOINT_METADATA_FILE)
    found = _Step()
    await _read_item(files, "", "", entries, step.handlers, found, 0)
    if not found.trees:
        raise CheckpointNotFoundError(
            f"{files.location}: there is no tree among the items of this Orbax checkpoint; its "
            f"JSON items are {sorted(found.documents)}",
            location=files.location,
            found=sorted(found.documents),
        )
    metrics = {**step.metrics, **numbers(found.documents.pop(_METRICS, None))}
    return make_checkpoint(
        files,
        "orbax",
        found.result(),
        metadata={**step.custom, **found.custom, **found.documents},
        metrics=metrics,
        created_ns=step.committed_ns,
        database=found.directory if len(found.trees) == 1 else "",
    )
