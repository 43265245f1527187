"""Matched leaves: what a restore reads, and into what it restores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.format.record_values import Piece
from asyncckpt.ports import Target
from asyncckpt.restore.request import TargetLeaves, Wanted
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import Structure

NO_FACTS: Mapping[str, Any] = {}


class LeafRestore(NamedTuple):
    """One leaf to restore: its source and its destination.

    Attributes:
        number: ordinal of the target's leaf, or of the saved leaf without one.
        saved: ordinal of the saved leaf.
        array: the (first) array that holds it; -1 for scalars of the record.
        pieces: the arrays that hold it, if there are several.
        spec: shape and stored dtype; None for scalars of the record.
        scalar: value of a scalar of the record; a rank-0 array if the target is an array.
        want: the target's leaf, or None.
        target: the adapter's description of `want`, if it is an array.
    """

    number: int
    path: str
    saved: int
    array: int = -1
    pieces: tuple[Piece, ...] = ()
    spec: ArraySpec | None = None
    scalar: Any = None
    want: Wanted | None = None
    target: Target | None = None

    def arrays(self) -> list[int]:
        """Return the arrays that hold the leaf."""
        return [piece.array for piece in self.pieces] or [self.array]


class MatchedArrays(Sequence[LeafRestore]):
    """Arrays to restore, by column; `arrays[place]` makes a `LeafRestore` on demand.

    Attributes:
        number: ordinals, as `LeafRestore.number`.
        saved: ordinals of the saved leaves.
        described: by place, the arrays that need a description: they or their targets are not
            ordinary (`match._ordinary`, `TargetLeaves.specs`).
    """

    def __init__(
        self,
        opened: OpenCheckpoint,
        paths: Sequence[str],
        array_of: Sequence[int],
        targets: TargetLeaves | None = None,
    ) -> None:
        self._opened = opened
        self._paths = paths
        self._array_of = array_of
        self.targets = targets
        self.number: list[int] = []
        self.saved: list[int] = []
        self.described: dict[int, LeafRestore] = {}

    def __len__(self) -> int:
        return len(self.saved)

    def __getitem__(self, place: Any) -> Any:
        saved, number = self.saved[place], self.number[place]
        if place in self.described:
            return self.described[place]
        array = self._array_of[saved]
        spec = self._opened.storage(array).spec
        want = None if self.targets is None else self.targets[number]
        target = None if want is None else want.target
        return LeafRestore(number, self._paths[saved], saved, array, (), spec, None, want, target)

    def append(self, leaf: LeafRestore) -> None:
        """Add an array with its description."""
        self.described[len(self.saved)] = leaf
        self.number.append(leaf.number)
        self.saved.append(leaf.saved)

    def paths(self) -> list[str]:
        """Return the path of each array."""
        return list(map(self._paths.__getitem__, self.saved))

    def arrays(self) -> list[int]:
        """Return the (first) stored array of each leaf."""
        return list(map(self._array_of.__getitem__, self.saved))

    def ordinary(self) -> list[int]:
        """Return the places of arrays without a description."""
        return [place for place in range(len(self.saved)) if place not in self.described]


@dataclass(frozen=True, slots=True, eq=False)
class Matching:
    """The leaves to restore, and how checkpoint and target differ.

    Attributes:
        structure: the containers of the checkpoint.
        arrays: arrays to restore. Objects with a state dict also get arrays that their present
            state lacks (as that of a fresh optimizer does), without a leaf of the target.
        scalars: scalars of the record to restore, likewise.
        missing: paths of the target that the checkpoint lacks; for an object with a state dict, the
            object's path.
        unexpected: paths of the checkpoint that the target lacks.
        wanted: number of the target's leaves that the checkpoint should have.
        matched: number of these leaves that it has.
    """

    structure: Structure
    arrays: MatchedArrays
    scalars: Sequence[LeafRestore]
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    wanted: int = 0
    matched: int = 0

    @property
    def leaves(self) -> list[LeafRestore]:
        """All leaves to restore: arrays, then scalars."""
        return [*self.arrays, *self.scalars]
