"""A stored checkpoint as something to be saved: the same leaves, read as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.checkpointer.capture import Capture
from asyncckpt.checkpointer.reader import LeafReader
from asyncckpt.format.record import decode_scalar
from asyncckpt.ports import Source
from asyncckpt.spec import Box

DEVICE = "TFRT_CPU_0"
"""Where Orbax puts typed PRNG keys that are restored without a target: every JAX has this one."""


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """What stands for the array in a `Source`: the ordinal of the leaf."""

    number: int

    def devices(self) -> Sequence[str]:
        """As of a `jax.Array`."""
        return (DEVICE,)


class StoredAdapter(NumpyAdapter):
    """Fetches from a checkpoint; in threads that are not the reader's."""

    name = "stored"

    def __init__(self, reader: LeafReader) -> None:
        self._reader = reader

    def owns(self, kind: type) -> bool:
        """Whether it is what stands for a stored array."""
        return kind is StoredLeaf

    def fetch(self, source: Source, box: Box, out: npt.NDArray[Any]) -> None:
        """`out` holds the values of `box`, read from the checkpoint. Blocking."""
        self._reader.read(source.leaf.number, box, out)


def capture_stored(reader: LeafReader) -> Capture:
    """The checkpoint's structure and scalars, and its arrays as sources that read it."""
    opened = reader.opened
    kinds, values = opened.leaves.kind, opened.leaves.value
    result = Capture(
        opened.structure(),
        reader.paths,
        list(kinds),
        list(values),
        extra={leaf: dict(facts) for leaf, facts in opened.leaves.extra.items()},
    )
    adapter = StoredAdapter(reader)
    tied = opened.arrays.tied
    seen: dict[tuple[int, ...], int] = {}
    for leaf, kind in enumerate(kinds):
        spec = reader.spec(leaf)
        if spec is None:
            result.scalars[leaf] = decode_scalar(kind, values[leaf])
            continue
        number = len(result.sources)
        # Leaves all of whose arrays share their chunks are one array again.
        arrays = tuple([tied.get(piece.array, piece.array) for piece in reader.pieces[leaf]])
        first = seen.setdefault(arrays, number)
        if first != number:
            result.tied[number] = first
        facts = result.extra.get(leaf)
        result.sources.append(Source(spec, StoredLeaf(leaf), None, framework=kind, extra=facts))
        result.adapters.append(adapter)
        result.array_leaf.append(leaf)
    return result
