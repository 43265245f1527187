"""Trees of safetensors checkpoints that were converted from others."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.foreign.safetensors_tree import SavedTree, decode_tree
from asyncckpt.format.record import ArrayTable, LeafTable, Piece

logger = logging.getLogger("asyncckpt")


def with_saved_tree(opened: OpenCheckpoint) -> OpenCheckpoint:
    """Return the checkpoint with containers, scalars and ties as before the conversion.

    It is returned unchanged if its metadata has no tree, or one with other tensors.
    """
    if opened.format != "safetensors":
        return opened
    texts = {key: text for key, text in opened.metadata.items() if isinstance(text, str)}
    try:
        tree, others = decode_tree(texts, len(opened.leaves.kind), file=opened.location)
    except CorruptCheckpointError as error:
        error.location = opened.location
        raise
    if tree is None:
        return opened
    parts = opened.structure().parts()
    leaf_of = {str(key[0]) if key else "": leaf for leaf, key in enumerate(parts)}
    wanted = {name for name in tree.tensors if name is not None}
    if wanted != leaf_of.keys():
        logger.warning(
            "%s: the tensors are not those of the tree in its metadata; they are read by name",
            opened.location,
        )
        return dataclasses.replace(opened, metadata=others)
    return _retreed(opened, tree, leaf_of)


def _retreed(opened: OpenCheckpoint, tree: SavedTree, leaf_of: dict[str, int]) -> OpenCheckpoint:
    owned = opened.leaf_pieces()
    names, specs = list(opened.arrays.name), list(opened.arrays.spec)
    tied = dict(opened.arrays.tied)
    pieces: dict[int, tuple[Piece, ...]] = {}
    taken: set[str] = set()
    for leaf, tensor in enumerate(tree.tensors):
        if tensor is None:
            continue
        own = owned[leaf_of[tensor]]
        if tensor in taken:
            # A tied leaf: more arrays with the same chunks.
            first = len(names)
            for number, piece in enumerate(own):
                names.append(f"{names[piece.array]}%~{leaf}")
                specs.append(specs[piece.array])
                tied[first + number] = tied.get(piece.array, piece.array)
            own = tuple(Piece(piece.offset, first + n) for n, piece in enumerate(own))
        taken.add(tensor)
        pieces[leaf] = own
    arrays = ArrayTable(names, specs, tied)

    async def read_extents(wanted: Sequence[int] | None) -> Extents:
        return await opened.read_extents(
            None if wanted is None else sorted({tied.get(array, array) for array in wanted})
        )

    leaves = LeafTable(tree.leaves.kind, tree.leaves.value, tree.leaves.extra, pieces)
    return dataclasses.replace(
        opened,
        tree=tree.structure,
        leaves=leaves,
        arrays=arrays,
        read_extents=read_extents,
        metadata=tree.metadata,
        metrics=tree.metrics,
    )
