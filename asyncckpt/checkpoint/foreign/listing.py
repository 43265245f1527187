"""Files below a directory with their sizes, and reads of many small ranges of them."""

# Rule 1: nothing is read or allocated before the listing shows that it exists. Links are not
#   listed: files reached through one are refused by the store.

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from asyncckpt.checkpoint.foreign.access import side_by_side
from asyncckpt.checkpoint.foreign.ours import is_our_data, without_record
from asyncckpt.checkpoint.metadata import missing
from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.format.damage import path_fault
from asyncckpt.planning.coalesce import coalesce
from asyncckpt.ports import Bytes, CheckpointFiles

MAX_FILES = 1 << 20
"""Files and directories of one checkpoint."""

MAX_DEPTH = 320
"""Deepest directory: a tree's deepest container plus the dimensions of a cell."""

GAP_NBYTES = 64 << 10
"""Largest gap of unwanted bytes inside of one read."""

READ_NBYTES = 4 << 20
"""Longest read of several ranges."""

Range = tuple[str, int, int]
"""File relative to the checkpoint, first byte, length."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Regular files below one directory of a checkpoint.

    Attributes:
        files: access to the checkpoint.
        directory: the directory, relative to the checkpoint; empty for the checkpoint itself.
        nbytes_of: size of every file, by its path relative to the checkpoint.
    """

    files: CheckpointFiles
    directory: str
    nbytes_of: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.nbytes_of.values())

    def path(self, name: str) -> str:
        """Return the path of a name in the directory."""
        return posixpath.join(self.directory, name)

    def has(self, name: str) -> bool:
        """Return whether the directory has a regular file of this name."""
        return self.path(name) in self.nbytes_of

    def refuse_ours(self) -> None:
        """Raise if a file is one that only asyncckpt checkpoints have.

        Raises:
            CheckpointNotFoundError: one is: the checkpoint has lost its record.
        """
        prefix = self.path("d/")
        for path in self.nbytes_of:
            if path.startswith(prefix) and is_our_data(path[len(prefix) - 2 :]):
                raise without_record(self.files.location, is_database=not self.directory)

    async def check(self, path: str, offset: int, nbytes: int) -> None:
        """Raise unless the range is inside its file.

        Raises:
            CorruptCheckpointError: it is outside, or the file is missing or a link.
        """
        size = self.nbytes_of.get(path)
        if size is None:
            await refuse_link(self.files, path)
            raise missing(self.files.location, path)
        if offset > size or nbytes > size - offset:
            raise CorruptCheckpointError(
                f"{self.files.location}: {path} ends at byte {size}, the metadata places something "
                f"at bytes {offset} to {offset + nbytes} of it; it is truncated or damaged",
                file=path,
                offset=offset,
                location=self.files.location,
                expected=offset + nbytes,
                found=size,
            )

    async def read(self, ranges: Sequence[Range]) -> list[bytes]:
        """Read the bytes of every range; neighbours are read together.

        Raises:
            CorruptCheckpointError: a range is outside its file.
        """
        if not ranges:
            return []
        for path, offset, nbytes in ranges:
            await self.check(path, offset, nbytes)
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        in_order = [ranges[n] for n in order]
        gap_nbytes = max(GAP_NBYTES, self.files.capabilities.read_gap_nbytes)
        groups = coalesce(
            np.array([offset for _, offset, _ in in_order], np.int64),
            np.array([nbytes for _, _, nbytes in in_order], np.int64),
            gap_nbytes=gap_nbytes,
            limit_nbytes=READ_NBYTES,
            starts=np.array(
                [n == 0 or in_order[n - 1][0] != row[0] for n, row in enumerate(in_order)], np.bool_
            ),
        ).tolist()
        result = [b""] * len(ranges)
        runs = list(zip(groups, [*groups[1:], len(order)], strict=True))

        async def read_run(run: tuple[int, int]) -> None:
            first, stop = run
            path, base, _ = in_order[first]
            end = max(offset + nbytes for _, offset, nbytes in in_order[first:stop])
            data = np.empty(end - base, np.uint8)
            await self._read(path, base, data)
            for row in range(first, stop):
                at = in_order[row][1] - base
                result[order[row]] = data[at : at + in_order[row][2]].tobytes()

        await side_by_side(self.files, read_run, runs)
        return result

    async def _read(self, path: str, offset: int, data: Bytes) -> None:
        try:
            await self.files.read_into(path, offset, [data])
        except CheckpointNotFoundError as error:
            raise missing(self.files.location, path) from error


async def refuse_link(files: CheckpointFiles, path: str) -> None:
    """Raise if a path is or leads through a link.

    Raises:
        CorruptCheckpointError: there is a link.
    """
    try:
        await files.entries(path, max_entries=MAX_FILES)
    except CheckpointNotFoundError:
        return


async def list_files(files: CheckpointFiles, directory: str) -> Listing:
    """List all regular files below a directory. Links are neither listed nor followed.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CorruptCheckpointError: there are too many files, or they are too deep.
    """
    nbytes_of: dict[str, int] = {}
    count = 0

    async def look(path: str) -> list[str]:
        nonlocal count
        entries = await files.entries(path, max_entries=MAX_FILES)
        count += len(entries)
        if count > MAX_FILES or depth > MAX_DEPTH:
            raise CorruptCheckpointError(
                f"{files.location}: more than {MAX_FILES} files, or deeper than {MAX_DEPTH} "
                "directories; this is not a checkpoint, or a hostile one",
                file=path,
                location=files.location,
                expected=MAX_FILES,
                found=count,
            )
        below: list[str] = []
        for entry in entries:
            inner = posixpath.join(path, entry.name)
            if path_fault(inner) is not None:
                continue
            if entry.is_directory:
                below.append(inner)
            else:
                nbytes_of[inner] = entry.nbytes
        return below

    level, depth = [directory], 0
    while level:
        found = await side_by_side(files, look, level)
        level, depth = list(itertools.chain.from_iterable(found)), depth + 1
    return Listing(files, directory, dict(sorted(nbytes_of.items())))


def place(files: CheckpointFiles, directory: str) -> str:
    """Return the directory's name for errors."""
    return posixpath.join(files.location, directory) if directory else files.location


@contextmanager
def located(files: CheckpointFiles, directory: str = "") -> Iterator[None]:
    """Add the location to errors of parsers; their files become relative to the checkpoint."""
    try:
        yield
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        if error.location is not None:
            raise
        kind: type[CorruptCheckpointError | UnsupportedFormatError] = (
            UnsupportedFormatError
            if isinstance(error, UnsupportedFormatError)
            else CorruptCheckpointError
        )
        raise kind(
            f"{place(files, directory)}: {error}",
            file=None if error.file is None else posixpath.join(directory, error.file),
            offset=error.offset,
            location=files.location,
            expected=error.expected,
            found=error.found,
        ) from None
