"""Agreement of processes that restore together, as process 0."""

from __future__ import annotations

import tracemalloc
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncckpt.errors import TreeMismatchError
from asyncckpt.restore.exchange.agreement import RestoreAgreement
from asyncckpt.restore.matched import Matching
from asyncckpt.tree import flatten


class Round:
    """The messages of a process 0 and of one other process, to which all leaves are unexpected."""

    leads = True

    def __init__(self, leaf_count: int) -> None:
        self.leaf_count = leaf_count

    async def gathered_parts(self, name: str) -> dict[int, bytes]:
        return {1: zlib.compress(b"ab\n" + np.packbits(np.ones(self.leaf_count, bool)).tobytes())}


async def test_one_long_path_does_not_multiply_the_memory_of_all() -> None:
    """An array of the paths, in which all are as long as the longest, would have 400 MB."""
    long = "k" * 5000
    structure = flatten(dict.fromkeys([*map(str, range(20_000)), long], 0)).structure
    nothing: Any = ()
    matching = Matching(structure, nothing, (), unexpected=["7", long])
    round_: Any = Round(structure.leaf_count)
    opened: Any = SimpleNamespace(location="here", save_id="ab")
    tracemalloc.start()
    try:
        with pytest.raises(TreeMismatchError, match="2 leaves do not fit") as caught:
            await RestoreAgreement(round_, None).matched(opened, matching, strict=True)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.path == "7"
    assert peak_nbytes < 32 << 20
