"""The exchange of a jax.distributed job: an all-gather over one device of each process."""

# Rule 1: only the caller's thread launches collectives: two threads that launch them in different
#   orders on two processes exchange wrong values.
# Rule 2: bytes travel as uint8, which JAX does not canonicalise, in pieces of one size, so that
#   each set of members compiles once.
# Rule 3: settings of the caller's thread (a mesh of other devices, `jax.disable_jit`, a transfer
#   guard) do not apply.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncckpt.errors import ResourceError, StoreError
from asyncckpt.ports import Bytes, CallIn

Gathers = dict[tuple[int, ...], Callable[[Bytes], Bytes]]
"""The compiled all-gathers of a process, by members."""


class JaxExchange:
    """The collectives of one restore.

    Args:
        process: number of this process.
        gathers: compiled collectives, which belong to the coordinator.
        in_caller: calls them in the caller's thread.
    """

    binding = True

    def __init__(self, process: int, gathers: Gathers, in_caller: CallIn) -> None:
        self._process = process
        self._gathers = gathers
        self._in_caller = in_caller

    async def gather(self, members: tuple[int, ...], piece: Bytes) -> Bytes:
        """Return the pieces of all members, one after the other; as `Exchange.gather`."""
        return await self._in_caller(lambda: self._gather(members, piece))

    def _gather(self, members: tuple[int, ...], piece: Bytes) -> Bytes:
        if members not in self._gathers:
            self._gathers[members] = _compiled(self._process, members)
        try:
            return self._gathers[members](piece)
        except jax.errors.JaxRuntimeError as error:
            nbytes = len(members) * piece.nbytes
            if "RESOURCE_EXHAUSTED" in str(error):
                raise ResourceError(
                    f"the exchange of a restore needs {nbytes + piece.nbytes} bytes on "
                    f"{_devices()[self._process]}, which does not have them: free memory there, or "
                    "pass RestoreOptions(broadcast=False)",
                    expected=nbytes + piece.nbytes,
                ) from error
            raise StoreError(
                f"the exchange of a restore failed in JAX on process {self._process}: {error}; "
                "pass RestoreOptions(broadcast=False) if the backend has no collectives",
                retryable=True,
            ) from error

    async def close(self) -> None:
        """Do nothing: the compiled collectives belong to the coordinator."""


def _devices() -> dict[int, jax.Device]:
    """Return the first device of each process, which takes part in exchanges."""
    # Of equal keys, the last one wins.
    ordered = sorted(jax.devices(), key=lambda device: device.id, reverse=True)
    return {device.process_index: device for device in ordered}


def _compiled(process: int, members: tuple[int, ...]) -> Callable[[Bytes], Bytes]:
    """Return an all-gather of these processes."""
    devices = list(map(_devices().__getitem__, members))
    own = devices[members.index(process)]
    mesh = Mesh(np.array(devices), ("process",))
    apart = NamedSharding(mesh, PartitionSpec("process"))  # type: ignore[no-untyped-call]
    everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    collect = jax.jit(lambda pieces: pieces, out_shardings=everywhere)
    use_mesh: Any = getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh", None)

    def gather(piece: Bytes) -> Bytes:
        with jax.transfer_guard("allow"), jax.disable_jit(False), use_mesh(mesh):
            part = jax.device_put(piece[None], own)
            shape = (len(members), piece.size)
            pieces = jax.make_array_from_single_device_arrays(shape, apart, [part])
            gathered: Bytes = np.asarray(collect(pieces).addressable_data(0))
        return gathered.reshape(-1)

    return gather
