"""How much staging memory a tree takes, found without opening its arrays."""

from __future__ import annotations

from typing import Any

from asyncckpt.adapters import adapters_for_loaded_frameworks
from asyncckpt.checkpointer.capture import capture
from asyncckpt.options import INLINE_NBYTES


def tree_nbytes(tree: Any) -> int:
    """Bytes of the tree's arrays that go through staging buffers; tied ones once.

    Raises:
        UnsupportedLeafError: names the path of a leaf that cannot be saved.
    """
    taken = capture(tree, adapters_for_loaded_frameworks())
    return sum(
        source.spec.nbytes
        for number, source in enumerate(taken.sources)
        if number not in taken.tied and source.spec.nbytes > INLINE_NBYTES
    )
