"""Storage plug-ins for `torch.distributed.checkpoint` (DCP).

::

    dcp.save(state_dict, storage_writer=asyncckpt.torch.StorageWriter("/shared/run/7"))
    dcp.load(state_dict, storage_reader=asyncckpt.torch.StorageReader("/shared/run/7"))

DCP's planners decide what each rank writes and reads; this library writes and reads it. Importing
this package imports PyTorch.
"""

from __future__ import annotations

try:
    from asyncckpt.torch.storage_reader import StorageReader
    from asyncckpt.torch.storage_writer import StorageWriter
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        'asyncckpt.torch needs PyTorch: pip install "asyncckpt[torch]"', name="torch"
    ) from None

__all__ = ["StorageReader", "StorageWriter"]
