"""zarr arrays found in a foreign checkpoint, and their extents being collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.zarr import Shards, ZarrArray
from asyncckpt.stages.elsewhere.tables import KeyTable


@dataclass(frozen=True, slots=True, eq=False)
class FoundArray:
    """One array of a checkpoint.

    Attributes:
        name: its name in the checkpoint.
        table: where its chunks are.
        base: what their keys begin with.
        zarr: what its metadata document says.
        document: where that stands, for errors.
        complete: every chunk is stored; one that is not is damage.
    """

    name: str
    table: KeyTable
    base: bytes
    zarr: ZarrArray
    document: str
    complete: bool

    @property
    def shards(self) -> Shards | None:
        """How chunks stand in shards where they are read one by one.

        Where elements are transposed before they are put into shards, shards are read as a whole.
        """
        return None if self.zarr.chain.order else self.zarr.chain.shards

    def missing(self, chunk: str) -> CorruptCheckpointError:
        """The error for a chunk that must be there."""
        location = self.table.listing.files.location
        return CorruptCheckpointError(
            f"{location}: chunk {chunk} of array {self.name!r} is missing, and this checkpoint "
            "says that all are stored; use another checkpoint, or leave this array out with "
            "include=",
            file=self.document,
            location=location,
            expected="a chunk",
            found="nothing",
        )


@dataclass(slots=True, eq=False)
class Columns:
    """Extents by row, in any order.

    Attributes:
        number_of: files by path.
        row: the chunk.
        file: number of its file.
        offset: first byte in it.
        nbytes: length.
        values: chunks that stand in a table.
    """

    number_of: Mapping[str, int]
    row: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    values: dict[int, bytes] = field(default_factory=dict)

    def add(self, row: int, path: str, offset: int, nbytes: int) -> None:
        """The chunk stands there."""
        self.row.append(row)
        self.file.append(self.number_of[path])
        self.offset.append(offset)
        self.nbytes.append(nbytes)
