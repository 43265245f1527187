"""Key tables: the keys of an OCDBT database or directory, and the places of their values."""

from __future__ import annotations

import itertools
import posixpath
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.checkpoint.foreign.listing import Listing, damaged, located
from asyncckpt.checkpoint.foreign.ours import is_our_data, without_record
from asyncckpt.format.ocdbt import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    TreeDecoder,
    TreeLimits,
    Version,
    decode_manifest,
    generation_of,
    numbered_name,
)
from asyncckpt.planning.table import Column
from asyncckpt.ports import CheckpointFiles


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """Keys in order, and the places of their values by row.

    Attributes:
        listing: the files that hold them.
        keys: strictly increasing.
        paths: files, relative to the checkpoint.
        file: index into `paths`, -1 for inline values.
        offset: first byte of the value in its file.
        nbytes: its length.
        inline: the value, or None if it is in a file.
        is_directory: every value is a file of its own, whose path is the key.
    """

    listing: Listing
    keys: list[bytes]
    paths: tuple[str, ...]
    file: Column
    offset: Column
    nbytes: Column
    inline: list[bytes | None]
    is_directory: bool = False

    def find(self, key: bytes) -> int:
        """Return the row of a key, or -1."""
        row = bisect_left(self.keys, key)
        return row if row < len(self.keys) and self.keys[row] == key else -1

    async def values(self, rows: Sequence[int], *, max_nbytes: int) -> list[bytes]:
        """Read the values of some rows."""
        stored = [row for row in rows if self.inline[row] is None]
        ranges = [
            (self.paths[self.file[row]], int(self.offset[row]), int(self.nbytes[row]))
            for row in stored
        ]
        for row, (path, offset, nbytes) in zip(stored, ranges, strict=True):
            await self.listing.check(path, offset, nbytes)
            if nbytes > max_nbytes:
                raise damaged(
                    self.listing.files,
                    path,
                    f"{self.keys[row]!r} in {path} takes {nbytes} bytes, expected at most "
                    f"{max_nbytes}; use another checkpoint",
                    offset=offset,
                    expected=max_nbytes,
                    found=nbytes,
                )
        found = dict(zip(stored, await self.listing.read(ranges), strict=True))
        return [found.get(row) or self.inline[row] or b"" for row in rows]


def directory_table(listing: Listing) -> KeyTable:
    """Return the files of a directory as keys and values."""
    base = f"{listing.directory}/" if listing.directory else ""
    rows = sorted((path.removeprefix(base).encode(), path) for path in listing.nbytes_of)
    count = len(rows)
    return KeyTable(
        listing,
        [key for key, _ in rows],
        tuple(path for _, path in rows),
        np.arange(count, dtype=np.int64),
        np.zeros(count, np.int64),
        np.array([listing.nbytes_of[path] for _, path in rows], np.int64),
        [None] * count,
        is_directory=True,
    )


async def read_database(listing: Listing, name: str = "") -> KeyTable:
    """Read the newest version of the OCDBT database in a directory.

    Args:
        listing: files of the checkpoint's item, those of the database among them.
        name: directory of the database in that of the listing.

    Raises:
        CheckpointNotFoundError: it is the database of an asyncckpt checkpoint.
    """
    files = listing.files
    directory = listing.path(name) if name else listing.directory
    with located(files, directory):
        version = await _newest(files, listing, directory)
        if version is None or version.root is None:
            return _table(listing, [], (), ([], [], []), [])
        if is_our_data(version.root.file):
            raise without_record(files.location, is_database=not directory)
        root = version.root
        await listing.check(posixpath.join(directory, root.file), root.offset, root.nbytes)
        decoder = TreeDecoder(version, TreeLimits.of_files(len(listing.nbytes_of), listing.nbytes))
        while wanted := decoder.wanted:
            ranges = [(posixpath.join(directory, w.file), w.offset, w.nbytes) for w in wanted]
            decoder.feed(await listing.read(ranges))
        columns = decoder.columns()
    return _table(
        listing,
        columns.keys,
        tuple(posixpath.join(directory, path) for path in columns.files),
        (columns.file, columns.offset, columns.nbytes),
        columns.inline,
    )


async def _newest(files: CheckpointFiles, listing: Listing, directory: str) -> Version | None:
    manifest = await _manifest(files, directory, MANIFEST_NAME)
    if not manifest.numbered:
        return manifest.latest
    generations = [
        generation_of(posixpath.basename(path))
        for path in listing.nbytes_of
        if posixpath.dirname(path) == directory
    ]
    newest = max((n for n in generations if n is not None), default=None)
    if newest is None:
        return None
    name = numbered_name(newest)
    numbered = await _manifest(files, directory, name)
    found = numbered.latest.generation if numbered.latest is not None else None
    if numbered.numbered or numbered.uuid != manifest.uuid or found != newest:
        path = posixpath.join(directory, name)
        raise damaged(
            files,
            path,
            f"{path} holds generation {found}, or is of another database than {MANIFEST_NAME}; "
            "restore another step or copy",
            expected=newest,
            found=found,
        )
    return numbered.latest


async def _manifest(files: CheckpointFiles, directory: str, name: str) -> Manifest:
    data = await files.read(posixpath.join(directory, name), max_nbytes=MAX_MANIFEST_NBYTES)
    return decode_manifest(data, file=name)


def merge(tables: Sequence[KeyTable]) -> KeyTable:
    """Merge the tables of several databases, as Orbax leaves them unmerged.

    If several have a key, the first one counts: every process writes the metadata of an array that
    it holds parts of.
    """
    paths = tuple(itertools.chain.from_iterable(table.paths for table in tables))
    bases = np.cumsum([0, *(len(table.paths) for table in tables)])
    keys = list(itertools.chain.from_iterable(table.keys for table in tables))
    inline = list(itertools.chain.from_iterable(table.inline for table in tables))
    file = np.concatenate(
        [
            np.where(table.file < 0, -1, table.file + base)
            for table, base in zip(tables, bases[:-1], strict=True)
        ]
    )
    offset = np.concatenate([table.offset for table in tables])
    nbytes = np.concatenate([table.nbytes for table in tables])
    order: list[int] = []
    for row in sorted(range(len(keys)), key=keys.__getitem__):
        if not order or keys[order[-1]] != keys[row]:
            order.append(row)
    rows = np.array(order, np.int64)
    return _table(
        tables[0].listing,
        [keys[row] for row in order],
        paths,
        (file[rows], offset[rows], nbytes[rows]),
        [inline[row] for row in order],
    )


def _table(
    listing: Listing,
    keys: list[bytes],
    paths: tuple[str, ...],
    columns: tuple[Sequence[int] | Column, Sequence[int] | Column, Sequence[int] | Column],
    inline: list[bytes | None],
) -> KeyTable:
    file, offset, nbytes = (np.asarray(column, np.int64) for column in columns)
    return KeyTable(listing, keys, paths, file, offset, nbytes, inline)
