"""Our classes with the arguments of DCP's file system classes, for `tests.torch.upstream`."""

from __future__ import annotations

from typing import Any

from asyncckpt.torch import StorageReader, StorageWriter


class FileSystemWriter(StorageWriter):
    """Overwrites, and stores any value, as the class does in whose place it is."""

    def __init__(
        self,
        path: Any,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = None,
    ) -> None:
        if _extensions:
            raise NotImplementedError("stream extensions")
        super().__init__(path, overwrite=overwrite, opaque="allow")


class FileSystemReader(StorageReader):
    """Converts dtypes, as the class does in whose place it is."""

    def __init__(self, path: Any, _extension_registry: Any = None) -> None:
        super().__init__(path, cast=True)
