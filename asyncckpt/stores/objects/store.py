"""Checkpoints on an object store: committed by one conditional PUT, safe against other writers."""

# Rule 1: a checkpoint exists if its record counts: stores/objects/counting.py.
# Rule 2: a deletion removes the record first, then the bytes that carry its save id, so that
#   another attempt at the same name loses nothing.
# Rule 3: the only state kept between calls is the results of probes, and the checkpoints that this
#   process has yet to repair.

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncckpt.arguments import check_age
from asyncckpt.errors import StoreError
from asyncckpt.flow.shield import cleaned_up, mapped, uninterrupted
from asyncckpt.format.claim import Claim
from asyncckpt.format.record import STEP_NAME
from asyncckpt.options import DEFAULT_CHUNK_NBYTES, KIB, PAGE_NBYTES
from asyncckpt.ports import Removal, Sizes, StoreCapabilities
from asyncckpt.reports import nbytes_text
from asyncckpt.stores.claims import check_epoch
from asyncckpt.stores.exchange import check_process, find_mark
from asyncckpt.stores.objects.attempt import ObjectAttempt
from asyncckpt.stores.objects.clients.client import unless_missing
from asyncckpt.stores.objects.context import READS, Context
from asyncckpt.stores.objects.export import ObjectExport
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.files import ObjectFiles
from asyncckpt.stores.objects.gc import remove_garbage
from asyncckpt.stores.objects.layout import check_key, check_save_id, is_note, note_key
from asyncckpt.stores.objects.remove import unlist
from asyncckpt.stores.objects.repair import repair_quietly
from asyncckpt.stores.objects.requests.sizes import PUT_THRESHOLD_NBYTES, Choice, choose
from asyncckpt.stores.objects.share import ObjectJoinedAttempt
from asyncckpt.stores.paths import CONTROL, NOTE_NBYTES, check_name

REPAIRED_STEPS = 3
"""Number of newest steps that `sweep` repairs: those that a crash may leave unfinished."""

READ_GAP_NBYTES = 512 * KIB
"""A stream of 85 MB/s reads this in 6 ms, a fifth of the latency of a request."""

JOIN_PAUSES_S = 0.02, 1.0
"""First and longest pause between polls for an attempt to join; each poll is a request."""

CHOICES_MAX = 16
"""State sizes with a remembered choice: one `Checkpointer` saves one or a few states."""


