"""Checkpoints on an object store: committed by one conditional PUT, safe against other writers."""

# Rule 1: what makes a checkpoint is its record, and nothing else is ever asked whether it exists.
# Rule 2: deleting removes the record first; the bytes after it by the save id that it carried, so
#   that another attempt at the same name, which has another one, loses nothing.
# Rule 3: nothing of a store is remembered between calls except what can only be asked once
#   (whether it creates conditionally) and what this process itself left to be mended.

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncckpt.errors import (
    StoreError,
    UsageError,
)
from asyncckpt.flow.beside import Beside
from asyncckpt.flow.shield import uninterrupted
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import STEP_NAME
from asyncckpt.options import DEFAULT_CHUNK_NBYTES, KIB, PAGE_NBYTES, SLOT_NBYTES
from asyncckpt.planning.sizes import (
    PUT_THRESHOLD_NBYTES,
    Choice,
    PartRules,
    Traffic,
    choose,
    fits_chunk_nbytes,
)
from asyncckpt.ports import Sizes, StoreCapabilities
from asyncckpt.stores.layout import check_name
from asyncckpt.stores.objects.attempt import ObjectAttempt
from asyncckpt.stores.objects.client import RequestError
from asyncckpt.stores.objects.collect import NAMES_MAX, collect
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.export import ObjectExport
from asyncckpt.stores.objects.failures import reported, store_error
from asyncckpt.stores.objects.files import ObjectFiles
from asyncckpt.stores.objects.layout import (
    CONTROL,
    check_save_id,
)
from asyncckpt.stores.objects.mend import mend_quietly
from asyncckpt.stores.objects.probe import WRITE_SPACING_S, creates_conditionally
from asyncckpt.stores.objects.remove import remove
from asyncckpt.stores.objects.requests import Requests

log = logging.getLogger("asyncckpt.stores")

COLLECT_MIN_S = 7 * 24 * 3600.0
"""Nobody's save takes a week; below, `collect` could hit one that is still on its way."""

MENDED_STEPS = 3
"""The newest steps are those that a crash left unfinished, and that people look at."""

MENDED_NAMES = 4
"""Other names that this process has used last: one-shot checkpoints."""

READ_GAP_NBYTES = 512 * KIB
"""What a stream of 85 MB/s reads in 6 ms, a fifth of the latency of another request."""

READS = 16
"""Ranged reads in flight where nobody says how many; `Requests` adapts the true number."""

CHOICES_MAX = 16
"""States whose sizes are remembered: one `Checkpointer` saves one, or a few."""


