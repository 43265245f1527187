"""Whatever is wrong with a store or with what is said of it: which error and text, no secret."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.oauth2.credentials import Credentials as GoogleCredentials

import asyncckpt
from asyncckpt import RestoreOptions, SaveOptions, blocking
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineExceededError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.requests import sending
from tests import children
from tests.cancellation.points import assert_equal
from tests.objects.stores import CLIENTS, SAVE_OPTIONS, Place, place, state
from tests.ports import closed_port
from tests.simulator import Credentials, Fault, Gate, Simulator
from tests.stores.objects.stores import session

SECRET = "zXsecretX0815"
TOKEN = "zXtokenX4711"
KEY = "zXkeyX2342"
MARKS = (SECRET, TOKEN, KEY)

KNOWN = Credentials(access_key=KEY, secret_key=SECRET, token=TOKEN)


def options_of(kind: str, sim: Simulator, **changed: Any) -> tuple[str, dict[str, Any]]:
    """Scheme and options that hold secrets, with some of them changed."""
    if kind == "gcsfs":
        token = changed.pop("token", TOKEN)
        account = token if token == "anon" else GoogleCredentials(token)
        return "gs", sim.gcs_options(token=account, **changed)
    client = {"s3fs": {"client": "fsspec", "session": session()}, "obstore": {"client": kind}}[kind]
    return "s3", sim.s3_options(**({"key": KEY, "secret": SECRET} | client | changed))


class Told:
    """Everything that somebody could read of a call: its error, its log, what it has stored."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._log = caplog
        caplog.set_level(logging.DEBUG, logger="asyncckpt")
        self.texts: list[str] = []

    async def error(self, call: Awaitable[Any], kind: type[BaseException], text: str) -> Any:
        """The call failed with this error and text."""
        with pytest.raises(kind, match=text) as caught:
            await call
        self.add(caught.value)
        return caught.value

    def add(self, error: BaseException | None) -> None:
        """The error, its notes, attributes and causes are looked at, too."""
        while error is not None:
            slots = {name: getattr(error, name, None) for name in dir(error) if name[0] != "_"}
            self.texts += [str(error), repr(error), repr(error.args), repr(slots)]
            self.texts += getattr(error, "__notes__", ())
            # What a traceback shows.
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)

    def check(self, *marks: str, objects: Any = ()) -> None:
        """None of the marks is in anything that was told."""
        records = [record for record in self._log.records if record.name.startswith("asyncckpt")]
        texts = self.texts + [record.getMessage() for record in records]
        for mark in marks or MARKS:
            for text in texts:
                assert mark not in text
            for data in objects:
                assert mark.encode() not in data


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """What is told during the test."""
    return Told(caplog)


async def refused(
    told: Told, kind: str, sim: Simulator, text: str, *, bucket: str = "bucket", **changed: Any
) -> None:
    """A save, a restore and a listing fail as they should."""
    scheme, options = options_of(kind, sim, **changed)
    url = f"{scheme}://{bucket}/run"
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: asyncckpt.save(f"{url}/1", state(1), storage_options=options),
        lambda: asyncckpt.restore(f"{url}/1", storage_options=options),
        lambda: steps(url, options),
    ]
    for call in calls:
        error = await told.error(call(), StoreError, text)
        assert error.location.startswith(url)
        assert url in str(error)
        assert not error.retryable
    told.texts += [repr(value) for value in (asyncckpt.Checkpointer(url, storage_options=options),)]
    told.check(objects=sim.objects("bucket").values())


async def steps(url: str, options: dict[str, Any]) -> list[int]:
    """Steps of a root."""
    async with asyncckpt.Checkpointer(url, storage_options=options) as ckpt:
        return await ckpt.steps()


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_bucket_that_does_not_exist(told: Told, kind: str) -> None:
    async with Simulator(credentials=KNOWN) as sim:
        await refused(told, kind, sim, "there is no such bucket.*create the bucket", bucket="other")


