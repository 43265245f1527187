"""Claims: which process may write below a root, and which saves it inherited.

Both are JSON objects that end with their checksum, like the commit record. A claim that exists
takes its number, the epoch; its content is only information. On object stores, the list of the
saves that it inherited determines which older records are valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.fields import check_form, parse_object
from asyncckpt.format.record import is_sealed, seal
from asyncckpt.options import KIB, MIB

CLAIM_NBYTES = 4 * KIB
"""Largest claim."""

INHERITED_NBYTES = 64 * MIB
"""Largest list: 1.8 million steps."""

_CLAIM = "asyncckpt-claim"
_INHERITED = "asyncckpt-inherited"
_VERSION = 1

_MAX = (1 << 63) - 1
_HEAD: dict[str, Any] = {"format": str, "version": _MAX, "epoch": _MAX, "crc32c": str}
_CLAIM_FORM = {
    **_HEAD,
    "token": re.compile(r"[0-9a-f]{32}"),
    "host": re.compile(r"[^\x00-\x1f\x7f]{0,255}"),
    "pid": _MAX,
    "created_ns": _MAX,
}
_INHERITED_FORM = {**_HEAD, "save_ids": [str]}
_INHERITED_HEAD = re.compile(rb'\{"format":"asyncckpt-inherited","version":([0-9]{1,9}),')


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one job to write below a root.

    Attributes:
        epoch: its number, from 1; every claim ends all lower ones.
        token: 32 hexadecimal digits, unique to the claim.
        host: host of the process that made it.
        pid: process id on that host.
        created_ns: time by the clock of that host, in nanoseconds since 1970; for information.
    """

    epoch: int
    token: str
    host: str
    pid: int
    created_ns: int


def encode_claim(claim: Claim) -> bytes:
    """Encode a claim."""
    return _sealed({"format": _CLAIM, "version": _VERSION, **asdict(claim)})


def decode_claim(data: bytes) -> Claim | None:
    """Decode a claim; return None if it is damaged or of a newer version."""
    found = _document(data, _CLAIM, _CLAIM_FORM, CLAIM_NBYTES)
    return None if found is None else Claim(**{name: found[name] for name in Claim.__slots__})


def encode_inherited(epoch: int, save_ids: Collection[str]) -> bytes:
    """Encode the list of saves that the claim `epoch` inherited."""
    head = {"format": _INHERITED, "version": _VERSION, "epoch": epoch}
    return _sealed({**head, "save_ids": sorted(save_ids)})


def decode_inherited(data: bytes, *, location: str) -> frozenset[str] | None:
    """Return the save ids of a list, or None if it is damaged; `location` is named in errors.

    Raises:
        UnsupportedFormatError: it is intact, but of a newer version.
    """
    head = _INHERITED_HEAD.match(data)
    if head is not None and (version := int(head[1])) > _VERSION and is_sealed(data):
        raise UnsupportedFormatError(
            f"{location}: the list of checkpoints has version {version}, this release reads "
            f"version {_VERSION}; continue this run with a newer release",
            location=location,
            expected=_VERSION,
            found=version,
        )
    found = _document(data, _INHERITED, _INHERITED_FORM, INHERITED_NBYTES)
    return None if found is None else frozenset(found["save_ids"])


def _sealed(document: dict[str, Any]) -> bytes:
    return seal(json.dumps(document, separators=(",", ":")))


def _document(
    data: bytes, kind: str, form: dict[str, Any], most_nbytes: int
) -> dict[str, Any] | None:
    if not is_sealed(data):
        return None
    try:
        document = parse_object(data, kind, file="", most_nbytes=most_nbytes)
        check_form(document, form)
    except (CorruptCheckpointError, ValueError):
        return None
    known = (document["format"], document["version"]) == (kind, _VERSION)
    return document if known else None
