"""Findings of `verify` and `diff`: damage and differences."""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.pickled import PickledByName
from asyncckpt.reports.texts import counted, nbytes_text


@dataclass(frozen=True, slots=True)
class Damage(PickledByName):
    """One damaged place: leaf (None for metadata), file, byte offset (or None), reason."""

    leaf: str | None
    file: str
    offset: int | None
    reason: str

    def __str__(self) -> str:
        where = self.file if self.offset is None else f"{self.file} at byte {self.offset}"
        return f"{self.leaf or 'metadata'}: {where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class VerifyReport(PickledByName):
    """Outcome of reading and checking every byte of a checkpoint.

    Attributes:
        location: path or URL.
        step: step, None for one-shot checkpoints.
        damages: all damaged places; empty if the checkpoint is intact.
        leaf_count: leaves checked.
        read_nbytes: bytes read.
        total_s: seconds taken.
        unverified: paths that were read and decoded, but have no checksum (foreign checkpoints).
    """

    location: str
    step: int | None
    damages: tuple[Damage, ...]
    leaf_count: int
    read_nbytes: int
    total_s: float
    unverified: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every byte with a checksum is intact."""
        return not self.damages

    @property
    def outcome(self) -> str:
        """The result in one line."""
        if self.damages:
            return f"damaged in {counted(len(self.damages), 'place', 'places')}"
        read = f"{counted(self.leaf_count, 'leaf', 'leaves')}, {nbytes_text(self.read_nbytes)}"
        if not self.unverified:
            return f"{read} intact"
        return f"{read} readable, {len(self.unverified)} of them without checksums"

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{self.location}: {self.outcome}", *(f"  {damage}" for damage in self.damages)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class LeafDifference(PickledByName):
    """One leaf that differs between two checkpoints.

    Attributes:
        path: its path.
        what: first of ``kind`` (scalar or array, type of a scalar), ``shape``, ``dtype`` and
            ``value`` that differs.
        first: kind, shape, dtype, or value of a scalar in the first checkpoint.
        second: the same in the second checkpoint.
        size: elements of the arrays, 0 if their shapes or kinds differ.
        count: elements that differ.
        nan_count: elements that are NaN in only one checkpoint.
        largest: largest absolute difference between elements that are numbers in both.
        largest_relative: largest difference divided by the larger of the two magnitudes.
        index: index of the element with the largest difference (or of a NaN).
    """

    path: str
    what: str
    first: str
    second: str
    size: int = 0
    count: int = 0
    nan_count: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.path or '(the tree itself)'}: {self.what}"
        if self.first != self.second:
            text += f" {self.first} and {self.second}"
        if self.count:
            text += (
                f", {self.count} of {self.size} elements differ, by up to {self.largest:.6g} at "
                f"{list(self.index)} (relative {self.largest_relative:.3g})"
            )
            if self.nan_count:
                text += f", {self.nan_count} are NaN in one of them"
        return text


@dataclass(frozen=True, slots=True)
class DiffReport(PickledByName):
    """Differences between two checkpoints; truthy if there are none.

    Attributes:
        first: path or URL of the first checkpoint.
        second: path or URL of the second checkpoint.
        only_first: paths of leaves only in the first.
        only_second: paths of leaves only in the second.
        changed: leaves that differ, in the order of the first checkpoint.
        leaf_count: leaves in both.
        nbytes: bytes of array data compared, counted once.
        total_s: seconds taken.
        notes: other differences: containers, frameworks, formats.
    """

    first: str
    second: str
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[LeafDifference, ...]
    leaf_count: int
    nbytes: int
    total_s: float
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both have the same leaves, of equal kind, shape, dtype and value."""
        return not (self.only_first or self.only_second or self.changed)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            leaves = counted(self.leaf_count, "leaf", "leaves")
            return f"{self.first} and {self.second}: {leaves}, all equal"
        lines = [f"{self.first} and {self.second} differ"]
        lines += [f"  only in the first: {path}" for path in self.only_first]
        lines += [f"  only in the second: {path}" for path in self.only_second]
        return "\n".join([*lines, *(f"  {leaf}" for leaf in self.changed)])
