"""obstore is chosen only where it leads to the same objects, as the same user, as fsspec."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf

from asyncckpt.errors import UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.fsspec_apis import GcsClient, S3Client
from asyncckpt.stores.objects.clients.obstore_client import ObstoreClient
from asyncckpt.stores.objects.clients.obstore_options import (
    NotSimple,
    StoreOptions,
    store_options,
)
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.clients.urls import parse_url
from tests.simulator import Fault, Request, Simulator, simulator
from tests.stores.objects.clients.opened import obstore_from

KEYS = {"key": "a-key-id", "secret": "a-secret"}
HERE = {"endpoint_url": "http://127.0.0.1:9", **KEYS}
REGION = {"client_kwargs": {"region_name": "eu-west-1"}}
URL = "s3://bucket/runs/1"
ACCOUNT = {"type": "service_account", "client_email": "a@b.example", "private_key": "a-secret"}


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's AWS configuration is seen."""
    for name in ("KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION", "CA_BUNDLE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2, "test-clients")
    yield workers
    workers.shutdown()


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Simulator:
    running.clear()
    running.faults.clear()
    return running


def found(
    options: dict[str, Any], url: str = URL, environ: dict[str, str] | None = None, **more: Any
) -> StoreOptions:
    files = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    return store_options(parse_url(url), options, {**files, **(environ or {})}, **more)


def keys_of(options: StoreOptions) -> Any:
    assert options.credentials is not None
    keys = options.credentials()
    return keys["access_key_id"], keys["secret_access_key"], keys["token"]


async def sent_to(sim: Simulator, options: dict[str, Any]) -> dict[str, str]:
    """Headers of the one request that a put makes."""
    seen: list[dict[str, str]] = []

    def look(request: Request) -> None:
        seen.append(request.headers | request.secrets)

    sim.faults[:] = [Fault(number=0, hook=look)]
    client = obstore_from(URL, options)
    await client.put("a", b"content")
    await client.close()
    assert list(sim.objects()) == ["runs/1/a"]
    (headers,) = seen
    return headers


# ------------------------------------------------------------------------------------------ simple


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (REGION, {"region": "eu-west-1"}),
        (HERE, {"region": "us-east-1", "endpoint": "http://127.0.0.1:9"}),
        ({"client_kwargs": {"endpoint_url": "http://a:9/"}}, {"endpoint": "http://a:9"}),
        (
            {**HERE, "use_listings_cache": False, "default_block_size": 1, "version_aware": False},
            {"virtual_hosted_style_request": False},
        ),
    ],
)
def test_an_option_has_its_translation(options: dict[str, Any], expected: dict[str, Any]) -> None:
    made = found({**KEYS, **options})
    assert made.bucket == "bucket"
    assert expected.items() <= made.config.items()
    assert keys_of(made) == ("a-key-id", "a-secret", None)
    # Keys are neither among the options of the store nor shown.
    assert "a-secret" not in repr(made) + repr(made.credentials) + repr(made.config)
    assert isinstance(obstore_from(URL, {**KEYS, **options}), ObstoreClient)


@pytest.mark.parametrize(
    "keys",
    [
        {"key": "a", "secret": "b", "token": "c"},
        {"username": "a", "password": "b", "token": "c"},
    ],
)
def test_keys_are_those_that_were_given(keys: dict[str, Any]) -> None:
    environ = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_SESSION_TOKEN": "z"}
    assert keys_of(found(keys, environ=environ)) == ("a", "b", "c")
    assert keys_of(found(KEYS, environ=environ)) == ("a-key-id", "a-secret", None)
    assert keys_of(found({}, environ=environ)) == ("x", "y", "z")


@pytest.mark.parametrize(
    ("endpoint", "unsigned"),
    [
        (None, True),
        ("https://storage.example", True),
        ("http://127.0.0.1:9", True),
        ("http://[::1]:9", True),
        ("http://localhost:9", True),
        ("http://storage.example", False),
        ("http://10.0.0.1:9", False),
    ],
)
def test_a_body_is_signed_where_nothing_else_protects_it(
    endpoint: str | None, unsigned: bool
) -> None:
    made = found({**KEYS, **REGION, "endpoint_url": endpoint})
    assert made.config["unsigned_payload"] == unsigned


async def test_anonymous_requests_are_not_signed(sim: Simulator) -> None:
    headers = await sent_to(sim, {"anon": True, "endpoint_url": sim.s3_endpoint})
    assert "authorization" not in headers


