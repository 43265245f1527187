"""From a URL and storage_options to a client, and what is refused on the way."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs.core import GCSFileSystem
from obstore.store import GCSStore, MemoryStore, S3Store
from s3fs import S3FileSystem

import asyncckpt
from asyncckpt import blocking
from asyncckpt.errors import CheckpointExistsError, UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.clients.fsspec_apis import GcsClient, S3Client, s3_options
from asyncckpt.stores.objects.clients.fsspec_client import FsspecClient, MemoryClient
from asyncckpt.stores.objects.clients.obstore_client import ObstoreClient
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.clients.urls import (
    check_options,
    is_url,
    location_text,
    parse_url,
    split_bucket,
    split_url,
)
from asyncckpt.testing.checkpoints import save
from tests.simulator import Fault, Simulator, simulator
from tests.stores.objects.stores import store_of

ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/mine"


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2, "test-clients")
    yield workers
    workers.shutdown()


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3://bucket//a///b/", "s3://bucket/a/b"),
        ("s3a://bucket/a", "s3://bucket/a"),
        ("gcs://bucket/a", "gs://bucket/a"),
        ("gs://bucket/a b%20c?d#e*[f]", "gs://bucket/a b%20c?d#e*[f]"),
        (f"s3://{ARN}/run/1", f"s3://{ARN}/run/1"),
        ("memory://", "memory://"),
        ("memory://a/b", "memory://a/b"),
        ("memory:///a//b", "memory://a/b"),
        ("hdfs://host:8020/a", "hdfs://host:8020/a"),
        ("hdfs:///a/b", "hdfs:///a/b"),
        ("sftp://me@host/a", "sftp://me@host/a"),
        ("sftp://[::1]:22/a", "sftp://[::1]:22/a"),
        ("sftp://[::1]/a", "sftp://[::1]/a"),
        ("abfs://container@account.dfs.core.windows.net/a", None),
    ],
)
def test_a_url_has_one_form(given: str, normal: str | None) -> None:
    assert str(parse_url(given)) == (normal or given)
    assert str(parse_url(str(parse_url(given)))) == (normal or given)


@pytest.mark.parametrize(
    ("url", "root", "name"),
    [
        ("s3://bucket/final", "s3://bucket", "final"),
        ("s3://bucket/run//final/", "s3://bucket/run", "final"),
        ("gcs://bucket/run/final", "gs://bucket/run", "final"),
        (f"s3://{ARN}/final", f"s3://{ARN}", "final"),
        ("memory://final", "memory://", "final"),
        ("memory://run/final", "memory://run", "final"),
        ("gs://bucket/a%20b?c", "gs://bucket", "a%20b?c"),
    ],
)
def test_a_url_of_one_checkpoint_is_a_root_and_a_name(url: str, root: str, name: str) -> None:
    assert split_url(url) == (root, name)


def test_a_bucket_alone_is_no_checkpoint() -> None:
    for url in ("s3://bucket", "gs://bucket/"):
        with pytest.raises(UsageError, match=r"bucket: names no checkpoint; add its name: .*/name"):
            split_url(url)
    with pytest.raises(UsageError, match=r"memory://: names no checkpoint; .*: memory://name$"):
        split_url("memory://")


def test_a_location_of_one_part_is_reported_as_it_can_be_opened_again() -> None:
    name = uuid.uuid4().hex
    for location in (f"memory://{name}", f"memory:///{name}"):
        report = blocking.save(location, {"w": [1.0]}, overwrite=True)
        assert report.location == f"memory://{name}"
        assert blocking.inspect(report.location).location == report.location
    with pytest.raises(CheckpointExistsError, match=f"^memory://{name}: ") as caught:
        blocking.save(f"memory://{name}", {"w": [1.0]})
    assert caught.value.location == f"memory://{name}"


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:s3cr3t@bucket/run",
        "s3://key:s3cr/3t@bucket/run",
        "s3://s3cr3t@bucket/run",
        "gs://user:s3cr3t@bucket",
        "sftp://user:s3cr3t@host/run",
        "sftp://user:s3cr/3t@host/run",
        "simplecache::s3://key:s3cr/3t@bucket/run",
        "https://host/run?token=s3cr3t",
        "https://s3cr3t@host/run",
        "https://user%3As3cr3t@host/run",
        "webhdfs://user%3as3cr3t@host/run",
        "http://host/run#s3cr3t",
        "az://container/run?sv=1&sig=s3cr3t",
        "s3://bucket/run?X-Amz-Credential=s3cr3t",
        "gs://bucket/run?X-Goog-Signature=s3cr3t",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_shown(url: str) -> None:
    for call in (parse_url, split_url):
        with pytest.raises(UsageError) as caught:
            call(url)
        assert "s3cr" not in str(caught.value)
        assert "3t" not in str(caught.value)
        assert "s3cr" not in str(caught.value.location)
    assert "s3cr" not in location_text(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "names no bucket"),
        ("gs:///run", "names no bucket"),
        ("s3://bucket/a/../b", r"'\.\.' does not navigate"),
        ("s3://bucket/./b", r"'\.' does not navigate"),
        ("s3://bucket/a\nb", "control characters"),
        ("s3://bucket/a?versionId=1", "a URL with a query"),  # s3fs would read a
        ("bucket/run", "pass a URL with a scheme"),
        ("simplecache::s3://bucket/run", "chained URLs are not supported"),
        ("zip://a.zip::s3://bucket/run", "chained URLs are not supported"),
        ("zip://x::h/x.zip", "chained URLs are not supported"),
    ],
)
def test_a_url_that_names_no_place_is_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_url(url)


def test_what_is_a_url() -> None:
    for url in ("s3://b", "memory://a", "simplecache::s3://b/c", "x+y.z://a", "gs://b/a::b"):
        assert is_url(url)
    for path in ("/data/run", "file:///data", "local:///data", "a:b", "C:/x", 7, None, b"s3://b"):
        assert not is_url(path)


@pytest.mark.parametrize("scheme", ["file", "File", "FILE", "local", "LOCAL"])
def test_a_local_url_is_a_directory_in_any_letters(scheme: str, tmp_path: Path) -> None:
    """Kept by the local store, with its promises, and not by a filesystem of fsspec."""
    blocking.save(f"{scheme}://{tmp_path}/a", {"w": [1.0]})
    assert (tmp_path / "a").is_dir()
    with blocking.Checkpointer(f"{scheme}://{tmp_path}/run") as ckpt:
        ckpt.save(3, {"w": [2.0]})
        assert ckpt.steps() == [3]
    assert (tmp_path / "run" / "3").is_dir()


@pytest.mark.parametrize("url", ["file://", "file:///", "LOCAL:////", "file://localhost/"])
def test_a_local_url_without_a_directory_is_refused(url: str) -> None:
    for call in (blocking.Checkpointer, blocking.restore):
        with pytest.raises(UsageError, match=f"{url}: names no directory; pass its whole path"):
            call(url)


@pytest.mark.parametrize("name", ["key", "secret", "token", "username", "password"])
@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_a_credential_with_a_control_character_is_refused_and_not_shown(
    name: str, client: str
) -> None:
    options = {"client": client, name: "s3cr3t\n"}
    with pytest.raises(UsageError, match=f"'{name}'.*contains a control character") as caught:
        blocking.Checkpointer("s3://bucket/run", storage_options=options)
    assert "s3cr3t" not in str(caught.value)
    check_options({"token": '{\n"type": "service_account"}\n'})


def test_a_key_of_the_environment_with_a_control_character_is_refused_and_not_shown(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "s3cr3t\n")
    with pytest.raises(UsageError, match="variable AWS_ACCESS_KEY_ID contains a control") as caught:
        open_client("s3://bucket/run", storage_options={"client": "obstore"}, workers=workers)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "LocalHost"])
def test_a_local_url_may_name_this_host(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = blocking.save(f"file://{host}{tmp_path}/a", {"w": [1.0]})
    assert report.location == f"{tmp_path}/a" and blocking.verify(tmp_path / "a").ok
    assert not (tmp_path / host).exists()


class Strict(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem that passes its arguments on, as that of SFTP does, and caches listings."""

    protocol = "strict"

    def __init__(self, *, user: str = "", **others: Any) -> None:
        super().__init__(**others)
        assert not others, others

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(str(path).replace("strict://", "memory://"))
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **options)
        found = self.dircache[path] if path in self.dircache else super().ls(path, detail=True)
        return found if detail else [entry["name"] for entry in found]


