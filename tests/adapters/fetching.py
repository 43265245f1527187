"""Reading sources by `fetch` alone, shard by shard as in a save."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from asyncckpt.checkpoint.payload import ArrayReader
from asyncckpt.ports import ArrayAdapter, Source
from asyncckpt.spec import Box


def fetch_box(adapter: ArrayAdapter, source: Source, box: Box, out: np.ndarray[Any, Any]) -> None:
    """Copy what the shards hold of a box to `out`, as if none of them were in host memory."""
    unseen = dataclasses.replace(
        source, view=None, views=(None,) * len(source.views), adapter=adapter
    )
    ArrayReader(unseen, source.spec.dtype, path="p").read(box, out)
