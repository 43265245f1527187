"""Decode: stored chunks to elements of a target, checked before anybody sees them."""

# Rule 1: a checksum that fails ends the restore; values are handed over only after all have passed.
# Rule 2: nothing allocates by what a chunk claims; sizes come from the record's shapes.

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.ports import Bytes
from asyncckpt.stages.serialize import TRAILER_NBYTES


def trailer_matches(trailer: Bytes | memoryview, crc: int) -> bool:
    """Whether the four bytes behind a payload are its checksum."""
    return int.from_bytes(bytes(trailer[:TRAILER_NBYTES]), "little") == crc


def flat_target(array: npt.NDArray[Any]) -> Bytes | None:
    """The memory of a C-contiguous writable array as bytes, or None."""
    if not array.flags.c_contiguous or not array.flags.writeable:
        return None
    return array.reshape(-1).view(np.uint8)
