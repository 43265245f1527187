"""The contents of fixed names, kept in objects of the attempt until (and after) it has won.

Names such as `default/manifest.ocdbt` are the same for every attempt: whoever wrote one before its
record would destroy those of a checkpoint that stands, or of the attempt that wins. Their contents
are therefore stored beforehand, in objects that only this attempt writes, and from there whoever
finds a record without them can write the fixed names.

One such object is ``magic, header length, header, contents, CRC-32C``: 8 bytes, 4 bytes little
endian, JSON with the save id and ``[path, length]`` of every file, their bytes in that order, and 4
bytes little endian over all before.
"""

# Rule 1: what `put` returned for is durable in an object of the attempt.
# Rule 2: files that are put at the same moment share one object; an object is sent once, under a
#   number that is not used again, so that a late try can only repeat the same bytes.
# Rule 3: an object that cannot be read to the last byte gives nothing.

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.flow.shield import leading_error
from asyncckpt.format.crc import crc32c
from asyncckpt.format.paths import path_fault
from asyncckpt.options import GIB, MIB
from asyncckpt.stores.objects.client import RequestError
from asyncckpt.stores.objects.context import INLINE_NBYTES, Context
from asyncckpt.stores.objects.layout import RECORD, fixed_number, fixed_owner, fixed_path, join
from asyncckpt.stores.objects.layout import owner as owner_of

MAGIC = b"ASYCKFX1"
_LENGTH = struct.Struct("<I")

MAX_FIXED_NBYTES = 1 * GIB
"""A larger object is none of ours: the contents of a save of 100,000 leaves take some 20 MiB."""

MAX_FILES = 1 << 16
MAX_HEADER_NBYTES = 16 * MIB

ENTRIES_MAX = 1000
"""Entries of a checkpoint's first level that are looked at: ours come before all letters."""


@dataclass(slots=True, eq=False)
class _Waiting:
    path: str
    data: bytes
    stored: bool = False


class FixedContents:
    """The contents of the fixed names of one attempt.

    Attributes:
        files: what is durable so far, by path.
        keys: objects that hold them, or may.
    """

    def __init__(self, context: Context, prefix: str, save_id: str) -> None:
        self.files: dict[str, bytes] = {}
        self.keys: set[str] = set()
        self._context = context
        self._prefix = prefix
        self._save_id = save_id
        self._waiting: list[_Waiting] = []
        self._sending = asyncio.Lock()
        self._count = 0

    async def put(self, path: str, data: bytes) -> None:
        """The content is durable, and `files` has it.

        Raises:
            RequestError: it is not.
        """
        own = _Waiting(path, data)
        self._waiting.append(own)
        await asyncio.sleep(0)  # for those that are put in the same breath
        async with self._sending:
            if own.stored:
                return
            batch, self._waiting = self._waiting, []
            try:
                await self._send({waiting.path: waiting.data for waiting in batch})
            except BaseException:
                self._waiting = batch + self._waiting
                raise
            for waiting in batch:
                waiting.stored = True

    async def _send(self, files: Mapping[str, bytes]) -> None:
        key = join(self._prefix, fixed_path(self._save_id, self._count))
        self._count += 1
        if sum(map(len, files.values())) <= INLINE_NBYTES:
            body = encode_fixed(self._save_id, files)
        else:
            body = await self._context.workers.run(encode_fixed, self._save_id, files)
        self.keys.add(key)
        await self._context.requests.replace(key, body)
        self.files.update(files)


def encode_fixed(save_id: str, files: Mapping[str, bytes]) -> bytes:
    """One object with these contents."""
    rows = [[path, len(data)] for path, data in files.items()]
    header = json.dumps({"save_id": save_id, "files": rows}, separators=(",", ":")).encode()
    body = b"".join([MAGIC, _LENGTH.pack(len(header)), header, *files.values()])
    return body + _LENGTH.pack(crc32c(body))


