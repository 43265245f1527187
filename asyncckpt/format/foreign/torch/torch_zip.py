"""Archives of `torch.save`, whose tensors are found from their first bytes.

An archive is a zip file of uncompressed members: `data.pkl`, a few tiny ones (`byteorder`,
`.format_version`, …), then the payloads `data/0`, `data/1`, … Sizes follow the members and are in
the directory at the end. But a pickle ends with an opcode, so that the head of an archive is enough
to find a tensor. Source: APPNOTE.TXT 6.3.10, `torch.serialization` and
`caffe2/serialize/inline_container.cc` of torch 2.13.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.damage import corrupt, unsupported
from asyncckpt.format.foreign.torch.torch_pickle import SavedTensor, load_tensor
from asyncckpt.format.foreign.torch.unpickle import Allowance, PickleSource

HEAD_NBYTES = 1024
"""Enough for the head of nearly every tensor: 704 bytes with torch 2.13."""

LONG_HEAD_NBYTES = 64 << 10
"""Longest head to search; writers make shorter ones."""

_HEADER = struct.Struct("<4sHHHHHIIIHH")
_HEADER_MAGIC = b"PK\x03\x04"
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_DESCRIPTORS = (struct.Struct("<4sIII"), struct.Struct("<4sIQQ"))
_SIZES_FOLLOW = 1 << 3
_UTF8 = 1 << 11
_MAX_SMALL_NBYTES = 256


class ShortHeadError(Exception):
    """The archive's head is longer than the given bytes."""


@dataclass(frozen=True, slots=True)
class Member:
    """Member of an archive: name, first byte, and size (None if stored after the member)."""

    name: str
    start: int
    nbytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Archive:
    """First bytes of one archive of `nbytes`; errors call it `what`, at byte `base` of `file`."""

    data: bytes
    nbytes: int
    what: str
    file: str
    base: int

    def pickle(self) -> PickleSource:
        """Return the pickle, which is the first member."""
        return PickleSource(self.data, self.what, self.file, self.base, self._first().start)

    def tensor(self, allowance: Allowance) -> tuple[SavedTensor, int]:
        """Return the archive's one tensor, and the offset of its payload in the archive.

        Raises:
            ShortHeadError: more bytes are needed.
        """
        try:
            tensor, nbytes = load_tensor(self.pickle(), allowance)
        except CorruptCheckpointError as error:
            raise self._short_or(error) from None
        key = tensor.storage.key
        return tensor, self.payloads(nbytes, {key: tensor.storage.nbytes})[key]

    def payloads(self, pickle_nbytes: int, nbytes_of: Mapping[str, int]) -> dict[str, int]:
        """Return the offsets of the payloads by key; `nbytes_of` has the sizes of all storages.

        Raises:
            ShortHeadError: more bytes are needed.
        """
        found: dict[str, int] = {}
        member, nbytes = self._first(), pickle_nbytes
        while len(found) < len(nbytes_of):
            member = self._member(self._end(member, nbytes))
            folder, _, key = member.name.partition("/")
            if folder == "data" and key in nbytes_of:
                found[key], nbytes = member.start, nbytes_of[key]
                if member.start + nbytes > self.nbytes:
                    raise self.corrupt(f"the storage {key[:80]!r} reaches past its end")
            else:
                nbytes = self._other(member)
        return found

    def _other(self, member: Member) -> int:
        """Return the length of a tiny member; refuse a foreign byte order."""
        nbytes = member.nbytes
        if nbytes is None:
            most = member.start + _MAX_SMALL_NBYTES + 4
            end = self.data.find(_DESCRIPTOR_MAGIC, member.start, most)
            if end < 0:
                error = self.corrupt(f"its member {member.name[:80]!r} does not end", member.start)
                raise self._short_or(error)
            nbytes = end - member.start
        order = self.data[member.start : member.start + nbytes]
        if member.name == "byteorder" and order != b"little":
            raise unsupported(
                f"{self.what} was written on a machine with another byte order "
                f"({order[:20]!r}); only little endian is read",
                file=self.file,
                offset=self.base + member.start,
                expected="little",
                found=order[:20],
            )
        return nbytes

    def _first(self) -> Member:
        member = self._member(0)
        if member.name != "data.pkl":
            raise self.corrupt(f"its first member is {member.name[:80]!r}", 0)
        return member

    def _member(self, at: int) -> Member:
        """Return the member whose header begins at byte `at`."""
        (magic, _, flags, method, _, _, _, packed, nbytes, name_nbytes, extra_nbytes) = (
            _HEADER.unpack(self._bytes(at, _HEADER.size))
        )
        if magic != _HEADER_MAGIC:
            raise self.corrupt(f"{magic!r} is not the header of a member of a zip file", at)
        if method or flags & ~(_SIZES_FOLLOW | _UTF8):
            raise unsupported(
                f"{self.what} is a zip file with compressed or encrypted members; torch.save "
                "stores them uncompressed",
                file=self.file,
                offset=self.base + at,
                expected="stored members",
                found=f"method {method}, flags {flags:#x}",
            )
        name = self._bytes(at + _HEADER.size, name_nbytes).decode("utf-8", "replace")
        start = at + _HEADER.size + name_nbytes + extra_nbytes
        if start > self.nbytes or (packed != nbytes and not flags & _SIZES_FOLLOW):
            raise self.corrupt(f"the header of its member {name[:80]!r} contradicts itself", at)
        known = None if flags & _SIZES_FOLLOW or nbytes == 0xFFFFFFFF else nbytes
        return Member(name.partition("/")[2], start, known)

    def _end(self, member: Member, nbytes: int) -> int:
        """Return the offset after a member of `nbytes` and its data descriptor."""
        end = member.start + nbytes
        if member.nbytes is not None:
            if member.nbytes != nbytes:
                raise self.corrupt(
                    f"its member {member.name[:80]!r} has {member.nbytes} bytes, not {nbytes}",
                    member.start,
                )
            return end
        for layout in _DESCRIPTORS:
            magic, _, packed, size = layout.unpack(self._bytes(end, layout.size))
            if (magic, packed, size) == (_DESCRIPTOR_MAGIC, nbytes, nbytes):
                return end + layout.size
        raise self.corrupt(f"its member {member.name[:80]!r} has no data descriptor", end)

    def _bytes(self, at: int, nbytes: int) -> bytes:
        if at + nbytes > self.nbytes:
            raise self.corrupt("it ends inside the header of a member", self.nbytes)
        if at + nbytes > len(self.data):
            raise self._short_or(self.corrupt("its head is too long", at))
        return self.data[at : at + nbytes]

    def _short_or(self, error: CorruptCheckpointError) -> Exception:
        """Return the error, or a request for the longest head if less has been read."""
        longest = min(self.nbytes, LONG_HEAD_NBYTES)
        return ShortHeadError() if len(self.data) < longest else error

    def corrupt(self, reason: str, at: int = 0) -> CorruptCheckpointError:
        """Return the error for damage at byte `at` of the archive."""
        return corrupt(self.what, reason, file=self.file, offset=self.base + at)
