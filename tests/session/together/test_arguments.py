"""Arguments that must be equal on all processes."""

from __future__ import annotations

from typing import Any

import pytest

from asyncckpt import Checkpointer
from asyncckpt.errors import MismatchError
from tests.session.together.job import Job, state


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("saves", [0, 1, 2], ids=["first", "known to some", "known"])
def test_overwrite_that_differs_by_process_is_named(job: Job, saves: int, process: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for number in range(saves):
            await ckpt.save(number, state(), overwrite=number == 1)
        with pytest.raises(MismatchError) as caught:
            await ckpt.save(5, state(), overwrite=this == process)
        await ckpt.save(6, state())
        assert await ckpt.latest_step() == 6
        return str(caught.value)

    for text in job.play(part):
        assert f"overwrite={process == 0} on process 0" in text, text
        assert f"overwrite={process == 1} on process 1" in text, text
        assert "pass the same overwrite=" in text, text