def test_a_filesystem_gets_the_users_arguments_alone_and_keeps_no_listings() -> None:
    fsspec.register_implementation("strict", Strict, clobber=True)
    with blocking.Checkpointer("strict://test/run", storage_options={"user": "me"}) as ckpt:
        for step in range(3):
            ckpt.save(step, {"w": [1.0]})
            assert ckpt.steps() == list(range(step + 1))


class Plain(Strict):
    """A filesystem with a cache of its own, and an option of any name."""

    protocol = "strict"

    def __init__(self, *, kind: str) -> None:
        super().__init__(user=kind)
        self.dircache = {}


def test_a_filesystem_may_have_a_cache_of_its_own_and_any_options() -> None:
    fsspec.register_implementation("strict", Plain, clobber=True)
    blocking.save("strict://test/plain", {"w": [1.0]}, storage_options={"kind": "mine"})


async def test_the_caller_of_a_checkpointer_does_not_wait_for_its_client(
    monkeypatch: pytest.MonkeyPatch, sim: Simulator
) -> None:
    """Libraries, configuration and credentials are loaded in a worker, at the first use."""
    threads: list[str] = []

    def opened(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return open_client(*args, **kwargs)

    monkeypatch.setattr("asyncckpt.stores.objects.clients.opening.open_client", opened)
    ckpt = asyncckpt.Checkpointer("s3://bucket/run", storage_options=sim.s3_options())
    assert threads == []
    assert await ckpt.steps() == []
    assert len(threads) == 1 and threads[0] != threading.current_thread().name
    await ckpt.close()


def test_keys_may_hold_what_other_urls_give_a_meaning(workers: Workers) -> None:
    client = open_client("gs://bucket/a::b/c?d#1%2F", workers=workers)
    assert client.url == "gs://bucket/a::b/c?d#1%2F"


def test_buckets_and_access_points() -> None:
    assert split_bucket("bucket/a/b") == ("bucket", "a/b")
    assert split_bucket("bucket") == ("bucket", "")
    assert split_bucket(f"{ARN}/a/b") == (ARN, "a/b")
    outpost = "arn:aws:s3-outposts:us-east-1:123456789012:outpost/op-1/accesspoint/mine"
    assert split_bucket(f"{outpost}/a") == (outpost, "a")


# ---------------------------------------------------------------------------- which client it is


OPTIONS = {"key": "AKIAEXAMPLE", "secret": "s3cr3t-value", "endpoint_url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("s3://bucket/run", OPTIONS, ObstoreClient),
        ("s3://bucket/run", OPTIONS | {"client": "auto"}, ObstoreClient),
        ("s3://bucket/run", OPTIONS | {"client": "obstore"}, ObstoreClient),
        ("s3://bucket/run", OPTIONS | {"client": "fsspec"}, S3Client),
        ("s3://bucket/run", OPTIONS | {"session": object()}, S3Client),
        ("gs://bucket/run", {"token": "s3cr3t-value"}, GcsClient),
        ("gcs://bucket/run", None, GcsClient),
        ("memory://run", None, MemoryClient),
        ("http://127.0.0.1:1/run", None, FsspecClient),
    ],
)
async def test_the_scheme_and_the_options_choose_a_client(
    workers: Workers, url: str, options: dict[str, Any] | None, kind: type
) -> None:
    client = open_client(url, storage_options=options, workers=workers)
    assert type(client) is kind
    assert client.url == url.replace("gcs:", "gs:")
    assert client.url in repr(client)
    for value in ("s3cr3t", "AKIA", "127.0.0.1:1" if "http" not in url else "s3cr3t"):
        assert value not in repr(client)
    await client.close()