class ObjectStore:
    """A prefix of a bucket that holds checkpoints by name.

    All methods run on the event loop of the client.

    Args:
        requests: every request goes through it; closed with the store.
        save_id_of: the save id in a commit record, or None for anything that is no valid one.
            Called in worker threads for records of more than 64 KiB.
        workers: threads for copies and checks.
        google: write Orbax's `commit_success.txt` last, which it asks for on Google's store.
        collect_min_s: least age that `collect` accepts, and twice the age at which an attempt
            refuses to publish; other values than the default are for tests.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        save_id_of: Callable[[bytes], str | None],
        workers: Workers,
        google: bool = False,
        collect_min_s: float = COLLECT_MIN_S,
    ) -> None:
        traits = requests.traits
        self.url = requests.url
        self.capabilities = StoreCapabilities(
            "bytes" if traits.body == "bytes" else "any",
            client_copies=traits.put_copies,
            positional_writes=False,
            conditional_create=traits.conditional_create,
            read_copies=traits.get_copies,
            read_gap_nbytes=READ_GAP_NBYTES,
            reads=READS,
            proves_dead=False,
        )
        self._requests = requests
        self._context = Context(requests, workers, save_id_of, google)
        self._collect_min_s = collect_min_s
        self._conditional: bool | None = None if traits.conditional_create else False
        self._probe: Beside[bool] | None = None
        self._settling: list[Beside[None]] = []
        self._used: OrderedDict[str, None] = OrderedDict()
        self._choices: OrderedDict[int, Choice] = OrderedDict()

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
        """How a save of `nbytes` goes here, from what was measured so far.

        For a state of the same size the last choice stands while nothing is much faster, so that
        plans and buffers need not be made anew.

        Args:
            nbytes: what is to be saved.
            budget_nbytes: staging memory, the copies that the client makes included.
            chunk_nbytes: target size of its chunks; smaller ones are planned where a window
                would hold a part of one.
            data_file_nbytes: size of data files that somebody asks for.
            concurrency: writes in flight that somebody asks for; they hold from now on.
        """
        traits, requests = self._requests.traits, self._requests
        requests.fix_streams("put", concurrency)
        climb, stream = requests.climb("put"), requests.link.put
        parts = PartRules(
            parallel=traits.multipart and traits.parallel_parts,
            min_nbytes=traits.part_min_nbytes,
            multiple_nbytes=traits.part_multiple_nbytes,
            max_nbytes=traits.part_max_nbytes,
            max_count=traits.part_max_count,
        )
        choice = choose(
            nbytes,
            Traffic(
                stream.latency_s,
                stream.nbytes_per_s,
                climb.full_nbytes_per_s,
                concurrency or climb.room,
            ),
            budget_nbytes=budget_nbytes,
            copies=traits.put_copies,
            slot_nbytes=SLOT_NBYTES,
            chunk_nbytes=chunk_nbytes,
            data_file_nbytes=data_file_nbytes,
            put_max_nbytes=min(traits.put_max_nbytes, PUT_THRESHOLD_NBYTES),
            parts=parts,
            last=self._choices.get(nbytes),
        )
        self._choices[nbytes] = choice
        self._choices.move_to_end(nbytes)
        if len(self._choices) > CHOICES_MAX:
            self._choices.popitem(last=False)
        return Sizes(
            choice.data_file_nbytes,
            choice.window_nbytes,
            choice.concurrency,
            chunk_nbytes=fits_chunk_nbytes(chunk_nbytes, choice.window_nbytes),
            # A larger one would be a file of several windows.
            chunk_limit_nbytes=None if parts.parallel else choice.window_nbytes - PAGE_NBYTES,
            even_streams=choice.even_streams,
        )

    async def begin(
        self,
        name: str,
        save_id: str,
        *,
        epoch: int = 0,
        overwrite: bool = False,
        private: bool = False,
    ) -> ObjectAttempt:
        """An attempt to publish `name` is open; no request was waited for.

        Whether the store creates conditionally is found out beside the first attempt.

        Args:
            name: one path part.
            save_id: 32 lower-case hex digits, never used before.
            epoch: the claim under which it writes; of no meaning to a conditional PUT.
            overwrite: replace a checkpoint of this name at `publish`.
            private: of no meaning here: the bucket's policy says who may read.

        Raises:
            UsageError: the name is not one path part, or the save id is none.
        """
        if epoch < 0:
            raise UsageError(f"epoch={epoch}: pass a non-negative integer", found=epoch)
        check_name(name)
        check_save_id(save_id)
        self._use(name)
        if self._conditional is None and self._probe is None:
            self._probe = Beside(self._try_creating())
        return ObjectAttempt(
            self._context,
            name,
            save_id,
            overwrite=overwrite,
            max_age_s=self._collect_min_s / 2,
            conditional=self._creates_conditionally,
            begin_settling=self._begin_settling,
            unfinished=self._use,
        )

    async def begin_export(
        self, name: str, save_id: str, *, overwrite: bool = False, private: bool = False
    ) -> ObjectExport:
        """As `begin`, for files of another format, which have no commit record.

        A file whose path is `name` becomes the object of that name, as the only one.

        Raises:
            UsageError: the name is not one path part.
            StoreError: whether the store creates conditionally could not be found out.
        """
        check_name(name)
        if self._conditional is None and self._probe is None:
            self._probe = Beside(self._try_creating())
        conditional = await self._creates_conditionally()
        return ObjectExport(self._context, name, overwrite=overwrite, conditional=conditional)

    async def _try_creating(self) -> bool:
        spacing_s = WRITE_SPACING_S if self._context.google else 0.0
        return await creates_conditionally(self._requests, spacing_s=spacing_s)

    async def _creates_conditionally(self) -> bool:
        if self._conditional is None:
            try:
                try:
                    assert self._probe is not None
                    conditional = await self._probe.result()
                except RequestError:
                    # Once more, and now somebody hears of it.
                    conditional = await self._try_creating()
            except RequestError as error:
                raise store_error(
                    "finding out whether it creates objects conditionally",
                    self._requests.location(CONTROL),
                    error,
                    stage="commit",
                ) from error
            self._conditional = conditional
            self.capabilities = dataclasses.replace(
                self.capabilities, conditional_create=conditional
            )
        return self._conditional

    def _begin_settling(self, work: Coroutine[Any, Any, None]) -> None:
        self._settling = [settling for settling in self._settling if not settling.done]
        self._settling.append(Beside(work))

    def _use(self, name: str) -> None:
        if not STEP_NAME.fullmatch(name):
            self._used[name] = None
            self._used.move_to_end(name)
            while len(self._used) > MENDED_NAMES:
                self._used.popitem(last=False)

    # -------------------------------------------------------------------------------------- read

    async def names(self) -> list[str]:
        """Names of all prefixes below the root, in no order; also those that attempts have begun.

        Raises:
            StoreError: the bucket cannot be listed.
        """
        with reported("listing", self.url):
            listed = await self._requests.list("", recursive=False, limit=NAMES_MAX)
        if len(listed) > NAMES_MAX:
            raise StoreError(
                f"{self.url}: more than {NAMES_MAX} names; checkpoints need a prefix of their own",
                location=self.url,
                expected=NAMES_MAX,
            )
        return [e.key for e in listed if e.is_prefix and e.key not in ("", CONTROL)]

    def files(self, name: str) -> ObjectFiles:
        """Read access to one checkpoint; nothing is requested yet."""
        self._use(check_name(name))
        return ObjectFiles(self._context, name, self.capabilities)

    # ------------------------------------------------------------------------------------ remove

    async def delete(self, name: str) -> None:
        """The checkpoint is gone: Orbax's mark, then its record, then its bytes.

        What others have put below its prefix stays, and so does what other attempts have written.
        If it fails after the record has gone, `collect` removes the data.

        Cancellation: finishes, then raises.

        Raises:
            CheckpointNotFoundError: there was none.
            StoreError: the error says whether the checkpoint is still there.
        """
        check_name(name)
        await uninterrupted(remove(self._context, name))

    async def sweep(self) -> Sequence[str]:
        """Fixed names that a winner did not come to write are written; nothing is removed.

        Looks at the newest steps and at names that this process has used. What others may still
        be writing cannot be told from what is dead: see `collect`.

        Raises:
            StoreError: the bucket cannot be listed.
        """
        steps = sorted((n for n in await self.names() if STEP_NAME.fullmatch(n)), key=int)
        async with asyncio.TaskGroup() as group:
            for name in [*steps[-MENDED_STEPS:], *self._used]:
                group.create_task(mend_quietly(self._context, name))
        return ()

    async def collect(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """Leftovers of attempts that are older are removed, whoever made them; returns their keys.

        See `asyncckpt.stores.objects.collect` for what counts.

        Args:
            older_than_s: seconds since they were written; a week at least.
            dry_run: remove nothing.

        Raises:
            UsageError: less than a week, or the client does not tell when objects were written.
            StoreError: a request failed; what was removed until then stays removed.
        """
        if older_than_s < self._collect_min_s:
            raise UsageError(
                f"older_than_s={older_than_s}: pass at least {self._collect_min_s:.0f} "
                f"({self._collect_min_s / 86400:.0f} days); younger objects may belong to a save "
                "that is still on its way",
                expected=self._collect_min_s,
                found=older_than_s,
            )
        with reported("collecting leftovers", self.url):
            return await collect(self._context, older_than_s, dry_run=dry_run)

    async def close(self) -> None:
        """What was begun beside saves has ended, and connections are closed. Idempotent.

        Cancellation: finishes, then raises.
        """
        await uninterrupted(self._close())

    async def _close(self) -> None:
        settling, self._settling = self._settling, []
        for work in settling:
            await work.settled()
        probe, self._probe = self._probe, None
        if probe is not None:
            await probe.stop()
        await self._requests.close()
