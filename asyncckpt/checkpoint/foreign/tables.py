"""Key tables: the keys of an OCDBT database or a directory, and the places of their values."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncckpt.checkpoint.foreign.listing import Listing, Range, damaged, located
from asyncckpt.checkpoint.foreign.ours import is_our_data, without_record
from asyncckpt.format.ocdbt.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    NUMBERED,
    Manifest,
    Version,
    decode_manifest,
    numbered_name,
)
from asyncckpt.format.ocdbt.walk import TreeDecoder, TreeLimits
from asyncckpt.ports import CheckpointFiles


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """Keys in order, with their values or the places of these.

    Attributes:
        listing: the files that hold the values.
        places: the value of each key, or the range of a file that holds it.
        is_directory: whether every value is a file whose path is the key.
    """

    listing: Listing
    places: Mapping[bytes, bytes | Range]
    is_directory: bool = False

    def nbytes(self, key: bytes) -> int:
        """Return the length of a value in a file; 0 for a value in the table itself."""
        place = self.places[key]
        return 0 if isinstance(place, bytes) else place[2]

    async def values(self, keys: Sequence[bytes], *, max_nbytes: int) -> list[bytes]:
        """Return the values of these keys; those in files have at most `max_nbytes` each."""
        found: dict[bytes, bytes] = {}
        ranges: dict[bytes, Range] = {}
        for key in keys:
            place = self.places[key]
            if isinstance(place, bytes):
                found[key] = place
                continue
            path, offset, nbytes = ranges[key] = place
            await self.listing.check(path, offset, nbytes)
            if nbytes > max_nbytes:
                raise damaged(
                    self.listing.files,
                    path,
                    f"{key!r} in {path} takes {nbytes} bytes, expected at most {max_nbytes}; use "
                    "another checkpoint",
                    offset=offset,
                    expected=max_nbytes,
                    found=nbytes,
                )
        read = await self.listing.read(list(ranges.values()))
        found.update(zip(ranges, read, strict=True))
        return [found[key] for key in keys]


def directory_table(listing: Listing) -> KeyTable:
    """Return the files of a directory as keys and values."""
    base, sizes = listing.path(""), listing.nbytes_of
    places = {path.removeprefix(base).encode(): (path, 0, n) for path, n in sizes.items()}
    return KeyTable(listing, dict(sorted(places.items())), is_directory=True)


async def read_database(listing: Listing, name: str = "") -> KeyTable:
    """Read the newest version of the OCDBT database in `name` below the listing's directory.

    Raises:
        CheckpointNotFoundError: it is the database of an asyncckpt checkpoint.
    """
    files = listing.files
    directory = listing.path(name) if name else listing.directory
    with located(files, directory):
        version = await _newest(listing, directory)
        if version is None or version.root is None:
            return KeyTable(listing, {})
        if is_our_data(version.root.file):
            raise without_record(files.location, is_database=not directory)
        root = version.root
        await listing.check(posixpath.join(directory, root.file), root.offset, root.nbytes)
        limits = TreeLimits.of_files(len(listing.nbytes_of), listing.nbytes)
        decoder = TreeDecoder(version, limits, base=posixpath.join(directory, ""))
        while wanted := decoder.wanted:
            ranges = [(posixpath.join(directory, w.file), w.offset, w.nbytes) for w in wanted]
            decoder.feed(await listing.read(ranges))
    return KeyTable(listing, decoder.values)


async def _newest(listing: Listing, directory: str) -> Version | None:
    files = listing.files
    manifest = await _manifest(files, directory, MANIFEST_NAME)
    if not manifest.numbered:
        return manifest.latest
    split = map(posixpath.split, listing.nbytes_of)
    names = [name for parent, name in split if parent == directory and NUMBERED.fullmatch(name)]
    if not names:
        return None
    name = max(names)
    newest = await _manifest(files, directory, name)
    found = None if newest.latest is None else newest.latest.generation
    if newest.uuid != manifest.uuid or found is None or numbered_name(found) != name:
        path = posixpath.join(directory, name)
        raise damaged(
            files,
            path,
            f"{path} holds generation {found}, or is of another database than {MANIFEST_NAME}; "
            "restore another step or copy",
            expected=int(name.rpartition(".")[2], 16),
            found=found,
        )
    return newest.latest


async def _manifest(files: CheckpointFiles, directory: str, name: str) -> Manifest:
    data = await files.read(posixpath.join(directory, name), max_nbytes=MAX_MANIFEST_NBYTES)
    return decode_manifest(data, file=name)


def merge(tables: Sequence[KeyTable]) -> KeyTable:
    """Merge the tables of several databases, which Orbax has not merged.

    The first table with a key wins: several processes may write the metadata of one array.
    """
    places: dict[bytes, bytes | Range] = {}
    for table in reversed(tables):
        places |= table.places
    return KeyTable(tables[0].listing, dict(sorted(places.items())))