class ObjectStore:
    """A prefix of a bucket that holds checkpoints by name.

    All methods run on the event loop of the client.
    """

    def __init__(self, context: Context) -> None:
        self.url = context.requests.url
        self._context = context
        self._requests = context.requests
        traits = self._requests.traits
        self.capabilities = StoreCapabilities(
            client_copies=traits.put_copies,
            positional_writes=False,
            read_copies=traits.get_copies,
            read_nbytes=traits.receive_nbytes,
            read_gap_nbytes=READ_GAP_NBYTES,
            reads=READS,
            shared_link=True,
            proves_dead=False,
        )
        self._choices: dict[int, Choice] = {}
        self._noted: set[int] = set()

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r}, {self._requests.traits.name})"

    # -------------------------------------------------------------------------------------- save

    def sizes(
        self,
        nbytes: int,
        *,
        budget_nbytes: int,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        data_file_nbytes: int | None = None,
        concurrency: int | None = None,
    ) -> Sizes:
        """Choose sizes for a save from the measurements so far. As `Store.sizes`.

        For a state of the same size the last choice is kept unless another is much faster, so that
        plans and buffers can be reused. `concurrency` applies from now on.
        """
        self._requests.fix_streams("put", concurrency)
        choice = choose(
            nbytes,
            self._requests.controllers["put"].traffic,
            budget_nbytes=budget_nbytes,
            copies=self.capabilities.client_copies,
            chunk_nbytes=chunk_nbytes,
            data_file_nbytes=data_file_nbytes,
            last=self._choices.pop(nbytes, None),
        )
        self._choices[nbytes] = choice
        if len(self._choices) > CHOICES_MAX:
            del self._choices[next(iter(self._choices))]
        return Sizes(
            choice.data_file_nbytes,
            choice.window_nbytes,
            choice.concurrency,
            # A data file is one request, and holds whole chunks with their trailers.
            chunk_nbytes=choice.data_file_nbytes - PAGE_NBYTES,
            chunk_limit_nbytes=choice.window_nbytes - PAGE_NBYTES,
            even_streams=choice.even_streams,
            notes=_clamped(data_file_nbytes, choice.window_nbytes),
        )

    async def begin(
        self,
        name: str,
        save_id: str,
        *,
        epoch: int = 0,
        overwrite: bool = False,
        private: bool = False,
        shared: bool = False,
    ) -> ObjectAttempt:
        """Open an attempt; only a shared one waits for a request. As `Store.begin`.

        The first attempt begins the probe of conditional creation in the background. `private` is
        ignored: the bucket's policy decides.

        Raises:
            UsageError: the name is not one path part or is too long, or the save id is invalid.
        """
        self._check(name, save_id)
        check_epoch(epoch)
        self._context.probes.begin()
        attempt = ObjectAttempt(
            self._context, name, save_id, epoch=epoch, overwrite=overwrite, shared=shared
        )
        if shared:
            try:
                await attempt.mark()
            except BaseException as error:
                await cleaned_up(attempt.abort(), error)
                raise
        return attempt

    async def join(
        self, name: str, save_id: str, *, process: int, timeout_s: float, private: bool = False
    ) -> ObjectJoinedAttempt:
        """Join an attempt that another process begins. As `Store.join`.

        Raises:
            UsageError: as `begin`.
            CheckpointNotFoundError: no such attempt appeared within `timeout_s`.
            StoreError: a request failed.
        """
        self._check(name, save_id)
        check_process(process)
        share = ObjectJoinedAttempt(self._context, name, save_id, shared=True)
        await find_mark(
            share.look,
            location=share.location,
            save_id=save_id,
            timeout_s=timeout_s,
            pauses_s=JOIN_PAUSES_S,
        )
        return share

    def _check(self, name: str, save_id: str) -> None:
        check_name(name)
        check_save_id(save_id)
        check_key(self._requests.location(name))

    async def begin_export(
        self, name: str, save_id: str, *, overwrite: bool = False, private: bool = False
    ) -> ObjectExport:
        """Open an attempt for plain files. As `ExportingStore.begin_export`.

        Raises:
            UsageError: the name is not one path part, or is too long.
            StoreError: the probe of conditional creation failed.
        """
        check_name(name)
        check_key(self._requests.location(name))
        conditions = await self._context.probes.conditions(versions=False)
        return ObjectExport(self._context, name, overwrite=overwrite, conditional=conditions.create)

    async def settled(self) -> None:
        """Wait until no fixed names are being written. As `Store.settled`."""
        await self._context.background.named()

    # -------------------------------------------------------------------------------------- read

    async def names(self) -> list[str]:
        """Return the names below the root, as `Context.checkpoint_names`. As `Store.names`."""
        with reported("listing", self.url):
            return await self._context.checkpoint_names()

    def files(self, name: str) -> ObjectFiles:
        """Return read access to one checkpoint; makes no request."""
        return ObjectFiles(self._context, check_name(name), self.capabilities)

    # ------------------------------------------------------------------------------------ claims

    async def claim(self) -> Claim | None:
        """Take over the root. As `Store.claim`."""
        context = self._context
        conditions = await context.probes.conditions(versions=False)
        return await context.claims.take_over(context.committed) if conditions.create else None

    async def claims(self) -> Sequence[Claim]:
        """Return the claims that can be read, ascending."""
        return await self._context.claims.read()

    async def check_claim(self, epoch: int) -> None:
        """Check that no higher claim was made. As `Store.check_claim`."""
        await self._context.claims.check(epoch)

    # ------------------------------------------------------------------------------------ remove

    async def unlist(self, name: str, *, epoch: int = 0, seal: bytes = b"") -> Removal:
        """Unlist a checkpoint, in the order of stores/objects/remove.py. As `Store.unlist`.

        Keeps foreign objects below its prefix and objects of other attempts. The error of a store
        that forbids all deletions has the root as its `location`.

        Cancellation: finishes, then raises.
        """
        check_name(name)
        check_epoch(epoch)
        try:
            return await uninterrupted(unlist(self._context, name, epoch, seal))
        except StoreError as error:
            if error.found == "forbidden" and not self._context.probes.may_delete:
                error.location = self.url
            raise

    async def sweep(self) -> Sequence[str]:
        """Repair fixed names of the newest steps; remove nothing.

        A live attempt looks like a dead one, so only `collect` removes leftovers, by age.
        """
        steps = sorted(filter(STEP_NAME.fullmatch, await self.names()), key=int)
        async with asyncio.TaskGroup() as group:
            for name in steps[-REPAIRED_STEPS:]:
                group.create_task(repair_quietly(self._context, name))
        return ()

    async def collect(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """Remove leftovers (see stores/objects/gc.py), then repair all checkpoints.

        Raises:
            UsageError: `older_than_s` is less than `COLLECT_MIN_S`.
        """
        check_age(older_than_s, f"older_than_s={older_than_s}")
        with reported("removing leftovers", self.url):
            removed = await remove_garbage(self._context, older_than_s, dry_run=dry_run)
            for name in [] if dry_run else await self.names():
                await repair_quietly(self._context, name)
            return removed

    async def keep_note(self, process: int, note: bytes | None) -> None:
        """Keep a note of a process, as `NotingStore.keep_note`."""
        if note is not None or process in self._noted:
            self._noted.add(process)
            with reported("noting an error", self.url):
                if note is None:
                    await self._requests.delete([note_key(process)])
                else:
                    await self._requests.replace(note_key(process), note)

    async def take_notes(self) -> Sequence[bytes]:
        """Remove and return all notes, as `NotingStore.take_notes`."""
        requests = self._requests
        with reported("looking for errors of earlier jobs", self.url):
            listed = await requests.list_all(CONTROL, recursive=True)
            keys = [entry.key for entry in listed if is_note(entry.key)]
            notes = await mapped(self._note, keys, READS)
            await requests.delete(keys)
        return [note for note in notes if note is not None]

    async def _note(self, key: str) -> bytes | None:
        with unless_missing():  # another process may take them at the same time
            return await self._requests.read(key, max_nbytes=NOTE_NBYTES)
        return None

    async def close(self) -> None:
        """Wait for background tasks, then close connections. Idempotent.

        Cancellation: finishes, then raises.
        """
        await uninterrupted(self._close())

    async def _close(self) -> None:
        await self._context.background.ended()
        await self._context.probes.close()
        await self._requests.close()


def _clamped(wanted: int | None, chosen: int) -> tuple[str, ...]:
    if wanted is None or chosen >= wanted:
        return ()
    why = "staging memory allows no more (host_memory_nbytes)"
    if wanted > PUT_THRESHOLD_NBYTES and chosen == PUT_THRESHOLD_NBYTES:
        why = "a data file is one request here, which sends no more"
    return (
        f"data files have at most {nbytes_text(chosen)} instead of target_data_file_nbytes="
        f"{nbytes_text(wanted)}: {why}",
    )
