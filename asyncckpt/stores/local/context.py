"""State that all attempts of a local store share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local.datafile import DirectWrites
from asyncckpt.stores.local.locks import Machine
from asyncckpt.stores.paths import Layout


@dataclass(frozen=True, slots=True)
class Context:
    """State that all attempts of a store share.

    Attributes:
        layout: paths below the root.
        workers: threads for every blocking call.
        machine: returns the host and boot that owner files are compared with. Blocking.
        direct: whether and where writes go past the page cache.
        is_valid: whether the content of a record file is a commit record. Stores know no records.
    """

    layout: Layout
    workers: Workers
    machine: Callable[[], Machine]
    direct: DirectWrites
    is_valid: Callable[[bytes], bool]
