"""Collectives of a single process: results and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from asyncckpt.coordinators.jax import Gathers, JaxExchange
from asyncckpt.errors import ResourceError, StoreError

PIECE = np.arange(1000, dtype=np.uint8)


async def here(function: Callable[[], Any]) -> Any:
    return function()


def exchange() -> JaxExchange:
    return JaxExchange(0, {}, here)


async def test_what_is_gathered_is_what_was_given() -> None:
    assert np.array_equal(await exchange().gather((0,), PIECE), PIECE)


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        ("RESOURCE_EXHAUSTED: out of memory", ResourceError, "needs 2000 bytes on"),
        ("INTERNAL: connection reset", StoreError, "connection reset"),
    ],
)
async def test_errors_of_the_runtime_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, message: str, kind: type[Exception], says: str
) -> None:
    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax, "device_put", fail)
    with pytest.raises(kind, match=says) as caught:
        await exchange().gather((0,), PIECE)
    assert "broadcast=False" in str(caught.value)


async def test_members_are_compiled_once() -> None:
    gathers: Gathers = {}
    for _ in range(3):
        await JaxExchange(0, gathers, here).gather((0,), PIECE)
    assert len(gathers) == 1