def test_options_of_the_user_are_not_changed(workers: Workers) -> None:
    options = {"client": "fsspec", "config_kwargs": {"s3": {"addressing_style": "path"}}}
    before = repr(options)
    open_client("s3://bucket/run", storage_options=options, workers=workers)
    made = s3_options(options)
    assert repr(options) == before
    assert made["config_kwargs"]["s3"] == {"addressing_style": "path"}
    assert made["config_kwargs"]["retries"]["total_max_attempts"] == 1
    assert made["asynchronous"] and made["skip_instance_cache"] and not made["use_listings_cache"]
    mine = s3_options({"config_kwargs": {"max_pool_connections": 3, "read_timeout": 1}})
    assert mine["config_kwargs"]["max_pool_connections"] == 3
    assert mine["config_kwargs"]["read_timeout"] == 1
    assert mine["config_kwargs"]["request_checksum_calculation"] == "when_required"


def test_a_store_of_obstore_excludes_other_options(workers: Workers) -> None:
    given = {"client": MemoryStore(), "key": "x"}
    with pytest.raises(UsageError, match="a store of obstore has its own options"):
        open_client("memory://run", storage_options=given, workers=workers)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
@pytest.mark.parametrize("given", ["s3fs", "gcsfs", "boto3", object(), 7])
def test_a_client_that_is_none_is_refused_with_those_there_are(
    workers: Workers, url: str, given: object
) -> None:
    with pytest.raises(UsageError, match="'auto', 'fsspec', 'obstore'") as caught:
        open_client(url, storage_options={"client": given, "key": "s3cr3t"}, workers=workers)
    assert url in str(caught.value) and type(given).__name__ in str(caught.value)
    assert caught.value.found == type(given).__name__
    assert "s3cr3t" not in str(caught.value)
    assert "0x" not in str(caught.value)


