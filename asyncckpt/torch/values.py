"""Values other than tensors: plain Python values here, archives of `torch.save` in DCP."""

# Rule: values are decoded by the allow-list unpickler of `format.foreign.torch`, which executes
#   nothing from a planner. (test_a_value_that_would_execute_something_is_refused)

from __future__ import annotations

import io
from typing import Any

import torch

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.format.foreign.torch.plain_values import load_value
from asyncckpt.format.foreign.torch.torch_zip import Archive
from asyncckpt.format.foreign.torch.unpickle import Allowance

OWN_NBYTES = 1 << 62
"""Memory allowance for a value of this process, where it exists already."""


def value_of(key: str, data: bytes) -> Any:
    """Return the plain value in an archive of `torch.save`.

    Dicts of any class become dicts, `torch.Size` becomes a tuple.

    Raises:
        UnsupportedLeafError: it is not a plain value; names the key.
    """
    try:
        archive = Archive(data, len(data), "its archive", f"the value of {key!r:.200}", 0)
        return load_value(archive.pickle(), Allowance(OWN_NBYTES))
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        found = error.found if isinstance(error, UnsupportedFormatError) else "other bytes"
        raise UnsupportedLeafError(
            f"{key}: this value holds {found}, which cannot be stored: None, bool, int, float, "
            "complex, str, bytes, and tuples, lists and dicts of these can. Convert it, leave it "
            'out, or pass StorageWriter(..., opaque="allow") to store the bytes of its pickle, '
            "which only DCP's planners can read",
            path=key,
            expected="a plain value",
            found=found,
        ) from None


def archive_of(value: Any) -> io.BytesIO:
    """Return a plain value as `torch.save` writes it, for `LoadPlanner.load_bytes`."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
