"""A process that ends in the middle of an upload, and the one that comes after it."""

from __future__ import annotations

import json
import signal

import pytest

import asyncckpt
from asyncckpt.stores.objects.gc import remove_garbage
from asyncckpt.stores.objects.layout import is_probe
from tests import children
from tests.cancellation.points import assert_equal
from tests.objects.stores import SAVE_OPTIONS, place, state
from tests.simulator import Fault, Gate
from tests.stores.objects.stores import options_of

CHILD = """
import json, sys
from asyncckpt import SaveOptions, blocking
from asyncckpt.stores.objects.requests.concurrency import ConcurrencyController
from tests.objects.stores import SAVE_OPTIONS, state
# The request at which it ends is not raced by a second one, which would go on without it.
ConcurrencyController.take_hedge = lambda controller: False
with blocking.Checkpointer(sys.argv[1], save_options=SAVE_OPTIONS,
                           storage_options=json.loads(sys.argv[2])) as ckpt:
    ckpt.save(1, state(1))
"""

PLACES = {
    "before its first data": ("*/d/*", 1),
    "at its index": ("*-index*", 1),
    "at its record": ("*/1/checkpoint.json", 1),
    "at its fixed names": ("*/1/default/*.ocdbt", 1),
}
"""Pattern and number of the request at which it ends."""


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
async def test_a_process_that_ends_in_an_upload_leaves_a_whole_step_or_none(
    kind: str, where: str, signum: signal.Signals
) -> None:
    pattern, number = PLACES[where]
    async with place(kind) as at:
        async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            await ckpt.save(0, state(0))
        scheme, options = options_of(kind, at.sim)
        options.pop("session", None)
        gate = Gate()
        at.sim.faults.append(
            Fault(
                kind=("put_object", "put_part"),
                key=pattern,
                number=number,
                gate=gate,
                reset=True,
            )
        )
        child = children.start(CHILD, f"{scheme}://bucket/{at.root}", json.dumps(options))
        await gate.reached.wait()
        child.send_signal(signum)
        status, _, _ = children.finish(child)
        assert status == -signum
        gate.release()
        at.sim.faults.clear()
        committed = where == "at its fixed names"
        async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            assert await ckpt.steps() == ([0, 1] if committed else [0])
            if committed:
                assert_equal(await ckpt.restore(), state(1))
                assert (await ckpt.verify(1)).ok
            else:
                assert_equal(await ckpt.restore(), state(0))
                await ckpt.save(1, state(1))
            await ckpt.save(2, state(2))
            assert_equal(await ckpt.restore(1), state(1))
            core = ckpt._session
            store = core.root.store
            before = {step: at.keys(f"{step}/") for step in range(3)}
            removed = await core.call(
                lambda: remove_garbage(store._context, -5.0, dry_run=False)  # type: ignore[attr-defined]
            ).wait()
            # The first save may have been killed beside an experiment with the store.
            removed = [key for key in removed if not is_probe(key)]
            assert all(key.startswith("1/") for key in removed)
            assert (removed == []) == committed
            assert before[1] == sorted({*at.keys("1/"), *(k for k in removed if "?" not in k)})
            assert at.sim.uploads == []
            for step in range(3):
                assert (await ckpt.verify(step)).ok
                assert_equal(await ckpt.restore(step), state(step))
            assert "1/default/manifest.ocdbt" in at.keys("1/")