@pytest.mark.parametrize("kind", CLIENTS)
async def test_credentials_that_are_wrong(told: Told, kind: str) -> None:
    wrong = {"token": f"{TOKEN}x"} if kind == "gcsfs" else {"secret": f"{SECRET}x"}
    async with Simulator(credentials=KNOWN) as sim:
        await refused(told, kind, sim, "does not accept the credentials", **wrong)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_no_credentials(told: Told, kind: str) -> None:
    none = {"token": "anon"} if kind == "gcsfs" else {"anon": True, "key": None, "secret": None}
    async with Simulator(credentials=KNOWN) as sim:
        text = "does not accept the credentials, or there are none|may not do that"
        await refused(told, kind, sim, text, **none)


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
async def test_a_token_that_has_expired(told: Told, kind: str) -> None:
    credentials = Credentials(KEY, SECRET, session_token="new", expired_tokens=frozenset([TOKEN]))
    async with Simulator(credentials=credentials) as sim:
        text = "does not accept the credentials.*[Ee]xpired.*renew them"
        await refused(told, kind, sim, text, token=TOKEN)


@pytest.mark.parametrize("kind", CLIENTS)
async def test_rights_that_are_missing(told: Told, kind: str) -> None:
    code = "forbidden" if kind == "gcsfs" else "AccessDenied"
    async with Simulator(credentials=KNOWN) as sim:
        sim.faults.append(Fault(number=0, status=403, code=code))
        await refused(told, kind, sim, "these credentials may not do that.*(s3:|roles/)")


async def test_the_wrong_region(told: Told) -> None:
    wrong = {"client_kwargs": {"region_name": "us-east-1"}}
    async with Simulator(credentials=KNOWN, region="eu-west-1") as sim:
        await refused(told, "obstore", sim, "not at this endpoint or in this region", **wrong)
        # botocore asks the bucket where it is.
        scheme, options = options_of("s3fs", sim, **wrong)
        assert await steps(f"{scheme}://bucket/run", options) == []


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_quota_that_is_used_up(told: Told, kind: str) -> None:
    code = "quotaExceeded" if kind == "gcsfs" else "QuotaExceeded"
    async with Simulator(credentials=KNOWN) as sim:
        sim.faults.append(Fault(kind="put_object", number=0, status=403, code=code))
        scheme, options = options_of(kind, sim)
        url = f"{scheme}://bucket/run/1"
        call = asyncckpt.save(url, state(1), storage_options=options)
        error = await told.error(
            call, StoreError, "is full, or its billing is off.*raise the quota"
        )
        assert error.location.startswith(url)
        told.check(objects=sim.objects("bucket").values())


@pytest.mark.parametrize("kind", CLIENTS)
async def test_an_endpoint_at_which_nobody_listens(told: Told, kind: str) -> None:
    workers = Workers(2, "test-objects")
    try:
        with closed_port() as port:
            sim = Simulator()  # it does not run
            sim.s3_endpoint = sim.gcs_endpoint = f"http://127.0.0.1:{port}"
            store = Place(kind, sim, workers).store()
            call = asyncckpt.save((store, "1"), state(1))
            text = "no connection could be kept.*check the endpoint"
            error = await told.error(call, StoreError, text)
    finally:
        workers.shutdown()
    assert error.retryable


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_store_that_never_answers(
    told: Told, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "SILENT_S", 0.1)  # and not the two minutes of others
    async with Simulator(credentials=KNOWN) as sim:
        scheme, options = options_of(kind, sim)
        url = f"{scheme}://bucket/run/1"
        await asyncckpt.save(url, state(1), storage_options=options)
        sim.faults.append(Fault(number=0, hang=True))
        call = asyncckpt.save(
            f"{scheme}://bucket/run/2",
            state(1),
            storage_options=options,
            options=SaveOptions(deadline_s=0.3),
        )
        await told.error(call, DeadlineExceededError, "did not finish within 0.3 s")
        call = asyncckpt.restore(
            url, storage_options=options, options=RestoreOptions(deadline_s=0.3)
        )
        await told.error(call, DeadlineExceededError, "did not finish within 0.3 s")
        told.check(objects=sim.objects("bucket").values())


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_deadline_names_the_answer_for_which_requests_are_repeated(
    told: Told, kind: str
) -> None:
    async with Simulator(credentials=KNOWN) as sim:
        scheme, options = options_of(kind, sim)
        url, soon, named = f"{scheme}://bucket/run/1", 2.0, "the last try that failed: .*503"
        await asyncckpt.save(url, state(1), storage_options=options)
        sim.faults.append(Fault(kind=("put_object", "get_object"), number=0, status=503))
        call = asyncckpt.save(
            f"{scheme}://bucket/run/2",
            state(1),
            storage_options=options,
            options=SaveOptions(deadline_s=soon),
        )
        await told.error(call, DeadlineExceededError, named)
        call = asyncckpt.restore(
            url, storage_options=options, options=RestoreOptions(deadline_s=soon)
        )
        await told.error(call, DeadlineExceededError, named)
        told.check(objects=sim.objects("bucket").values())


