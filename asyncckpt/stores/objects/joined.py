"""A share in an attempt on an object store that another process has begun."""

# Rule 1: process 0 alone writes fixed names and the record, and removes what was passed on.
# Rule 2: nothing that a record may refer to is removed while the record may still arrive.

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from asyncckpt.stores.exchange import MARK, MARK_NBYTES, is_mark_of
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.context import Context, owned, read_record
from asyncckpt.stores.objects.datafile import ABORT_S
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.objects.writing import AttemptObjects
from asyncckpt.stores.paths import check_file

log = logging.getLogger("asyncckpt.stores")


class ObjectJoinedAttempt(AttemptObjects):
    """A share in an attempt, made by `ObjectStore.join`.

    Args:
        in_background: takes work for after the end of the share, and returns at once.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        save_id: str,
        *,
        in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        super().__init__(context, name, save_id, shared=True)
        self._in_background = in_background

    async def look(self) -> bool:
        """Return whether the attempt's mark is there.

        Raises:
            StoreError: it cannot be looked for.
        """
        key = self._exchange_key(MARK)
        requests = self._context.requests
        with reported("looking for the attempt to join", requests.location(key)):
            try:
                mark = await requests.read(key, max_nbytes=MARK_NBYTES)
            except RequestError as error:
                if error.kind != "missing":
                    raise
                return False
        return is_mark_of(self._save_id, mark)

    async def put(self, path: str, data: bytes | memoryview, *, in_record: bool = False) -> None:
        """Make a small file durable, whose path has the save id. As `AttemptFiles.put`.

        Raises:
            UsageError: its path lacks the save id: only process 0 gives files such names.
        """
        self._sending.check()
        check_file(path, self.location)
        self._check_own(path)
        await self._sending.send_named(join(self._name, path), await owned(self._context, data))

    async def settle(self) -> None:
        """Check that every own file is sealed: then it is durable. As `JoinedAttempt.settle`."""
        self._sending.check_sealed(self._files)

    async def leave(self) -> None:
        """End the share. As `JoinedAttempt.leave`; no request is waited for."""
        if self._sending.ended:
            return
        self._sending.ended = True
        if self._sending.orphans:
            self._in_background(self._remove_orphans())

    async def _remove_orphans(self) -> None:
        try:
            await self._context.requests.delete(sorted(self._sending.orphans))
        except RequestError as error:
            log.warning(
                "%s: objects that were sent twice could not be removed: %s; 'asyncckpt gc' does "
                "so later",
                self.location,
                error,
            )

    async def _remove(self) -> None:
        # Process 0 was not to publish, but a mistake about that would cost a checkpoint.
        async with self._context.requests.cleaning_up(ABORT_S):
            record = await read_record(self._context, self._name)
        if record is None or record.save_id != self._save_id:
            await super()._remove()
