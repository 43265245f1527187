"""Digest of a plan, by which processes know that they planned the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from asyncckpt.planning.leaves import Key
from asyncckpt.planning.table import Column


def plan_digest(
    version: int,
    options: Sequence[int],
    names: Sequence[str],
    kind: Column,
    tied: Mapping[int, int],
    layouts: Iterable[Key],
) -> str:
    """Return the SHA-256 (hex) of a plan.

    The encoding is unambiguous: lengths come before the text that they measure.

    Args:
        version: version of the planner.
        options: its options.
        names: name per leaf.
        kind: index into `layouts` per leaf.
        tied: per tied leaf the one it shares.
        layouts: the distinct layouts.
    """
    header = json.dumps(
        {
            "version": version,
            "options": options,
            "leaves": len(names),
            "tied": sorted(tied.items()),
            "layouts": [
                [
                    *key[:-1],
                    key[-1]
                    and [[s.box.offset, s.box.shape, sorted(set(s.holders))] for s in key[-1]],
                ]
                for key in layouts
            ],
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    text = "".join(names).encode("utf-8", "surrogatepass")
    lengths = np.fromiter(map(len, names), "<i8", len(names))
    parts = [len(header).to_bytes(8, "little"), header, lengths.tobytes()]
    return hashlib.sha256(b"".join([*parts, kind.astype("<i8").tobytes(), text])).hexdigest()
