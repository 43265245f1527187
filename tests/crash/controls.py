"""Breaking one rule of the library at a time, to see that the crash tests notice.

Each function changes the process that calls it for good; scenarios run them in forked processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from typing import Any

from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.local import datafile, posix, publish, tree
from asyncckpt.stores.local.attempt import LocalAttempt
from asyncckpt.stores.local.datafile import LocalDataFile
from asyncckpt.stores.local.store import LocalStore


def data_after_publication() -> None:
    """Data files are written when the checkpoint is visible already."""
    late: list[tuple[str, int, bytes]] = []
    publish_now = LocalAttempt.publish

    async def write(self: LocalDataFile, offset: int, data: Any) -> None:
        late.append((self.path, offset, data.tobytes()))

    async def publish_early(self: LocalAttempt, record: bytes) -> None:
        await publish_now(self, record)
        for path, offset, data in late:
            with open(os.path.join(self.location, path), "r+b", buffering=0) as file:
                file.seek(offset)
                file.write(data[: os.fstat(file.fileno()).st_size - offset])

    LocalDataFile.write = write  # type: ignore[method-assign]
    LocalAttempt.publish = publish_early  # type: ignore[method-assign]


def record_first() -> None:
    """The attempt's entries are moved one by one, the record before the others."""

    def move(source: str, target: str) -> None:
        os.mkdir(target)
        for name in sorted(os.listdir(source), key=lambda name: name != RECORD_NAME):
            os.rename(os.path.join(source, name), os.path.join(target, name))
        os.rmdir(source)

    publish.rename_noreplace = move


def old_removed_first() -> None:
    """A checkpoint is removed before the one that replaces it has taken its name."""

    def replace(source: str, target: str) -> None:
        shutil.rmtree(target)
        os.rename(source, target)
        os.mkdir(source)

    publish.rename_exchange = replace


def retention_first() -> None:
    """Old steps are deleted before the new one is saved."""
    begin = LocalStore.begin

    async def delete_then_begin(self: LocalStore, *args: Any, **kwargs: Any) -> LocalAttempt:
        for name in sorted(await self.names())[:-1]:
            await (await self.unlist(name))()
        return await begin(self, *args, **kwargs)

    LocalStore.begin = delete_then_begin  # type: ignore[method-assign]


def flush_errors_ignored() -> None:
    """A failed flush of a file or directory is taken for a success."""
    for module, name in (
        (tree, "flush_file"),
        (tree, "flush_directory"),
        (datafile, "flush_file"),
        (publish, "flush_directory"),
    ):
        setattr(module, name, _quiet(getattr(posix, name)))


def files_not_flushed() -> None:
    """Files are written and never flushed."""
    for module in (tree, datafile):
        module.flush_file = _nothing  # type: ignore[attr-defined]


def directories_not_flushed() -> None:
    """Names are made and never flushed."""
    for module in (tree, publish):
        module.flush_directory = _nothing  # type: ignore[attr-defined]


def write_errors_ignored() -> None:
    """A failed write is taken for a success."""
    for module in (tree, datafile):
        module.write_all = _quiet(posix.write_all)  # type: ignore[attr-defined]


def short_writes_ignored() -> None:
    """What a write left out is not written."""

    def write_once(fd: int, data: memoryview, offset: int) -> None:
        os.pwrite(fd, data, offset)

    for module in (tree, datafile):
        module.write_all = write_once  # type: ignore[attr-defined]


def nothing_aborted() -> None:
    """A failed attempt stays, with its descriptors and its lock."""

    async def abort(self: LocalAttempt) -> None:
        return None

    LocalAttempt.abort = abort  # type: ignore[method-assign]


def _quiet(call: Callable[..., Any]) -> Callable[..., None]:
    def quiet(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):
            call(*args, **kwargs)

    return quiet


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
