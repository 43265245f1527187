"""Options of a session that a single save cannot set."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import SaveOptions
from asyncckpt.errors import UsageError
from asyncckpt.options import MIB
from tests.script import Script
from tests.simulator import simulator

TREE = {"w": np.arange(1000.0)}
OWN: dict[str, Any] = {
    "host_memory_nbytes": 128 * MIB,
    "direct_io": False,
    "exit_deadline_s": 5.0,
}


@pytest.mark.parametrize("name", OWN)
async def test_an_option_of_the_constructor_is_refused_at_a_single_save(
    tmp_path: Path, name: str
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        text = f"{name}={OWN[name]!r}): all saves of a Checkpointer share this"
        for save in (ckpt.save, ckpt.start_save):
            with pytest.raises(UsageError, match=re.escape(text) + ".*pass it to the constructor"):
                await save(1, TREE, options=SaveOptions(**{name: OWN[name]}))
        assert not script.count("begin")


async def test_options_made_from_those_of_the_constructor_are_accepted(tmp_path: Path) -> None:
    shared = SaveOptions(**OWN)
    async with asyncckpt.Checkpointer(tmp_path, save_options=shared) as ckpt:
        await ckpt.save(1, TREE, options=dataclasses.replace(shared, compression="zstd"))
        await ckpt.save(2, TREE, options=SaveOptions(compression="zstd"))
    await asyncckpt.save(tmp_path / "one", TREE, options=shared)


async def test_storage_options_that_the_caller_changes_after_the_call_are_as_they_were() -> None:
    """A URL is opened at its first use; until then, the dict may serve for another store."""
    with simulator() as sim, simulator() as other:
        options = sim.s3_options(client="fsspec")
        inner = options["client_kwargs"]
        inner["endpoint_url"] = options.pop("endpoint_url")
        ckpt = asyncckpt.Checkpointer("s3://bucket/run", storage_options=options)
        inner["endpoint_url"] = other.s3_endpoint
        options["anon"] = True
        await ckpt.save(1, TREE)
        await ckpt.close()
        assert sim.objects("bucket") and not other.objects("bucket")