def decode_fixed(data: bytes, *, save_id: str, file: str, location: str) -> dict[str, bytes]:
    """The contents by path.

    Args:
        data: the object.
        save_id: whose it must be.
        file: its path in the checkpoint, for errors.
        location: the checkpoint, for errors.

    Raises:
        CorruptCheckpointError: it is damaged, or not what its name says.
    """

    def refuse(why: str) -> NoReturn:
        raise CorruptCheckpointError(
            f"{location}/{file}: {why}; the files it holds are copies for other programs, and the "
            "checkpoint itself needs none of them",
            file=file,
            location=location,
            found=why,
        )

    head = len(MAGIC) + _LENGTH.size
    if len(data) < head + _LENGTH.size or not data.startswith(MAGIC):
        refuse(f"{len(data)} bytes that do not begin with {MAGIC!r}")
    view = memoryview(data)
    found, expected = crc32c(view[: -_LENGTH.size]), _LENGTH.unpack(view[-_LENGTH.size :])[0]
    if found != expected:
        refuse(f"its CRC-32C is {found:08x}, expected {expected:08x}")
    nbytes = _LENGTH.unpack(view[len(MAGIC) : head])[0]
    if nbytes > min(MAX_HEADER_NBYTES, len(data) - head - _LENGTH.size):
        refuse(f"its header of {nbytes} bytes does not fit")
    try:
        header = json.loads(bytes(view[head : head + nbytes]))
        rows: Sequence[tuple[str, int]] = [(str(path), int(size)) for path, size in header["files"]]
        owner = str(header["save_id"])
    except (ValueError, TypeError, KeyError, RecursionError):
        refuse("its header is malformed")
    if owner != save_id:
        refuse(f"it is of the save {owner[:64]!r}")
    if len(rows) > MAX_FILES or any(
        size < 0 or path_fault(path) is not None or path == RECORD or owner_of(path) is not None
        for path, size in rows
    ):
        refuse("its header lists files that no checkpoint has")
    files: dict[str, bytes] = {}
    start = head + nbytes
    for path, size in rows:
        files[path] = bytes(view[start : start + size])
        start += size
    if start != len(data) - _LENGTH.size:
        refuse(f"its header lists {start - head - nbytes} bytes, and there are others")
    return files


async def read_fixed(context: Context, name: str, path: str, save_id: str) -> dict[str, bytes]:
    """The contents in one object; none if it is gone.

    Raises:
        CorruptCheckpointError: it is damaged.
        RequestError: it could not be read.
    """
    location = context.requests.location(name)
    try:
        data = await context.requests.read(join(name, path), max_nbytes=MAX_FIXED_NBYTES)
    except RequestError as error:
        if error.kind == "missing":
            return {}
        raise
    if data is None:
        raise CorruptCheckpointError(
            f"{location}/{path}: more than {MAX_FIXED_NBYTES} bytes, which this release never "
            "writes; it is not read",
            file=path,
            location=location,
            expected=MAX_FIXED_NBYTES,
        )
    if len(data) <= INLINE_NBYTES:
        return decode_fixed(data, save_id=save_id, file=path, location=location)
    return await context.workers.run(
        decode_fixed, data, save_id=save_id, file=path, location=location
    )


async def load_fixed(context: Context, name: str, save_id: str) -> dict[str, bytes]:
    """The contents of all fixed names of a save, by path; none if nothing of them is there.

    Raises:
        CorruptCheckpointError: an object that holds them is damaged.
        RequestError: they could not be read.
    """
    listed = await context.requests.list(name, recursive=False, limit=ENTRIES_MAX)
    paths = [entry.key.removeprefix(f"{name}/") for entry in listed if not entry.is_prefix]
    return await load_objects(context, name, [p for p in paths if fixed_owner(p) == save_id])


async def load_objects(context: Context, name: str, paths: Sequence[str]) -> dict[str, bytes]:
    """The contents in these objects, which are of one save, by path. Errors: as `load_fixed`."""
    loaded: dict[str, dict[str, bytes]] = {}

    async def load(path: str) -> None:
        loaded[path] = await read_fixed(context, name, path, fixed_owner(path) or "")

    try:
        async with asyncio.TaskGroup() as group:
            for path in paths:
                group.create_task(load(path))
    except BaseExceptionGroup as errors:
        raise leading_error(errors) from None
    # A save whose index was made twice has put its manifest twice: the last one counts.
    files: dict[str, bytes] = {}
    for path in sorted(paths, key=fixed_number):
        files |= loaded[path]
    return files


async def write_fixed(context: Context, name: str, files: Mapping[str, bytes]) -> None:
    """The fixed names have these contents; all are written at the same time.

    Raises:
        RequestError: not all have.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for path, data in files.items():
                group.create_task(context.requests.replace(join(name, path), data))
    except BaseExceptionGroup as errors:
        raise leading_error(errors) from None