def test_a_name_that_no_filesystem_has_an_option_for_is_refused(workers: Workers) -> None:
    with pytest.raises(UsageError, match="'auto', 'fsspec', 'obstore'"):
        open_client("memory://run", storage_options={"client": "s3fs"}, workers=workers)


@pytest.mark.parametrize("options", [[("key", "s3cr3t")], "s3cr3t", 7])
def test_options_that_are_no_mapping_are_refused(workers: Workers, options: Any) -> None:
    with pytest.raises(UsageError, match="pass a dict of options") as caught:
        open_client("s3://bucket/run", storage_options=options, workers=workers)
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.found == type(options).__name__


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("s3://bucket/run", OPTIONS | {"client": None}, ObstoreClient),
        ("gs://bucket/run", {"client": None, "token": "s3cr3t-value"}, GcsClient),
        ("gs://bucket/run", {"client": None, "token": "anon"}, ObstoreClient),
        ("memory://run", {"client": None}, MemoryClient),
        ("memory://run", {"client": "fsspec"}, MemoryClient),
    ],
)
def test_no_client_is_as_if_nothing_was_said(
    workers: Workers, url: str, options: dict[str, Any], kind: type
) -> None:
    assert type(open_client(url, storage_options=options, workers=workers)) is kind


class Derived(S3Store):  # type: ignore[misc]
    """A store that somebody has derived from one of obstore's: its bucket is not looked for."""


KNOWN = {"access_key_id": "a", "secret_access_key": "s3cr3t", "region": "us-east-1"}


