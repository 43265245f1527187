"""Options of s3fs lead obstore to the same objects as the same user, or obstore is not chosen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.stores.objects.obstore_account import Untranslatable
from asyncckpt.stores.objects.obstore_client import obstore_from
from asyncckpt.stores.objects.obstore_options import S3Config, s3_config
from asyncckpt.testing.objectstore import Fault, Simulator, simulator

KEYS = {"key": "a-key-id", "secret": "a-secret"}
HERE = {"endpoint_url": "http://127.0.0.1:9", **KEYS}
REGION = {"client_kwargs": {"region_name": "eu-west-1"}}
THERE = {"endpoint_url": "https://storage.example"}
URL = "s3://bucket/runs/1"

PROFILES = """
[default]
aws_access_key_id = default-id
aws_secret_access_key = default-secret
[other]
aws_access_key_id = other-id
aws_secret_access_key = other-secret
aws_session_token = other-token
"""

SETTINGS = """
[default]
region = eu-west-1
[profile other]
region = eu-north-1
[profile virtual]
region = eu-west-1
s3 =
    addressing_style = virtual
[profile fips]
region = eu-west-1
use_fips_endpoint = true
[profile elsewhere]
region = eu-west-1
endpoint_url = https://storage.example
"""


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's AWS configuration is seen."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_CA_BUNDLE",
        "REQUESTS_CA_BUNDLE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def profiles(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(PROFILES)
    (tmp_path / "config").write_text(SETTINGS)


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Simulator:
    running.clear()
    return running


def keys_of(found: S3Config) -> Any:
    assert found.credentials is not None
    keys = found.credentials()
    return keys["access_key_id"], keys["secret_access_key"], keys["token"]


async def sent_to(sim: Simulator, options: dict[str, Any]) -> dict[str, str]:
    """Headers of the one request that a put makes."""
    seen: list[dict[str, str]] = []
    sim.faults[:] = [Fault(number=0, hook=lambda request: seen.append(dict(request.headers)))]
    client = obstore_from(URL, options)
    assert client is not None
    await client.put("a", b"content")
    await client.close()
    assert list(sim.objects()) == ["runs/1/a"]
    (headers,) = seen
    return headers


# --------------------------------------------------------------------------------- what translates


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (REGION, {"region": "eu-west-1", "endpoint": "https://s3.eu-west-1.amazonaws.com"}),
        ({**HERE, "config_kwargs": {"region_name": "eu-west-1"}}, {"region": "eu-west-1"}),
        ({**REGION, "use_ssl": False}, {"endpoint": "http://s3.eu-west-1.amazonaws.com"}),
        (HERE, {"region": "us-east-1", "endpoint": "http://127.0.0.1:9"}),
        ({"client_kwargs": {"endpoint_url": "http://a:9/"}}, {"endpoint": "http://a:9"}),
        ({**HERE, "requester_pays": True}, {"request_payer": True}),
        (
            {**HERE, "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
            {"server_side_encryption": "AES256"},
        ),
        (
            {
                **HERE,
                "s3_additional_kwargs": {
                    "ServerSideEncryption": "aws:kms",
                    "SSEKMSKeyId": "arn",
                    "BucketKeyEnabled": True,
                },
            },
            {
                "server_side_encryption": "aws:kms",
                "sse_kms_key_id": "arn",
                "sse_bucket_key_enabled": True,
            },
        ),
        (
            {
                **HERE,
                "use_listings_cache": False,
                "skip_instance_cache": True,
                "default_block_size": 1 << 20,
                "version_aware": False,
                "config_kwargs": {"max_pool_connections": 64, "s3": {"addressing_style": "path"}},
                "client_kwargs": {"verify": True},
            },
            {"virtual_hosted_style_request": False},
        ),
    ],
)
def test_an_option_has_its_translation(options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = s3_config(URL, {**KEYS, **options})
    assert (found.bucket, found.prefix) == ("bucket", "runs/1")
    assert expected.items() <= found.config.items()
    assert keys_of(found) == ("a-key-id", "a-secret", None)
    # They are neither among the options of the store nor shown.
    assert "a-secret" not in repr(found) + repr(found.credentials)
    assert str(found.config["endpoint"]) not in repr(found)
    assert obstore_from(URL, {**KEYS, **options}) is not None


@pytest.mark.parametrize(
    "keys",
    [
        {"key": "a", "secret": "b", "token": "c"},
        {"username": "a", "password": "b", "token": "c"},
        {
            "client_kwargs": {
                "aws_access_key_id": "a",
                "aws_secret_access_key": "b",
                "aws_session_token": "c",
            }
        },
    ],
)
def test_keys_are_those_that_were_given(keys: dict[str, Any]) -> None:
    assert keys_of(s3_config(URL, {"endpoint_url": "http://a", **keys})) == ("a", "b", "c")


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
    found = s3_config(URL, {**KEYS, **REGION, "endpoint_url": endpoint})
    assert found.config["unsigned_payload"] == unsigned


async def test_anonymous_requests_are_not_signed(sim: Simulator) -> None:
    headers = await sent_to(sim, {"anon": True, "endpoint_url": sim.s3_endpoint})
    assert "authorization" not in headers


async def test_requests_carry_keys_region_and_token(sim: Simulator) -> None:
    headers = await sent_to(sim, sim.s3_options(token="a-token", **REGION))
    assert "Credential=key/" in headers["authorization"]
    assert "/eu-west-1/s3/" in headers["authorization"]
    assert headers["x-amz-security-token"] == "a-token"
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


# ------------------------------------------------------------------------------ what does not


@pytest.mark.parametrize(
    "options",
    [
        {"key": "a"},
        {"secret": "a-secret"},
        {"token": "a-secret"},
        {"session": object()},
        {"version_aware": True},
        {"profile": "a-secret"},
        {"something_new": "a-secret"},
        {"client_kwargs": "a-secret"},
        {"endpoint_url": "http://a-secret:x@127.0.0.1:9"},
        {"client_kwargs": {"verify": False}},
        {"client_kwargs": {"verify": "a-secret"}},
        {"client_kwargs": {"something_new": "a-secret"}},
        {"config_kwargs": {"signature_version": "s3"}},
        {"config_kwargs": {"s3": {"addressing_style": "virtual"}}},
        {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
        {"config_kwargs": {"s3": {"payload_signing_enabled": True}}},
        {"config_kwargs": {"proxies": {"https": "a-secret"}}},
        {"config_kwargs": {"request_checksum_calculation": "when_supported"}},
        {"s3_additional_kwargs": {"ACL": "a-secret"}},
        {"s3_additional_kwargs": {"StorageClass": "a-secret"}},
        {"s3_additional_kwargs": {"SSECustomerKey": "a-secret"}},
        {"s3_additional_kwargs": {"SSEKMSKeyId": "a-secret"}},
    ],
)
def test_what_has_no_exact_translation_is_refused_by_name(options: dict[str, Any]) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", **options}
    with pytest.raises(Untranslatable) as caught:
        s3_config(URL, options)
    assert "a-secret" not in str(caught.value)
    assert caught.value.__context__ is None
    assert obstore_from(URL, options) is None


@pytest.mark.parametrize(
    "url",
    [
        "gs://bucket/a",
        "memory://a",
        "s3://Bucket/a",
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/mine/a",
        "s3://fast--euw1-az1--x-s3/a",
        "s3://bucket/a//b",
        "s3://bucket/a/../b",
        "s3:///a",
    ],
)
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    assert obstore_from(url, HERE) is None


def test_without_a_region_s3fs_finds_the_bucket() -> None:
    with pytest.raises(Untranslatable, match="region"):
        s3_config(URL, KEYS)


def test_without_credentials_s3fs_says_so() -> None:
    with pytest.raises(Untranslatable, match="credentials"):
        s3_config(URL, {"endpoint_url": "http://127.0.0.1:9"})


# --------------------------------------------------------------- what the machine has to say about


@pytest.mark.usefixtures("profiles")
def test_profiles_count_as_they_do_for_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = s3_config(URL, {**THERE})
    assert found.config["region"] == "eu-west-1"
    assert keys_of(found) == ("default-id", "default-secret", None)
    found = s3_config(URL, {"profile": "other", **THERE})
    assert found.config["region"] == "eu-north-1"
    assert keys_of(found) == ("other-id", "other-secret", "other-token")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert keys_of(s3_config(URL, THERE))[0] == "other-id"
    assert s3_config(URL, {**THERE, **REGION}).config["region"] == "eu-west-1"


@pytest.mark.usefixtures("profiles")
@pytest.mark.parametrize("profile", ["virtual", "fips", "unknown"])
def test_a_profile_that_obstore_cannot_follow_is_refused(profile: str) -> None:
    with pytest.raises(Untranslatable):
        s3_config(URL, {"profile": profile, **KEYS})


@pytest.mark.usefixtures("profiles")
def test_the_endpoint_of_a_profile_counts() -> None:
    found = s3_config(URL, {"profile": "elsewhere", **KEYS})
    assert found.config["endpoint"] == "https://storage.example"


def test_certificates_of_ones_own_are_left_to_s3fs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "bundle.pem"))
    with pytest.raises(Untranslatable, match="ca_bundle"):
        s3_config(URL, {**KEYS, **REGION})
    assert s3_config(URL, HERE).bucket == "bucket"  # there is no TLS


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
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "environment-token")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    headers = await sent_to(sim, sim.s3_options())
    assert "Credential=key/" in headers["authorization"]
    assert "/us-east-1/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


# ------------------------------------------------------------------------------ what is installed


def test_without_botocore_obstore_finds_what_was_not_given(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    assert s3_config(URL, {}).credentials is None
    assert s3_config(URL, {}).config.keys().isdisjoint(("region", "endpoint"))
    assert keys_of(s3_config(URL, HERE)) == ("a-key-id", "a-secret", None)
    for options in ({"profile": "a"}, {"use_ssl": False}, {"endpoint_url": "a:9"}):
        assert obstore_from(URL, options) is None


def test_without_obstore_there_is_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert obstore_from(URL, HERE) is None


def test_obstore_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, asyncckpt.stores.objects.obstore_client as c;"
        "assert not {'obstore', 'botocore'} & set(sys.modules);"
        "assert c.obstore_from('gs://bucket') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