async def test_requests_carry_keys_region_and_token(sim: Simulator) -> None:
    headers = await sent_to(sim, sim.s3_options(token="a-token", **REGION))
    assert "Credential=key/" in headers["authorization"]
    assert "/eu-west-1/s3/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "a-token"
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


async def test_the_environment_counts(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "environment-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "environment-token")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", sim.s3_endpoint)
    headers = await sent_to(sim, {})
    assert "Credential=environment-id/" in headers["authorization"]
    assert "/eu-west-1/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "environment-token"


async def test_the_environment_adds_nothing_to_what_was_given(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "environment-token")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    headers = await sent_to(sim, sim.s3_options())
    assert "Credential=key/" in headers["authorization"]
    assert "/us-east-1/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


# --------------------------------------------------------------------------------------- not simple


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"key": "a"}, "key without secret"),
        ({"secret": "a-secret"}, "key without secret"),
        ({"key": 7, "secret": "a-secret"}, "key"),
        ({**KEYS, "token": 7}, "token"),
        ({}, "credentials"),
        ({**KEYS, "session": object()}, "session"),
        ({**KEYS, "version_aware": True}, "version_aware"),
        ({**KEYS, "use_ssl": True}, "use_ssl"),
        ({**KEYS, "requester_pays": True}, "requester_pays"),
        ({**KEYS, "profile": "a-secret"}, "profile"),
        ({**KEYS, "something_new": "a-secret"}, "something_new"),
        ({**KEYS, "client_kwargs": "a-secret"}, "client_kwargs"),
        ({**KEYS, "client_kwargs": {"verify": False}}, "verify"),
        ({**KEYS, "client_kwargs": {"region_name": "cn-north-1"}}, "region"),
        ({**KEYS, "client_kwargs": {"region_name": ["a-secret"]}}, "region"),
        ({**KEYS, "endpoint_url": "http://a-secret:x@127.0.0.1:9"}, "endpoint_url"),
        ({**KEYS, "endpoint_url": "storage.example"}, "endpoint_url"),
        ({**KEYS, "endpoint_url": 7}, "endpoint_url"),
        ({**KEYS, "config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "config_kwargs"),
        ({**KEYS, "s3_additional_kwargs": {"StorageClass": "a-secret"}}, "s3_additional_kwargs"),
    ],
)
def test_what_has_no_exact_translation_is_refused_by_name(
    options: dict[str, Any], name: str, workers: Workers
) -> None:
    with pytest.raises(NotSimple, match=name) as caught:
        found(options)
    assert "a-secret" not in str(caught.value)
    if "session" not in options:
        client = open_client(URL, storage_options=options, workers=workers)
        assert isinstance(client, S3Client)


@pytest.mark.parametrize(
    "url",
    [
        "memory://a",
        "s3://Bucket/a",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/a",
        "s3://fast--euw1-az1--x-s3/a",
    ],
)
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(NotSimple):
        found(KEYS, url)


@pytest.mark.parametrize(
    "environ",
    [
        {"AWS_PROFILE": "other"},
        {"AWS_USE_FIPS_ENDPOINT": "true"},
        {"AWS_SOMETHING_NEW": "1"},
        {"AWS_CA_BUNDLE": "/tmp/x"},
    ],
)
def test_a_variable_that_is_not_known_here_leaves_it_to_fsspec(environ: dict[str, str]) -> None:
    with pytest.raises(NotSimple, match=next(iter(environ))):
        found(KEYS, environ=environ)
    if "AWS_CA_BUNDLE" in environ:  # without TLS it means nothing
        assert found(HERE, environ=environ)


def test_profiles_count_as_they_do_for_s3fs(tmp_path: Path) -> None:
    """The default one gives the region, and anything else in it leaves everything to s3fs."""
    config = tmp_path / "config"
    environ = {"AWS_CONFIG_FILE": str(config)}
    config.write_text("[default]\nregion = eu-west-1\noutput = json\n[profile b]\nx = 1\n")
    assert found(KEYS, environ=environ).config["region"] == "eu-west-1"
    assert (
        found({**KEYS, "client_kwargs": {"region_name": "eu-north-1"}}, environ=environ).config[
            "region"
        ]
        == "eu-north-1"
    )
    for line in ("endpoint_url = https://storage.example", "s3 =\n  addressing_style = virtual"):
        config.write_text(f"[default]\nregion = eu-west-1\n{line}\n")
        with pytest.raises(NotSimple, match="of the default profile"):
            found(KEYS, environ=environ)
    for name in ("profile default", 'profile "default"'):
        config.write_text(f"[{name}]\nendpoint_url = https://storage.example\n")
        with pytest.raises(NotSimple, match="of the default profile"):
            found(KEYS, environ=environ)
    config.write_text("no section")
    with pytest.raises(NotSimple, match="configuration files"):
        found(KEYS, environ=environ)