@pytest.mark.parametrize(
    ("url", "store"),
    [
        ("s3://bucket/run", S3Store("bucket", **KNOWN)),
        ("s3a://bucket/run", S3Store("bucket", prefix="within", **KNOWN)),
        ("gs://bucket/run", GCSStore("bucket", skip_signature=True)),
        ("s3://bucket/run", Derived("bucket", **KNOWN)),
        ("s3://bucket/run", MemoryStore()),
        ("memory://run", MemoryStore()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_store_of_obstore_is_taken_where_its_url_leads(
    workers: Workers, url: str, store: Any
) -> None:
    client = open_client(url, storage_options={"client": store}, workers=workers)
    assert type(client) is ObstoreClient


@pytest.mark.parametrize(
    ("url", "store", "found"),
    [
        ("s3://bucket/run", S3Store("other", **KNOWN), "s3://other/run"),
        ("s3://bucket/run", S3Store("other", prefix="in", **KNOWN), "s3://other/in/run"),
        ("gs://bucket/run", S3Store("bucket", **KNOWN), "s3://bucket/run"),
        ("gs://bucket/run", GCSStore("other", skip_signature=True), "gs://other/run"),
        ("s3://bucket/run", GCSStore("bucket", skip_signature=True), "gs://bucket/run"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_store_of_obstore_that_leads_elsewhere_is_refused(
    workers: Workers, url: str, store: Any, found: str
) -> None:
    with pytest.raises(UsageError, match=f"is for {found}; pass the URL of") as caught:
        open_client(url, storage_options={"client": store}, workers=workers)
    assert url in str(caught.value) and "s3cr3t" not in str(caught.value)
    assert (caught.value.expected, caught.value.found) == (url.removesuffix("/run"), found)


def test_an_option_named_client_of_a_filesystem_reaches_it(workers: Workers) -> None:
    client = open_client("memory://run", storage_options={"client": 7}, workers=workers)
    assert type(client) is MemoryClient


def test_an_unknown_scheme_is_named(workers: Workers) -> None:
    with pytest.raises(UsageError, match="fsspec knows no filesystem for nosuch://") as caught:
        open_client("nosuch://bucket/run", workers=workers)
    assert caught.value.found == "nosuch"


@pytest.mark.parametrize(
    ("url", "module", "hint"),
    [
        ("s3://bucket/run", "s3fs", r'pip install "asyncckpt\[s3\]"'),
        ("gs://bucket/run", "gcsfs", r'pip install "asyncckpt\[gcs\]"'),
        ("abfs://container/run", "adlfs", "Install adlfs"),
    ],
)
def test_a_missing_driver_is_named_with_what_installs_it(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, url: str, module: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    # What was imported before is known to fsspec without its module.
    for scheme in ("s3", "gs", "abfs"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    with pytest.raises(UsageError, match=hint) as caught:
        open_client(url, workers=workers)
    assert url.partition(":")[0] + "://" in str(caught.value)


def test_obstore_by_name_says_why_it_is_not_used(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | {"client": "obstore", "session": object()}
    with pytest.raises(UsageError, match='leave "client" out') as caught:
        open_client("s3://bucket/run", storage_options=options, workers=workers)
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(UsageError, match="obstore serves s3://"):
        open_client("gs://bucket/run", storage_options={"client": "obstore"}, workers=workers)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UsageError, match=r'pip install "asyncckpt\[fast\]"'):
        open_client("s3://bucket/run", storage_options={"client": "obstore"}, workers=workers)


# -------------------------------------------------------------------- a filesystem of the user


def test_a_filesystem_object_serves_its_own_schemes(workers: Workers) -> None:
    memory = fsspec.filesystem("memory")
    client = open_client("memory://run", storage_options={"filesystem": memory}, workers=workers)
    assert type(client) is MemoryClient
    with pytest.raises(UsageError, match="the filesystem is for memory://") as caught:
        open_client("s3://bucket/run", storage_options={"filesystem": memory}, workers=workers)
    assert caught.value.found == "s3"
    with pytest.raises(UsageError, match="takes an fsspec filesystem, not int"):
        open_client("memory://run", storage_options={"filesystem": 7}, workers=workers)
    with pytest.raises(UsageError, match="Leave them out"):
        open_client(
            "memory://run",
            storage_options={"filesystem": memory, "key": "s3cr3t"},
            workers=workers,
        )


def in_a_wrapper(sim: Simulator, scheme: str, **options: Any) -> DirFileSystem:
    own: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True}
    if scheme == "s3":
        inner = S3FileSystem(**sim.s3_options(**options), **own)
    else:
        inner = GCSFileSystem(**sim.gcs_options(**options), **own)
    return DirFileSystem("bucket", inner, asynchronous=True)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_an_asynchronous_filesystem_in_a_wrapper_stays_on_its_own_loop(
    workers: Workers, scheme: str
) -> None:
    with simulator() as sim:
        wrapper = in_a_wrapper(sim, scheme)
        client = open_client("dir://run", storage_options={"filesystem": wrapper}, workers=workers)
        await client.put("a", b"x")
        assert sim.objects() == {"run/a": b"x"}
        assert getattr(wrapper.fs, "_s3", None) is None
        assert getattr(wrapper.fs, "_session", None) is None
        await client.close()  # a session of ours that stays open fails the test


@pytest.mark.parametrize(
    ("scheme", "options"), [("s3", {"secret": "s3cr3t-value"}), ("gs", {"project": "s3cr3t-value"})]
)
async def test_no_option_of_a_filesystem_in_a_wrapper_is_shown(
    workers: Workers, scheme: str, options: dict[str, Any]
) -> None:
    with simulator() as sim:
        sim.faults.append(Fault(status=400, message="Who is s3cr3t-value?"))
        wrapper = in_a_wrapper(sim, scheme, **options)
        client = open_client("dir://run", storage_options={"filesystem": wrapper}, workers=workers)
        with pytest.raises(RequestError, match="Who is …"):
            await client.put("a", b"x")
        await client.close()


async def test_an_object_of_unknown_length_is_a_request_error(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a web server that announces no length."""
    memory = fsspec.filesystem("memory")
    client = open_client("memory://run", storage_options={"filesystem": memory}, workers=workers)
    monkeypatch.setattr(memory, "info", lambda path: {"size": None, "type": "file"})
    with pytest.raises(RequestError, match="does not say how long"):
        await client.size("a")


async def test_a_filesystem_without_conditional_creation_warns_once(
    workers: Workers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is written to: of two processes that save one step, both would report success."""
    filesystem = DirFileSystem(str(tmp_path), LocalFileSystem())
    client = open_client("dir://run", storage_options={"filesystem": filesystem}, workers=workers)
    store = store_of(client, workers)
    assert await store.names() == []
    assert caplog.text == ""
    for name in "12":
        await save(store, name, name)
    assert caplog.text.count("dir://run: DirFileSystem cannot create objects conditionally") == 1
    await store.close()


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://bucket/run", {"client": "fsspec", "max_concurrency": 0}, "max_concurrency"),
        ("s3://bucket/run", {"config_kwargs": {"nonsense": 1}}, "nonsense"),
        ("s3://bucket/run", {"config_kwargs": {"s3": {"addressing_style": "s3cr3t"}}}, "s3"),
        ("s3://bucket/run", {"client_kwargs": {"nonsense": 1}}, "nonsense"),
        ("s3://bucket/run", {"nonsense": 1}, "nonsense"),
        ("s3://bucket/run", {"config_kwargs": 7}, "config_kwargs"),
        ("gs://bucket/run", {"access": "s3cr3t"}, "access"),
    ],
)
async def test_an_odd_option_is_named(
    workers: Workers, url: str, options: dict[str, Any], named: str
) -> None:
    client = open_client(url, storage_options=options, workers=workers)
    try:
        with pytest.raises(UsageError, match="storage_options") as caught:
            await client.put("a", b"x")
        assert named in caught.value.found
        assert "s3cr3t" not in str(caught.value)
    finally:
        await client.close()


async def test_a_filesystem_with_directories(workers: Workers, tmp_path: Any) -> None:
    """They are made when they are needed, and what fsspec cannot promise is not declared."""
    inner = LocalFileSystem()
    filesystem = DirFileSystem(str(tmp_path), inner)
    client = open_client("dir://run", storage_options={"filesystem": filesystem}, workers=workers)
    assert not client.traits.conditional_create
    assert not client.traits.multipart
    await client.put("a/b/c", bytearray(b"content"))
    assert (tmp_path / "run/a/b/c").read_bytes() == b"content"
    assert bytes(await client.get("a/b/c", 2, 100)) == b"ntent"
    assert await client.size("a/b/c") == 7
    listing = await client.list("", recursive=True, limit=9)
    assert [(entry.key, entry.nbytes) for entry in listing] == [("a/b/c", 7)]
    assert listing[0].modified_s > 1e9
    listing = await client.list("a", recursive=False, limit=9)
    assert [(entry.key, entry.is_prefix) for entry in listing] == [("a/b", True)]
    with pytest.raises(RequestError, match="no conditional creation"):
        await client.put("x", b"", create=True)
    with pytest.raises(RequestError, match="no multipart uploads"):
        await client.begin_parts("x")
    assert await client.pending_parts("") is None
    await client.delete(["a/b/c", "none"])
    assert await client.list("", recursive=True, limit=9) == []
    await client.close()
