"""What anybody does first, everywhere: defaults, one option at a time, and a small state."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import asyncckpt
from asyncckpt import SaveOptions
from tests.simulator import Simulator, simulator
from tests.stores.objects.stores import session

PLACES = ("disk", "memory", "s3fs", "obstore", "gcsfs")

OPTIONS = {
    "defaults": SaveOptions(),
    "zstd": SaveOptions(compression="zstd"),
    "reference": SaveOptions(snapshot="reference"),
    "both": SaveOptions(snapshot="reference", compression="zstd"),
    "one stream": SaveOptions(concurrency=1),
    "many streams": SaveOptions(concurrency=64),
    "many streams, zstd": SaveOptions(concurrency=64, compression="zstd"),
    "small files": SaveOptions(target_data_file_nbytes=8 << 20),
    "small chunks": SaveOptions(chunk_nbytes=64 << 10),
}


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as running:
        yield running


def opened(place: str, sim: Simulator, tmp_path: Path, **more: Any) -> asyncckpt.Checkpointer:
    name = tmp_path.name
    if place == "disk":
        return asyncckpt.Checkpointer(tmp_path / "run", **more)
    if place == "memory":
        return asyncckpt.Checkpointer(f"memory://plain/{name}", **more)
    if place == "gcsfs":
        options, scheme = sim.gcs_options(client="fsspec"), "gs"
    elif place == "s3fs":
        options, scheme = sim.s3_options(client="fsspec", session=session()), "s3"
    else:
        options, scheme = sim.s3_options(client="obstore"), "s3"
    return asyncckpt.Checkpointer(f"{scheme}://bucket/{name}", storage_options=options, **more)


def state(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "weights": [rng.standard_normal((n, 333), np.float32) for n in (1, 40, 700)],
        "device": jnp.asarray(rng.standard_normal((129, 65), np.float32)),
        "half": rng.standard_normal(5000).astype(jnp.bfloat16),
        "large": rng.integers(0, 9, 3_000_001, np.uint8),
        "tiny": {str(n): rng.integers(0, 99, n + 1) for n in range(20)},
        "step": seed,
        "rate": 1e-3,
        "none": None,
        "empty": np.zeros((0, 4)),
    }


@functools.cache
def expected_state(seed: int) -> dict[str, Any]:
    """The state, in arrays that are given to nothing that could change them."""
    return state(seed)


def check(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected)
        for key, value in expected.items():
            check(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    elif hasattr(expected, "shape"):
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    else:
        assert found == expected


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("place", PLACES)
async def test_what_is_saved_is_restored(
    place: str, name: str, sim: Simulator, tmp_path: Path
) -> None:
    async with (
        asyncio.timeout(60),
        opened(place, sim, tmp_path, save_options=OPTIONS[name]) as ckpt,
    ):
        await ckpt.save(1, state(1))
        await (await ckpt.start_save(2, state(2)))
        check(await ckpt.restore(1), expected_state(1))
        check(await ckpt.restore(), expected_state(2))
        target = state(3)
        into = {key: target[key] for key in ("weights", "half", "large", "tiny", "empty")}
        await ckpt.restore_into(into, step=1, strict=False)
        check(into, {key: expected_state(1)[key] for key in into})
        assert (await ckpt.verify()).ok
        assert await ckpt.steps() == [1, 2]
        await ckpt.delete(1)
        assert await ckpt.steps() == [2]
