"""What processes of a JAX job do in tests of restores that read once."""

from __future__ import annotations

from typing import Any

import jax

from asyncckpt import Checkpointer, blocking
from tests.processes import jax_cases
from tests.processes.exchange_cases import ONCE, differing, reading, target
from tests.processes.worker import Worker

COMPILED = "/jax/core/compile/backend_compile_duration"


def compilations(worker: Worker, root: str) -> list[int]:
    """Restore twice, in many batches; how often JAX has compiled for that."""
    counts = [0]

    def listen(event: str, duration: float, **_: Any) -> None:
        counts[-1] += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with reading(), blocking.Checkpointer(root) as ckpt:
            like = target(worker, "all")
            assert differing(ckpt.restore(1, like=like, options=ONCE), like) == []
            counts.append(0)
            assert differing(ckpt.restore(1, like=like, options=ONCE), like) == []
    finally:
        jax.monitoring.clear_event_listeners()
    return counts


def restore_under(worker: Worker, root: str, setting: str) -> list[str]:
    """Restore in a thread with a setting of JAX; the paths of wrong leaves."""
    settings: dict[str, Any] = {
        "mesh": lambda: jax.set_mesh(jax_cases.mesh("turned")),
        "no jit": jax.disable_jit,
    }
    like = target(worker, "all")
    with reading(), blocking.Checkpointer(root) as ckpt, settings[setting]():
        return differing(ckpt.restore(1, like=like, options=ONCE), like)


async def move(worker: Worker, root: str) -> list[str]:
    """Save a train state, restore it onto another mesh; the paths of wrong leaves."""
    with reading():
        async with Checkpointer(root) as ckpt:
            await ckpt.save(1, jax_cases.state(worker, "mesh", 1))
            like = jax_cases.state(worker, "turned", 9)
            tree = await ckpt.restore(1, like=like, options=ONCE)
    return jax_cases.wrong(tree, "turned", 1, worker)
