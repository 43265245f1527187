"""Removing what saves that never ended have left below a root."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from asyncckpt.checkpointer.destination import multipart_options
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import UsageError
from asyncckpt.flow.engine import Job
from asyncckpt.flow.shield import uninterrupted
from asyncckpt.options import MIN_BUDGET_NBYTES

COLLECT_MIN_S = 7 * 24 * 3600.0
"""Least age of what is removed, in seconds: no save takes a week, and one that is older than half
of it is not committed any more."""


class Collection:
    """One collection: `submit` it, wait for the job, then close.

    Args:
        root: directory or URL of a run, or of what holds one-shot checkpoints.
        older_than_s: seconds since anything was written in what is removed.
        dry_run: remove nothing.
        storage_options: options of the file system for URLs.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        older_than_s: float,
        dry_run: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        if isinstance(older_than_s, bool) or not isinstance(older_than_s, (int, float)):
            raise UsageError(f"older_than_s={older_than_s!r}: pass seconds", found=older_than_s)
        if math.isnan(older_than_s) or older_than_s < COLLECT_MIN_S:
            raise UsageError(
                f"older_than_s={older_than_s}: pass at least {COLLECT_MIN_S:.0f} "
                f"({COLLECT_MIN_S / 86400:.0f} days); what is younger may belong to a save that "
                "is still on its way",
                expected=COLLECT_MIN_S,
                found=older_than_s,
            )
        self._older_than_s = float(older_than_s)
        self._dry_run = dry_run
        self._runtime = Runtime("asyncckpt-gc", host_memory_nbytes=MIN_BUDGET_NBYTES)
        self._store = self._runtime.store(
            root, direct_io="auto", storage_options=multipart_options(root, storage_options)
        )

    def submit(self) -> Job[list[str]]:
        """The collection is on its way."""
        return self._runtime.engine.submit(self._run)

    async def _run(self) -> list[str]:
        found: Sequence[str] = await self._store.collect(self._older_than_s, dry_run=self._dry_run)
        return list(found)

    async def aclose(self) -> None:
        """All threads have ended. Idempotent."""
        await self._runtime.aclose()

    def close(self) -> None:
        """As `aclose`, blocking."""
        self._runtime.close()


async def collect_garbage(
    root: str | os.PathLike[str],
    *,
    older_than_s: float = COLLECT_MIN_S,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """What saves and deletions that never ended left below `root` is gone, if it is old enough.

    Checkpoints, whatever is not of this library, and what another process has locked stay. On S3,
    multipart uploads that nobody completed go too, where s3fs is installed, which can list them.

    Args:
        root: directory or URL of a run, or of what holds one-shot checkpoints.
        older_than_s: seconds since anything was written in it; a week at least.
        dry_run: remove nothing.
        storage_options: options of the file system for URLs.

    Returns:
        Names of what was (with `dry_run`: would be) removed: on local disk below
        ``<root>/.asyncckpt``, on object stores below the root, uploads as ``key?upload``.

    Cancellation: what was removed until then stays removed.

    Raises:
        UsageError: less than a week, or the store does not tell how old its objects are.
        StoreError: listing or removing failed.
    """
    work = Collection(
        root, older_than_s=older_than_s, dry_run=dry_run, storage_options=storage_options
    )
    try:
        return await work.submit().wait()
    finally:
        await uninterrupted(work.aclose())
