"""Checkpoints of Orbax, made by Orbax in all the ways in which it makes them."""

from __future__ import annotations

import builtins
import inspect
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1

KEY = jax.random.key(7)
KEYS = jax.random.split(jax.random.key(8, impl="rbg"), 3)
RNG = np.random.default_rng(5)


@contextmanager
def as_orbax_likes_it() -> Iterator[None]:
    """Its warnings are not ours, and blockbuster's `dir` fails on objects of its."""
    patched = builtins.dir
    builtins.dir = inspect.unwrap(dir)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        builtins.dir = patched


def arrays() -> dict[str, Any]:
    """Array leaves of every kind."""
    return {
        "large": RNG.standard_normal((300, 70)).astype(np.float32),
        "zeros": np.zeros((5, 4), np.float64),
        "int": np.arange(-3, 4, dtype=np.int8),
        "bool": np.array([True, False, True]),
        "complex": np.array([1 + 2j, -0.0], np.complex64),
        "jax": {
            "large": jnp.asarray(RNG.standard_normal((40, 60)), jnp.float32),
            "bf16": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
            "scalar": jnp.float32(2.5),
            "fp8": jnp.arange(4).astype(jnp.float8_e4m3fn),
            "int4": jnp.arange(-4, 4).astype(jnp.int4),
        },
        "list": [np.arange(3), {"b.c": np.arange(2.0)}, (np.int16([7]), np.arange(1))],
    }


def keys() -> dict[str, Any]:
    """Typed PRNG keys."""
    return {"key": KEY, "keys": KEYS}


def scalars() -> dict[str, Any]:
    """Python numbers, and empty containers."""
    return {
        "n": -41, "rate": 0.1, "flag": True,
        "none": None, "dict": {}, "nothing": [], "tuple": (),
    }  # fmt: skip


def strings() -> dict[str, Any]:
    """Strings."""
    return {"text": "héllo", "deep": ["", {"x": "two\nlines"}]}


def state() -> dict[str, Any]:
    """A training state: parameters, the state of an optimizer with empty parts, a step."""
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"params": params, "opt": optimizer.init(params), "step": 3}


def everything() -> dict[str, Any]:
    """What Orbax saves as one tree."""
    return {**arrays(), **keys(), **scalars(), **strings(), "state": state()}


def no_strings() -> dict[str, Any]:
    """`StandardCheckpointer` takes no strings."""
    return {**arrays(), **keys(), **scalars(), "state": state()}


def without_keys() -> dict[str, Any]:
    """Without OCDBT, Orbax takes no typed keys."""
    return {**arrays(), **scalars(), **strings(), "state": state()}


def pytree(directory: Path, tree: Any, **options: Any) -> Path:
    """`PyTreeCheckpointer`."""
    with as_orbax_likes_it():
        checkpointer = ocp.PyTreeCheckpointer(**options)
        checkpointer.save(directory, tree)
        checkpointer.close()
    return directory


def handler(directory: Path, tree: Any, args: dict[str, Any], **options: Any) -> Path:
    """A `Checkpointer` with a handler that has further options, and arguments of its save."""
    with as_orbax_likes_it(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
        writer.save(directory, args=ocp.args.PyTreeSave(tree, **args))
    return directory


def standard(directory: Path, tree: Any) -> Path:
    """`StandardCheckpointer`."""
    with as_orbax_likes_it(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)
    return directory


def manager(directory: Path, tree: Any, **given: Any) -> Path:
    """The second step of a `CheckpointManager`; its options may name steps otherwise."""
    options = ocp.CheckpointManagerOptions(**given)
    with as_orbax_likes_it(), ocp.CheckpointManager(directory, options=options) as checkpoints:
        for step in (1, 12):
            checkpoints.save(step, args=ocp.args.PyTreeSave(tree))
        checkpoints.wait_until_finished()
    return max(directory.iterdir())


PADDED: dict[str, Any] = {"step_format_fixed_length": 8}
PREFIXED: dict[str, Any] = {"step_prefix": "ckpt"}


def version_1(directory: Path, tree: Any) -> Path:
    """`save` of version 1."""
    with as_orbax_likes_it():
        v1.save(directory, tree, custom_metadata={"by": "hand"})
    return directory


def version_1_step(directory: Path, tree: Any) -> Path:
    """A step of the `Checkpointer` of version 1."""
    with as_orbax_likes_it(), v1.training.Checkpointer(directory) as checkpointer:
        checkpointer.save(5, tree, metrics={"loss": 0.25})
    return directory / "5"


def unmerged(directory: Path, tree: Any) -> Path:
    """The databases of single processes, which Orbax has not merged yet."""
    pytree(directory, tree, use_ocdbt=True, use_zarr3=True)
    (directory / "manifest.ocdbt").unlink()
    shutil.rmtree(directory / "d")
    return directory


Writer = tuple[Callable[[Path, Any], Path], Callable[[], dict[str, Any]]]

WRITERS: dict[str, Writer] = {
    "zarr2": (pytree, everything),
    "zarr3": (lambda d, t: pytree(d, t, use_ocdbt=True, use_zarr3=True), everything),
    "directories-zarr2": (lambda d, t: pytree(d, t, use_ocdbt=False), without_keys),
    "directories-zarr3": (
        lambda d, t: pytree(d, t, use_ocdbt=False, use_zarr3=True), without_keys,
    ),
    "standard": (standard, no_strings),
    "manager": (manager, everything),
    "manager-item": (lambda d, t: manager(d, t) / "default", everything),
    "v1": (version_1, everything),
    "v1-item": (lambda d, t: version_1(d, t) / "state", everything),
    "v1-step": (version_1_step, everything),
    "unmerged": (unmerged, everything),
    "small-files": (
        lambda d, t: handler(d, t, {"ocdbt_target_data_file_size": 2048}, use_zarr3=True),
        everything,
    ),
    "small-chunks": (
        lambda d, t: handler(
            d, t,
            {"save_args": jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=512), t)},
            use_zarr3=True,
        ),
        everything,
    ),
}  # fmt: skip
