"""Where a restore puts what it reads: memory for every leaf, and which stored arrays fill it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from asyncckpt.checkpointer.match import Assignment
from asyncckpt.flow.arena import Arena
from asyncckpt.planning.overlap import BoxIndex
from asyncckpt.spec import DTYPES, ArraySpec, Box
from asyncckpt.stages.decode import Destination, flat_target
from asyncckpt.stages.opened import OpenCheckpoint

Memory = npt.NDArray[Any]


class Memories:
    """The memory of one restore.

    Attributes:
        destinations: what is fetched.
        owners: per destination, the assignment that it serves.
        sharers: by destination, further assignments that it serves (tied arrays).
    """

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._opened = opened
        tied = opened.arrays.tied
        self._tied = tied
        self._in_ties = set(tied) | set(tied.values())
        self._shared: dict[Any, int] = {}
        self.destinations: list[Destination] = []
        self.owners: list[Assignment] = []
        self.sharers: dict[int, list[Assignment]] = {}

    def allocate(self, arrays: Sequence[Assignment], *, in_place: bool) -> None:
        """Every assignment has memory and its destinations. Blocking.

        Args:
            arrays: assignments of array leaves.
            in_place: the buffers of targets are used where they have the stored dtype.
        """
        own: list[Assignment] = []
        for assignment in arrays:
            target, spec = assignment.target, assignment.spec
            assert spec is not None
            if in_place and target is not None and target.spec.dtype == spec.dtype:
                if target.buffer is not None:
                    assignment.values = target.buffer
                    continue
                if target.buffers:
                    assignment.parts = target.buffers
                    continue
            own.append(assignment)
        self._allocate_own(own)
        for assignment in arrays:
            self._aim(assignment)

    def _allocate_own(self, arrays: Sequence[Assignment]) -> None:
        """Memory of our own; leaves that were tied come back as one array where no target asks."""
        arena = Arena(sum(wanted_nbytes(assignment) for assignment in arrays))
        made: dict[tuple[int, ...], Memory] = {}
        tied = self._tied
        for assignment in arrays:
            spec = assignment.spec
            assert spec is not None
            boxes = None if assignment.target is None else assignment.target.boxes
            if boxes is not None:
                assignment.parts = [_take(arena, ArraySpec(b.shape, spec.dtype)) for b in boxes]
                continue
            if assignment.wanted is None and tied:
                firsts = tuple(tied.get(array, array) for array in assignment.arrays)
                if firsts not in made:
                    made[firsts] = _take(arena, spec)
                assignment.values = made[firsts]
                continue
            assignment.values = _take(arena, spec)

    def _aim(self, assignment: Assignment) -> None:
        boxes = None if assignment.target is None else assignment.target.boxes
        if boxes is None and not assignment.pieces:
            self._add(assignment, assignment.array, None, assignment.values)
            return
        for array, box, memory in self._overlaps(assignment, boxes):
            self._add(assignment, array, box, memory)

    def _overlaps(
        self, assignment: Assignment, boxes: Sequence[Box] | None
    ) -> Iterator[tuple[int, Box | None, Memory]]:
        """Array, wanted box of it (None: all), and its memory, for all that share elements."""
        spec = assignment.spec
        assert spec is not None
        memories = assignment.parts
        if boxes is None:
            boxes, memories = [Box.whole(spec.shape)], [assignment.values]
        opened = self._opened
        pieces = opened.pieces(assignment.saved, assignment.array)
        held = [Box(p.offset, opened.storage(p.array).spec.shape) for p in pieces]
        index = BoxIndex(held)
        for box, memory in zip(boxes, memories, strict=True):
            for number in index.meeting(box).tolist():
                common = held[number].intersect(box)
                assert common is not None
                part = common.relative_to(held[number].offset)
                where: Any = (*common.relative_to(box.offset).slices(), ...)
                whole = part.shape == held[number].shape
                yield pieces[number].array, None if whole else part, memory[where]

    def _add(self, assignment: Assignment, array: int, box: Box | None, values: Memory) -> None:
        assignment.waiting += 1
        if array in self._in_ties:
            # The chunks of tied arrays are read once into memory that their targets share.
            address = values.__array_interface__["data"][0]
            key = (self._opened.first_rows[array], box, address, values.shape, values.strides)
            number = self._shared.setdefault(key, len(self.destinations))
            if number < len(self.destinations):
                self.sharers.setdefault(number, []).append(assignment)
                return
        self.destinations.append(
            Destination(assignment.path, array, box, values, flat_target(values))
        )
        self.owners.append(assignment)


def wanted_nbytes(assignment: Assignment) -> int:
    """Bytes that restoring a leaf needs in memory, in the stored dtype."""
    spec, target = assignment.spec, assignment.target
    assert spec is not None
    if target is None or target.boxes is None:
        return spec.nbytes
    return sum(box.size for box in target.boxes) * spec.itemsize


def _take(arena: Arena, spec: ArraySpec) -> Memory:
    return arena.take(spec.nbytes).view(DTYPES[spec.dtype]).reshape(spec.shape)
