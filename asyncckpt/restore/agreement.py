"""Agreement of processes that restore together: on the step, on fitting targets, on the end."""

# Rule 1: no process reads payload before the targets of all have matched.
# Rule 2: a saved leaf is unexpected only if no process wants it.

from __future__ import annotations

import json
import zlib
from collections.abc import Awaitable, Callable

import numpy as np

from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import UsageError
from asyncckpt.restore.match import Matching, refuse_unexpected


class RestoreAgreement:
    """The part of one process in a restore by several.

    Args:
        round_: what they say to each other about it.

    Attributes:
        round: the same.
    """

    def __init__(self, round_: Round) -> None:
        self.round = round_

    async def step(
        self, wanted: int | None, latest: Callable[[], Awaitable[int | None]]
    ) -> int | None:
        """Return the step that all restore: the one asked for, or what `latest` gives process 0.

        Raises:
            UsageError: this process asks for another step than process 0.
        """
        if self.round.leads:
            chosen = await latest() if wanted is None else wanted
            await self.round.answer("step", json.dumps([wanted, chosen]).encode())
            return chosen
        asked, chosen = json.loads(await self.round.answered("step"))
        if asked != wanted:
            raise UsageError(
                f"restore was called with step={wanted!r} here, and with step={asked!r} on "
                f"{self.round.group.named(0)}; pass the same step on all processes",
                expected=asked,
                found=wanted,
            )
        return None if chosen is None else int(chosen)

    async def matched(self, opened: OpenCheckpoint, matching: Matching, strict: bool) -> None:
        """Return when the targets of all processes fit the checkpoint.

        Raises:
            TreeMismatchError: a saved leaf is wanted by no process, and `strict`.
        """
        paths = matching.structure.paths()
        unwanted = np.isin(paths, matching.unexpected)
        if not self.round.leads:
            await self.round.post("matched", zlib.compress(np.packbits(unwanted).tobytes()))
            await self.round.answered("read")
            return
        for message in (await self.round.gathered("matched")).values():
            bits = np.frombuffer(zlib.decompress(message), np.uint8)
            unwanted &= np.unpackbits(bits, count=len(paths)).astype(bool)
        if strict:
            refuse_unexpected(
                opened.location, [paths[leaf] for leaf in np.flatnonzero(unwanted).tolist()]
            )
        await self.round.answer("read", b"+")

    async def restored(self) -> None:
        """Return when all processes have restored what they wanted."""
        if self.round.leads:
            await self.round.gathered("restored")
            await self.round.commit()
            await self.round.finish()
        else:
            await self.round.post("restored", b"+")
            await self.round.outcome()