# --------------------------------------------------------------------- configuration of fsspec


async def test_the_configuration_of_fsspec_leads_to_the_same_store(
    sim: Simulator, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`~/.config/fsspec` and `FSSPEC_S3_…` are options for obstore as they are for s3fs."""
    monkeypatch.setitem(conf, "s3", {"endpoint_url": sim.s3_endpoint, **KEYS, **REGION})
    for options, kind in (({}, ObstoreClient), ({"client": "fsspec"}, S3Client)):
        client = open_client("s3://bucket/run", storage_options=options, workers=workers)
        assert type(client) is kind
        await client.put("a", b"x")
        await client.close()
        assert sim.objects("bucket") == {"run/a": b"x"}
        sim.clear()
    # Options go before it, and what is not simple there is not simple.
    monkeypatch.setitem(conf, "s3", {"endpoint_url": "http://127.0.0.1:9", "anon": True})
    made = open_client("s3://bucket/run", storage_options=sim.s3_options(), workers=workers)
    await made.put("a", b"x")
    await made.close()
    monkeypatch.setitem(conf, "s3", {**KEYS, "profile": "other"})
    assert isinstance(open_client("s3://bucket/run", workers=workers), S3Client)


# ---------------------------------------------------------------------------------------------- GCS


def test_gcs_with_a_service_account_is_simple(tmp_path: Path, workers: Workers) -> None:
    path = tmp_path / "account.json"
    path.write_text(json.dumps(ACCOUNT))
    for options, environ in (
        ({"token": ACCOUNT}, {}),
        ({"token": str(path), "project": "p", "consistency": "none"}, {}),
        ({}, {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}),
        ({"token": "google_default"}, {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}),
    ):
        made = found(dict(options), "gs://bucket/run", environ)
        assert json.loads(made.config["service_account_key"]) == ACCOUNT
        assert "a-secret" not in repr(made)
    assert found({"token": "anon"}, "gs://bucket/run").config == {"skip_signature": True}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "token"),
        ({"token": "cloud"}, "token"),
        ({"token": {"type": "authorized_user"}}, "token"),
        ({"token": {**ACCOUNT, "universe_domain": "example.com"}}, "universe"),
        ({"token": "anon", "endpoint_url": "http://127.0.0.1:9"}, "endpoint_url"),
        ({"token": "anon", "access": "read_only"}, "access"),
        ({"token": "anon", "requester_pays": "p"}, "requester_pays"),
    ],
)
def test_gcs_with_anything_else_is_left_to_gcsfs(
    options: dict[str, Any], name: str, workers: Workers
) -> None:
    with pytest.raises(NotSimple, match=name):
        found(dict(options), "gs://bucket/run")
    client = open_client("gs://bucket/run", storage_options=options, workers=workers)
    assert isinstance(client, GcsClient)
    # The last two are variables of obstore, which gcsfs does not know.
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SKIP_SIGNATURE"):
        with pytest.raises(NotSimple, match=name):
            found({"token": "anon"}, "gs://bucket/run", {name: "http://a"})


@pytest.mark.parametrize("place", ["variable", "home"])
def test_anonymous_gcs_beside_credentials_that_obstore_refuses_is_left_to_gcsfs(
    place: str, workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / ".config/gcloud/application_default_credentials.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"type": "external_account"}')
    if place == "variable":
        moved = path.rename(tmp_path / "account.json")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(moved))
    client = open_client("gs://bucket/run", storage_options={"token": "anon"}, workers=workers)
    assert isinstance(client, GcsClient)


# ------------------------------------------------------------------------------ what is installed


def test_without_s3fs_obstore_finds_what_was_not_given(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(open_client(URL, workers=workers), ObstoreClient)
    with pytest.raises(UsageError, match=r"not installed: .*asyncckpt\[s3\].*profile"):
        open_client(URL, storage_options={"profile": "a"}, workers=workers)


def test_without_obstore_there_is_no_client(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert isinstance(open_client(URL, storage_options=HERE, workers=workers), S3Client)


def test_obstore_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, asyncckpt.stores.objects.clients.opening;"
        "assert not {'obstore', 'botocore', 'fsspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
