"""Digest of a plan, by which processes know that they planned the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.table import Column


def plan_digest(
    version: int,
    options: Sequence[int],
    names: Sequence[str],
    kind: Column,
    tied: Mapping[int, int],
    layouts: Iterable[LeafLayout],
) -> str:
    """Return the SHA-256 (hex) of a plan.

    The encoding is unambiguous: lengths come before the text that they measure.

    Args:
        version: version of the planner.
        options: its options.
        names: name per leaf.
        kind: index into `layouts` per leaf.
        tied: per tied leaf the one it shares.
        layouts: a leaf of each distinct layout.
    """
    header = json.dumps(
        {
            "version": version,
            "options": options,
            "leaves": len(names),
            "tied": sorted(tied.items()),
            "layouts": list(map(_layout, layouts)),
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    text = "".join(names).encode("utf-8", "surrogatepass")
    lengths = np.fromiter(map(len, names), "<i8", len(names))
    parts = [len(header).to_bytes(8, "little"), header, lengths.tobytes()]
    return hashlib.sha256(b"".join([*parts, kind.astype("<i8").tobytes(), text])).hexdigest()


def _layout(leaf: LeafLayout) -> list[Any]:
    """Return what all processes know of a layout: of a partition, not their own shards."""
    spec = leaf.spec
    own = [spec.shape, spec.dtype, leaf.chunk_nbytes, leaf.chunk_shape, leaf.zstd_level]
    if leaf.partition is not None:
        return [*own, [leaf.partition.cuts, leaf.partition.holders]]
    if leaf.shards is not None:
        shards = leaf.shards and [
            [shard.box.offset, shard.box.shape, sorted(set(shard.holders))] for shard in leaf.shards
        ]
        return [*own, shards]
    return [*own, None] if leaf.holders is None else [*own, None, sorted(set(leaf.holders))]
