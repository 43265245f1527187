"""The choice of a coordinator, at the first use of a `Checkpointer` or one-shot function."""

# Rule: nothing is imported that the program has not imported, and no backend is started.

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from asyncckpt.errors import UsageError
from asyncckpt.ports import Coordinator

ALONE = (
    'pass coordinator="single" if this process works alone, or '
    "coordinator=DirectoryCoordinator(...) for processes without a runtime"
)

Place = tuple[int, int]
"""Index and count of the processes of a runtime."""


class SingleProcess:
    """Stand-in for the coordinator of a process that works alone and sends no messages."""

    name = "single"
    process_index = 0
    process_count = 1

    def __repr__(self) -> str:
        return "SingleProcess()"

    async def close(self) -> None:
        """Do nothing: there is no connection or thread."""


def choose(coordinator: object) -> Coordinator | SingleProcess:
    """Return the coordinator for the argument ``coordinator=`` of a public function.

    ``"auto"`` chooses the runtime that was initialised with more than one process, JAX before
    torch.

    Raises:
        UsageError: the runtimes disagree, or there are several processes but no runtime has been
            initialised.
    """
    if coordinator == "auto":
        return _automatic()
    if coordinator == "single":
        return SingleProcess()
    assert not isinstance(coordinator, str)
    return coordinator  # type: ignore[return-value] # its methods have been checked


def sync_point() -> Callable[[int], bool] | None:
    """Return JAX's preemption sync point; None if there is none or JAX is not initialised."""
    if "jax" not in sys.modules:
        return None
    from asyncckpt.coordinators.jax import preemption_sync_point

    return preemption_sync_point()


def _automatic() -> Coordinator | SingleProcess:
    places = _jax_processes(), _torch_processes()
    jax, torch = (place if place is not None and place[1] > 1 else None for place in places)
    if jax is not None and torch is not None and jax != torch:
        raise UsageError(
            f"jax.distributed says that this is process {jax[0]} of {jax[1]}, torch.distributed "
            f"says process {torch[0]} of {torch[1]}: give both runtimes the same ranks, or {ALONE}",
            expected=jax,
            found=torch,
        )
    if jax is not None:
        from asyncckpt.coordinators.jax import JaxCoordinator

        return JaxCoordinator()
    if torch is not None:
        from asyncckpt.coordinators.torch import TorchCoordinator

        return TorchCoordinator()
    # Set by torchrun and other launchers: there are several processes without a runtime.
    size = os.environ.get("WORLD_SIZE", "1")  # noqa: TID251 - not a knob of ours
    if size.isdigit() and int(size) > 1:
        raise UsageError(
            f"WORLD_SIZE={size}, but neither torch.distributed nor jax.distributed has been "
            f"initialised: call torch.distributed.init_process_group() or "
            f"jax.distributed.initialize() before saving or restoring, or {ALONE}",
            found=size,
        )
    return SingleProcess()


def _jax_processes() -> Place | None:
    """Return the processes of jax.distributed, None if it is not initialised."""
    if "jax" not in sys.modules:
        return None
    from asyncckpt.coordinators.jax import initialized_processes, uncoordinated_count

    count = uncoordinated_count()
    if count > 1:
        raise UsageError(
            f"JAX runs on {count} processes, but jax.distributed has not been initialised: call "
            f"jax.distributed.initialize() before anything else, or {ALONE}",
            found=count,
        )
    return initialized_processes()


def _torch_processes() -> Place | None:
    """Return the processes of torch.distributed, None if it is not initialised."""
    if "torch.distributed" not in sys.modules:
        return None
    from asyncckpt.coordinators.torch import initialized_processes

    return initialized_processes()
