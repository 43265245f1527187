"""Garbage collection of the leftovers, below one root, of saves that never ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from asyncckpt.arguments import COLLECT_MIN_S, check_age, check_switch
from asyncckpt.errors import UsageError
from asyncckpt.flow.driver import check_loop
from asyncckpt.session.session import Session
from asyncckpt.stores.objects.clients.opening import fsspec_options


async def collect_garbage(
    root: str | os.PathLike[str],
    *,
    older_than_s: float = COLLECT_MIN_S,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Remove old leftovers below `root` of saves and deletions that never ended.

    Checkpoints, files of other programs, and leftovers locked by another process stay. So do
    unfinished multipart uploads of exports that were killed: leave them to a lifecycle rule.

    Args:
        root: directory or URL of a run, or parent of one-shot checkpoints.
        older_than_s: seconds since anything was written in a leftover; at least a week.
        dry_run: only return the names.
        storage_options: options of the file system for URLs.

    Returns:
        Names of the leftovers that were (with `dry_run`: would be) removed: on local disk below
        ``<root>/.asyncckpt``, on object stores below the root.

    Cancellation: leftovers removed before it stay removed.

    Raises:
        UsageError: `older_than_s` is less than a week, or the store reports no ages.
        StoreError: listing or removing failed.
    """
    check_loop()
    check_switch("dry_run", dry_run)
    if isinstance(older_than_s, bool) or not isinstance(older_than_s, (int, float)):
        raise UsageError(f"older_than_s={older_than_s!r}: pass seconds", found=older_than_s)
    check_age(older_than_s, f"older_than_s={older_than_s}")
    # Deleting the records of fenced writers needs conditional deletion.
    options = fsspec_options(root, storage_options)
    async with Session(root, storage_options=options, coordinator="single") as session:

        async def collect() -> list[str]:
            return list(await session.root.store.collect(float(older_than_s), dry_run=dry_run))

        return await session.call(collect).wait()
