"""Comparison of the OCDBT database with the commit record and the chunk index.

Restores use the chunk index; TensorStore and Orbax use the database. Both must lead to the same
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.manifest import decode_manifest
from asyncckpt.format.ocdbt.walk import decode_tree
from asyncckpt.format.record_values import CommitRecord
from asyncckpt.format.zarr3 import CRC_NBYTES, chunk_keys, encode_metadata, metadata_key

PROBLEMS_MAX = 20
"""Most contradictions listed; a single one is enough to distrust the database."""


def check_database(
    record: CommitRecord,
    first_rows: Sequence[int],
    index: ChunkIndex,
    contents: Mapping[str, bytes],
) -> list[str]:
    """Return descriptions of the contradictions. Blocking.

    `first_rows` has the first row of every array in the index. `contents` has the bytes of the
    manifest and of the index file, by path.
    """
    prefix = f"{record.database}/"
    files = {path.removeprefix(prefix): data for path, data in contents.items()}
    # Not by checksum: a manifest ends with its own CRC, so all of one length have the same CRC.
    if files.get("manifest.ocdbt") != record.manifest:
        return ["manifest.ocdbt differs from the manifest in the commit record"]

    def fetch(location: Location) -> bytes:
        data = files.get(location.file, b"")
        return data[location.offset : location.offset + location.nbytes]

    try:
        manifest = decode_manifest(record.manifest, file="manifest.ocdbt")
        if manifest.latest is None:
            return ["manifest.ocdbt has no version of the database"]
        found = decode_tree(manifest.latest, fetch)
    except AsyncCheckpointError as error:
        return [str(error)]
    problems: list[str] = []
    documents = [encode_metadata(s.spec, s.chunk_shape, s.zstd_level) for s in record.specs]
    expected = 0
    names = [file.path.removeprefix(prefix) for file in record.files]
    for array, name in enumerate(record.arrays.name):
        stored = record.specs[record.arrays.spec[array]]
        expected += 1
        if found.get(metadata_key(name)) != documents[record.arrays.spec[array]]:
            problems.append(f"array {name!r}: zarr.json is missing or differs from the record")
        for number, key in enumerate(chunk_keys(name, stored.grid.counts)):
            row = first_rows[array] + number
            expected += 1
            value = found.get(key)
            if value is None or not _same(value, index, row, names):
                problems.append(
                    f"{key.decode()}: missing, or at another place than in the chunk index"
                )
        if len(problems) >= PROBLEMS_MAX:
            return problems
    if len(found) != expected:
        problems.append(f"the database has {len(found)} keys, the record needs {expected}")
    return problems


def _same(
    value: bytes | tuple[str, int, int], index: ChunkIndex, row: int, names: list[str]
) -> bool:
    nbytes = int(index.nbytes[row])
    if isinstance(value, bytes):
        # A tied leaf has a copy of the value under its own key.
        return len(value) == nbytes and crc32c(value[:-CRC_NBYTES]) == int(index.crc32c[row])
    return value == (names[int(index.file[row])], int(index.offset[row]), nbytes)