@pytest.mark.parametrize("hanging", ["*/d/*", "*/probe-*"], ids=["data", "probe"])
@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_store_that_stops_answering_during_an_upload(
    told: Told, kind: str, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is not followed by two minutes of cleaning up."""
    monkeypatch.setattr(sending, "SILENT_S", 0.1)
    async with Simulator(credentials=KNOWN) as sim:
        scheme, options = options_of(kind, sim)
        sim.faults.append(Fault(kind="put_object", key=hanging, number=0, hang=True))
        sim.faults.append(Fault(kind=("delete_object", "delete_objects"), number=0, hang=True))
        async with asyncio.timeout(30):
            call = asyncckpt.save(
                f"{scheme}://bucket/run/1",
                state(1),
                storage_options=options,
                options=SaveOptions(deadline_s=1.0),
            )
            await told.error(call, DeadlineExceededError, "did not finish within 1.0 s")


@pytest.mark.parametrize("kind", CLIENTS)
async def test_no_secret_is_in_a_checkpoint_or_a_log(told: Told, kind: str) -> None:
    async with Simulator(credentials=KNOWN) as sim:
        scheme, options = options_of(kind, sim)
        async with asyncckpt.Checkpointer(
            f"{scheme}://bucket/run", storage_options=options
        ) as ckpt:
            sim.faults.append(Fault(kind="put_object", number=1, status=503))
            report = await ckpt.save(1, state(1))
            assert_equal(await ckpt.restore(1), state(1))
            core = ckpt._session
            store: Any = core.root.store
            things = (ckpt, core, core.runtime, store, store._requests, store._requests.client)
            told.texts += [repr(thing) for thing in (*things, report, await ckpt.inspect(1))]
        told.check(objects=sim.objects("bucket").values())


# ------------------------------------------------------------------------ changes under our hands


async def read_while(at: Place, change: Callable[[asyncckpt.Checkpointer], Awaitable[None]]) -> Any:
    """What a restore of step 1 gives when this happens after its record was read."""
    async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as writer:
        await writer.save(1, state(1))
        async with asyncckpt.Checkpointer(at.store()) as reader:
            gate = Gate()
            at.sim.faults.append(Fault(kind="get_object", key="*/d/*-0", number=0, gate=gate))
            restoring = asyncio.create_task(reader.restore(1))
            reached = asyncio.create_task(gate.reached.wait())
            async with asyncio.timeout(60):
                await asyncio.wait((restoring, reached), return_when=asyncio.FIRST_COMPLETED)
                assert reached.done(), f"the restore has read nothing: {restoring}"
                await change(writer)
                gate.release()
                return await restoring


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_step_that_is_deleted_while_it_is_restored(told: Told, kind: str) -> None:
    async with place(kind) as at:
        call = read_while(at, lambda writer: writer.delete(1))
        error = await told.error(call, CheckpointNotFoundError, "deleted while being read")
        assert error.location.endswith("://bucket/run/1")


@pytest.mark.parametrize("kind", CLIENTS)
async def test_an_object_that_is_gone_while_it_is_restored(told: Told, kind: str) -> None:
    async with place(kind) as at:

        async def lose(writer: asyncckpt.Checkpointer) -> None:
            for key in at.keys("1/default/d/"):
                if key.endswith("-0"):
                    at.sim.delete("bucket", f"run/{key}")

        text = r"default/d/[0-9a-f]{32}-0 is missing.*restore an older step"
        error = await told.error(read_while(at, lose), CorruptCheckpointError, text)
        assert error.location.endswith("://bucket/run/1")


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_step_that_is_replaced_while_it_is_restored(told: Told, kind: str) -> None:
    async with place(kind) as at:

        async def replace(writer: asyncckpt.Checkpointer) -> None:
            await writer.save(1, state(2), overwrite=True)

        found = await read_while(at, replace)
        assert_equal(found, state(found["step"]))


@pytest.mark.parametrize("kind", CLIENTS)
async def test_bytes_that_are_damaged_on_their_way(told: Told, kind: str) -> None:
    async with place(kind) as at:
        async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            await ckpt.save(1, state(1))
            at.sim.faults.append(Fault(kind="get_object", key="*/d/*-0", number=0, flip=5000))
            text = r"^w: .*d/[0-9a-f]{32}-0.*CRC-32C"
            error = await told.error(ckpt.restore(1), CorruptCheckpointError, text)
            assert (error.path, error.location) == ("w", f"{ckpt._session.root.store.url}/1")
            assert error.file is not None and error.offset is not None


@pytest.mark.parametrize("kind", CLIENTS)
async def test_bytes_that_come_short(told: Told, kind: str) -> None:
    async with place(kind) as at:
        async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            await ckpt.save(1, state(1))
            at.sim.faults.append(Fault(kind="get_object", key="*/d/*-0", number=0, truncate=5000))
            text = r"/1/default/d/[0-9a-f]{32}-0: reading failed: the answer ended too early"
            error = await told.error(ckpt.restore(1), StoreError, text)
            assert error.retryable


# ------------------------------------------------------------------------- what the store cannot do


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_store_that_ignores_conditions(
    told: Told, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with place(kind) as at:

        def ignore(request: Any) -> None:
            request.headers.pop("if-none-match", None)
            request.headers.pop("x-goog-if-generation-match", None)
            request.query.pop("ifGenerationMatch", None)

        at.sim.faults.append(Fault(kind="put_object", number=0, hook=ignore))
        async with asyncckpt.Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            await ckpt.save(1, state(1))
            await told.error(ckpt.save(1, state(2)), CheckpointExistsError, "already exists here")
            assert_equal(await ckpt.restore(1), state(1))
        warned = [
            r.getMessage() for r in caplog.records if "but this server does not" in r.getMessage()
        ]
        assert len(warned) == 1
        assert "both report success, and the later one replaces" in warned[0]


def test_a_scheme_that_nobody_knows() -> None:
    text = "fsspec knows no filesystem for gopher://; use s3://, gs://, memory://"
    with pytest.raises(UsageError, match=text):
        blocking.save("gopher://bucket/run/1", {"a": 1})


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ImportError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from asyncckpt import blocking
try:
    blocking.save(sys.argv[1], {"a": 1}, storage_options=eval(sys.argv[3]))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("url", "missing", "options", "hint"),
    [
        ("s3://bucket/run/1", "s3fs,obstore", {}, 'pip install "asyncckpt[s3]"'),
        ("gs://bucket/run/1", "gcsfs", {}, 'pip install "asyncckpt[gcs]"'),
        ("s3://bucket/run/1", "obstore", {"client": "obstore"}, 'pip install "asyncckpt[fast]"'),
        ("abfs://bucket/run/1", "adlfs", {}, "adlfs"),
    ],
)
def test_a_driver_that_is_not_installed(
    url: str, missing: str, options: dict[str, Any], hint: str
) -> None:
    out = children.output(BLOCKED, url, missing, options)
    assert out.startswith("UsageError")
    assert "not installed" in out
    assert hint in out
    assert url.rpartition("/")[0] in out
