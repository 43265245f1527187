"""Agreement of the processes that restore together: on step, targets, exchange, batches, end."""

# Rule 1: no process reads payload before the targets of all processes have matched.
# Rule 2: a saved leaf is unexpected only if no process wants it.
# Rule 3: a batch is exchanged only if all processes are ready for it.
# Rule 4: in an atomic restore, no process writes a target before all have read everything.
#   (test_an_atomic_restore_that_fails_on_one_process_changes_no_target)
# Rule 5: all processes restore the same save, even if the checkpoint is replaced meanwhile.
#   (test_processes_that_open_different_saves_of_a_step_restore_neither)

from __future__ import annotations

import json
import zlib
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import CheckpointNotFoundError, UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.options import RestoreOptions
from asyncckpt.planning.streams import Sharing, encoded_rows, share
from asyncckpt.ports import Exchange
from asyncckpt.reports import Timeline
from asyncckpt.restore.match import refuse_unexpected
from asyncckpt.restore.matched import Matching


class RestoreAgreement:
    """One process' side of the agreements in a restore by several processes.

    Attributes:
        round: carries the messages of the processes.
        exchange: their collectives; None if each process reads for itself.
    """

    def __init__(self, round_: Round, exchange: Exchange | None) -> None:
        self.round = round_
        self.exchange = exchange
        self._announced = -1  # the last batch that process 0 has announced as ready

    async def step(
        self,
        options: RestoreOptions,
        wanted: int | None,
        latest: Callable[[], Awaitable[int | None]],
    ) -> int | None:
        """Return the step that all processes restore: `wanted`, or `latest()` of process 0.

        Raises:
            UsageError: step or options of this process differ from those of process 0.
        """
        given = {"step": wanted, "broadcast": options.broadcast, "atomic": options.atomic}
        if self.round.leads:
            chosen = await latest() if wanted is None else wanted
            await self.round.answer("step", json.dumps([given, chosen]).encode())
            return chosen
        lead, chosen = json.loads(await self.round.answered("step"))
        for name, here in given.items():
            if (asked := lead[name]) != here:
                raise UsageError(
                    f"restore was called with {name}={here!r} here, and with {name}={asked!r} on "
                    f"{self.round.group.named(0)}; pass the same {name} on all processes",
                    expected=asked,
                    found=here,
                )
        return None if chosen is None else int(chosen)

    async def matched(self, opened: OpenCheckpoint, matching: Matching, strict: bool) -> None:
        """Wait until the targets of all processes fit the checkpoint, which all have opened.

        Raises:
            CheckpointNotFoundError: it was replaced before all processes had opened it.
            TreeMismatchError: with `strict`, no process wants some saved leaf.
        """
        paths = matching.structure.paths()
        # np.isin would make arrays in which every path takes the memory of the longest.
        unwanted = np.fromiter(map(set(matching.unexpected).__contains__, paths), bool)
        save_id = f"{opened.save_id}\n".encode()
        if not self.round.leads:
            message = save_id + np.packbits(unwanted).tobytes()
            await self.round.post_parts("matched", zlib.compress(message))
            await self.round.answered("read")
            return
        for compressed in (await self.round.gathered_parts("matched")).values():
            message = zlib.decompress(compressed)
            if not message.startswith(save_id):
                raise CheckpointNotFoundError(
                    f"{opened.location}: the checkpoint was replaced before all processes had "
                    "opened it; nothing was read, restore it again",
                    location=opened.location,
                    found="replaced",
                )
            bits = np.frombuffer(message, np.uint8, offset=len(save_id))
            unwanted &= np.unpackbits(bits, count=len(paths)).astype(bool)
        if strict:
            refuse_unexpected(
                opened.location, [paths[leaf] for leaf in np.flatnonzero(unwanted).tolist()]
            )
        await self.round.answer("read", b"+")

    async def record_nbytes(self, size: Callable[[], Awaitable[int]]) -> int:
        """Return the size of the record in bytes, which is `size()` of process 0."""
        if self.round.leads:
            nbytes = await size()
            await self.round.answer("record", str(nbytes).encode())
            return nbytes
        return int(await self.round.answered("record"))

    async def shared(
        self,
        rows: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
        *,
        least_nbytes: int,
        compute: Workers,
    ) -> Sharing:
        """Return the chunks that several processes want: none if below `least_nbytes` in total.

        `rows` are the chunks that this process wants; `nbytes` has the length of every chunk.
        """
        wanted = await compute.run(encoded_rows, rows)
        if not self.round.leads:
            await self.round.post_parts("wanted", wanted)
            message = await self.round.answered_parts("shared")
            return await compute.run(Sharing.decoded, message)
        found = {0: wanted, **await self.round.gathered_parts("wanted")}
        sharing = await compute.run(share, found, len(nbytes))
        if int(nbytes[sharing.stream >= 0].sum()) < least_nbytes:
            sharing = Sharing([], np.full(len(nbytes), -1, np.int64))
        await self.round.answer_parts("shared", await compute.run(sharing.encoded))
        return sharing

    async def ready(self, batch: int) -> bool:
        """Wait for all processes to be ready for this batch; False if the restore of one failed."""
        if not self.round.leads:
            await self.round.post("ready", str(batch).encode())
            return await self.round.reached("told", batch)
        while self._announced < batch:
            others = await self.round.lowest("ready", above=self._announced)
            if others is None:
                return False
            self._announced = min(others, batch)
            await self.round.answer("told", str(self._announced).encode())
        return True

    async def staged(self) -> None:
        """Wait until all processes have read and checked everything that they want."""
        if not self.round.leads:
            await self.round.post("staged", b"+")
            await self.round.answered("write")
            return
        await self.round.gathered("staged")
        await self.round.answer("write", b"+")

    async def restored(self, timeline: Timeline) -> Timeline:
        """Wait until all have restored; return the timeline (on process 0, of all processes)."""
        if not self.round.leads:
            await self.round.post("restored", json.dumps(timeline.rows(1)).encode())
            await self.round.outcome()
            return timeline
        messages = await self.round.gathered("restored")
        await self.round.commit()
        await self.round.finish()
        return timeline.joined(Timeline.from_rows(json.loads(each)) for each in messages.values())
