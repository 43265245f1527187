"""A process that ends, an index that is made twice, a sweep without an answer, a URL cut short."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.errors import UsageError
from asyncckpt.format.record import decode_record
from asyncckpt.session import root
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from tests import children
from tests.cancellation.points import assert_equal
from tests.objects.stores import CLIENTS, SAVE_OPTIONS, Place, place, state
from tests.simulator import Fault, Gate, Request, Simulator
from tests.stores.objects.stores import options_of

# ------------------------------------------------------------------------------- the process ends

CHILD = """
import json, sys
from dataclasses import replace
from asyncckpt import blocking
from tests.objects.stores import SAVE_OPTIONS, state
ckpt = blocking.Checkpointer(sys.argv[1], storage_options=json.loads(sys.argv[2]),
                             save_options=replace(SAVE_OPTIONS, exit_deadline_s=0.1))
ckpt.save(0, state(0))
pending = ckpt.start_save(1, state(1))
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_process_that_ends_before_the_answer_to_its_record_leaves_a_whole_step(
    kind: str,
) -> None:
    async with place(kind) as at:
        scheme, options = options_of(kind, at.sim)
        options.pop("session", None)
        came = threading.Event()
        at.sim.faults.append(
            Fault(
                kind="put_object",
                key="*/1/checkpoint.json",
                hook=lambda _: came.set(),
                hang=True,
                applied=True,
            )
        )
        url = f"{scheme}://bucket/{at.root}"
        child = children.start(CHILD, url, json.dumps(options), warnings="ignore")
        assert await asyncio.to_thread(came.wait, children.TIMEOUT_S)
        status, _, errors = await asyncio.to_thread(children.finish, child)  # its input ends, too
        assert status == 0, errors
        at.sim.faults.clear()
        async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            assert await ckpt.steps() == [0, 1]
            assert (await ckpt.verify(1)).ok
            assert_equal(await ckpt.restore(), state(1))


# ------------------------------------------------------------------------- the index is made twice


def manifest_of(at: Place, step: int) -> tuple[bytes, bytes]:
    """The manifest as it stands and as the record has it."""
    below = f"{at.root}/{step}"
    record = decode_record(at.sim.get("bucket", f"{below}/checkpoint.json"), location=below)
    return at.sim.get("bucket", f"{below}/{record.database}/manifest.ocdbt"), record.manifest


class IndexMadeTwice:
    """The first try of a data file fails when the index that names it has been stored."""

    def __init__(self, at: Place) -> None:
        self._at = at
        self._stored = Gate()
        data = f"{at.root}/1/default/d/*-0"
        at.sim.faults += [
            Fault(kind="put_object", key=data, gate=self._stored, status=500),
            Fault(key=f"{at.root}/1/default/d/*-index", hook=self._note),
        ]

    def _note(self, request: Request) -> None:
        self._stored.release()

    def at(self, key: str) -> str:
        """The key in the bucket."""
        return f"{self._at.root}/{key}"


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_later_checkpointer_changes_nothing_where_an_index_was_made_twice(
    kind: str,
) -> None:
    policy = RequestPolicy(hedge_cold_s=60.0, hedge_min_s=60.0)
    async with place(kind) as at:
        made = IndexMadeTwice(at)
        async with asyncckpt.Checkpointer(at.store(policy=policy)) as ckpt:
            await ckpt.save(1, {"b": state(1)["b"]})
        at.sim.faults.clear()
        assert [key for key in at.keys("1/") if key.endswith("-index1")]
        stands, meant = manifest_of(at, 1)
        assert stands == meant
        before = {key: at.sim.get("bucket", made.at(key)) for key in at.keys("1/")}
        for missing in ("", "default/manifest.ocdbt"):
            if missing:
                at.sim.delete("bucket", made.at(f"1/{missing}"))
            at.sim.reset()
            async with asyncckpt.Checkpointer(at.store(policy=policy)) as later:
                assert await later.steps() == [1]
            assert {key: at.sim.get("bucket", made.at(key)) for key in at.keys("1/")} == before


# ----------------------------------------------------------------------------------- at the end


@pytest.mark.parametrize("kind", ["obstore", "s3fs"])
async def test_a_sweep_that_is_never_answered_holds_no_close_up(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async with place(kind) as at:
        ckpt = asyncckpt.Checkpointer(at.store(policy=RequestPolicy()), save_options=SAVE_OPTIONS)
        await ckpt.save(1, state(1))
        monkeypatch.setattr(root, "SWEEP_S", 2.0)
        hang = Fault(kind="list_objects", number=0, hang=True)
        at.sim.faults.append(hang)
        async with asyncio.timeout(20):
            await ckpt.close()
        assert hang.happened
        at.sim.faults.clear()
        async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as later:
            assert_equal(await later.restore(), state(1))


# ---------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    "url",
    [
        *("s3://bucket/x", "S3A://bucket/x", "gs://bucket", "memory://x", "https://host/x"),
        *("file:///x", "Local:///x"),
    ],
)
async def test_a_url_that_has_lost_a_slash_is_refused(url: str) -> None:
    lost = Path(url)
    for location in (lost, str(lost)):
        with pytest.raises(UsageError, match=r"lost a slash.*pass the URL as a str") as caught:
            asyncckpt.Checkpointer(location)
        assert str(lost) in str(caught.value)
        with pytest.raises(UsageError, match="lost a slash"):
            await asyncckpt.save(location, {"w": 1})
        with pytest.raises(UsageError, match="lost a slash"):
            await asyncckpt.restore(location)


@pytest.mark.parametrize(
    "url", ["s3://key:s3cr3t@bucket/x", "https://user%3As3cr3t/x", "az://c/x?sig=s3cr3t"]
)
def test_a_url_that_has_lost_a_slash_is_not_shown_with_credentials(url: str) -> None:
    with pytest.raises(UsageError, match="lost a slash") as caught:
        asyncckpt.Checkpointer(Path(url))
    assert "s3cr3t" not in f"{caught.value} {caught.value.found}"


@pytest.mark.parametrize("name", ["data/s3:/bucket", "run:7", "s3", "mys3:/x"])
async def test_a_directory_with_a_colon_is_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    await asyncckpt.save(Path(name), {"w": 1})
    assert (tmp_path / name / "checkpoint.json").exists()
    assert await asyncckpt.restore(name) == {"w": 1}


@pytest.mark.parametrize("url", ["gs://bucket/run", "GS://bucket/run", "GCS://bucket/run"])
async def test_google_is_google_in_any_letters(url: str) -> None:
    async with Simulator("loopback") as sim:
        async with asyncckpt.Checkpointer(url, storage_options=sim.gcs_options()) as ckpt:
            await ckpt.save(1, {"w": 1})
        assert "run/1/commit_success.txt" in sim.objects("bucket")
