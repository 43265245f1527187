"""The coordinator of a jax.distributed job: the key-value service of its runtime.

Its exchange is an all-gather over one device of each process.
"""

# Rule 1: no other file uses jax._src.distributed, whose names may change with any release.
#   (test_the_client_has_the_methods_that_are_used)
# Rule 2: no barriers (the id of one that timed out fails for good), and nothing that starts a
#   backend: a later jax.distributed.initialize would fail.
# Rule 3: only the methods for bytes, because `key_value_dir_get` fails on values other than UTF-8,
#   and none that block: the service keeps 14 KB for each that times out while its key is missing.
# Rule 4: only the caller's thread launches collectives: two threads that launch them in different
#   orders on two processes exchange wrong values.
# Rule 5: bytes travel as uint8, which JAX does not canonicalise, in pieces of one size, so that
#   each set of members compiles once.
# Rule 6: settings of the caller's thread (a mesh of other devices, `jax.disable_jit`, a transfer
#   guard) do not apply to collectives.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.distributed
import numpy as np
from jax._src import distributed, xla_bridge
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from asyncckpt.coordinators.service import ServiceCoordinator
from asyncckpt.errors import ResourceError, StoreError, UsageError
from asyncckpt.ports import Bytes, CallIn

CLIENT_METHODS = (
    "key_value_delete",
    "key_value_dir_get_bytes",
    "key_value_set_bytes",
    "key_value_try_get_bytes",
)
"""Methods of the runtime's client that this file uses."""

Gathers = dict[tuple[int, ...], Callable[[Bytes], Bytes]]
"""The compiled all-gathers of a process, by members."""


def initialized_processes() -> tuple[int, int] | None:
    """Return index and count of the processes of jax.distributed, None if it is not initialised."""
    state = distributed.global_state
    if state.client is None:
        return None
    return state.process_id or 0, state.num_processes or 1


def preemption_sync_point() -> Callable[[int], bool] | None:
    """Return the function that polls the sync point, None if JAX has none.

    It has one once jax.distributed is initialised, even with one process, unless
    `jax_enable_preemption_service` is off.
    """
    if distributed.global_state.preemption_sync_manager is None:
        return None
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    return reached_preemption_sync_point


def uncoordinated_count() -> int:
    """Return the process count of a backend that was started without a client, else 1."""
    if distributed.global_state.client is not None or not xla_bridge.backends_are_initialized():
        return 1
    return int(jax.process_count())


class JaxCoordinator(ServiceCoordinator["JaxService"]):
    """Coordinates the processes of an initialised jax.distributed."""

    def __init__(self) -> None:
        processes = initialized_processes()
        if processes is None:
            raise UsageError("call jax.distributed.initialize() before the JAX coordinator is used")
        client = distributed.global_state.client
        missing = [name for name in CLIENT_METHODS if not hasattr(client, name)]
        if missing:
            raise UsageError(
                f"jax {jax.__version__}: its distributed client has no {', '.join(missing)}; "
                "install a release of jax that asyncckpt was tested with, or coordinate through a "
                "shared directory with coordinator=DirectoryCoordinator(...)"
            )
        super().__init__("jax", *processes, lambda: JaxService(client))
        self.server = f"process 0 ({distributed.global_state.coordinator_address})"
        self._gathers: Gathers = {}

    def exchange(
        self, name: str, *, in_caller: CallIn, in_worker: CallIn, timeout_s: float
    ) -> JaxExchange:
        """Return JAX's collectives, launched in the caller's thread, without a time limit."""
        return JaxExchange(self.process_index, self._gathers, in_caller)


class JaxService:
    """The runtime's client as a `Service`; any number of threads may use it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def put_once(self, key: str, value: bytes) -> bytes:
        def put() -> bytes:
            self._client.key_value_set_bytes(key, value)
            return value

        while True:
            first = _unless("ALREADY_EXISTS", put) or self.look(key)
            if first is not None:
                return first

    def look(self, key: str) -> bytes | None:
        return _unless("NOT_FOUND", lambda: self._client.key_value_try_get_bytes(key))

    def list(self, prefix: str) -> Mapping[str, bytes]:
        start = f"{prefix}/"
        return {
            key.removeprefix(start): value
            for key, value in self._client.key_value_dir_get_bytes(start)
            if key.startswith(start)
        }

    def delete(self, prefix: str) -> None:
        self._client.key_value_delete(prefix)
        self._client.key_value_delete(f"{prefix}/")


def _unless(status: str, call: Callable[[], bytes]) -> bytes | None:
    """Return the value of a call to the service, None if it fails with this status."""
    try:
        return call()
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(status):
            raise
        return None


class JaxExchange:
    """The collectives of one restore.

    Args:
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

    def gather(piece: Bytes) -> Bytes:
        with jax.transfer_guard("allow"), jax.disable_jit(False), jax.set_mesh(mesh):
            part = jax.device_put(piece[None], own)
            shape = (len(members), piece.size)
            pieces = jax.make_array_from_single_device_arrays(shape, apart, [part])
            gathered: Bytes = np.asarray(collect(pieces).addressable_data(0))
        return gathered.reshape(-1)

    return gather
