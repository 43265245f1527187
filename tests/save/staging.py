"""Plans, snapshots and staging of small trees, for tests of one stage at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import AnonymousMemory, SlotPool
from asyncckpt.flow.recorder import Recorder
from asyncckpt.flow.threads import Workers
from asyncckpt.options import KIB, SLOT_NBYTES, LeafOptions, SaveOptions
from asyncckpt.ports import Sizes
from asyncckpt.save.plan_cache import Layout, Limits, Terms, make_layout
from asyncckpt.save.snapshot import Snapshot, take_snapshot
from asyncckpt.save.stage import Staging
from asyncckpt.spec import ArraySpec

SLOT = 64 * KIB


def noise(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Staged:
    """A tree and what one stage after the other needs of it."""

    def __init__(
        self,
        tree: Any,
        workers: Workers,
        *,
        slots: int = 16,
        process_count: int = 1,
        leaf_options: Callable[[str, ArraySpec], LeafOptions | None] | None = None,
    ) -> None:
        options = SaveOptions(chunk_nbytes=48 * KIB, leaf_options=leaf_options)
        self.budget = ByteBudget(slots * SLOT)
        self.pool = SlotPool(self.budget, workers, AnonymousMemory(), slot_nbytes=SLOT)
        self.snapshot: Snapshot = take_snapshot(tree)
        self.snapshot.tie()
        sizes = Sizes(1 << 20, SLOT, 2)
        terms = Terms(options, Limits(SLOT_NBYTES, None, None), sizes, process_count=process_count)
        self.layout: Layout = make_layout(self.snapshot, terms)
        self.plan = self.layout.plan
        self.staging = Staging(
            self.plan,
            self.snapshot,
            self.pool,
            self.pool,
            workers,
            grow=False,
            recorder=Recorder(),
        )
