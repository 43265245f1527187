"""Credentials and regions are checked where the test asks for it, as the services do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import obstore
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from s3fs import S3FileSystem

from tests.simulator import Credentials, Simulator, simulator
from tests.simulator_tests.asking import ask

KEYS = ("plain", "a/b c", "ü/&+%=?#", "~.-_!*'()")
CREDENTIALS = Credentials(expired_tokens=frozenset(["old"]))


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator(credentials=CREDENTIALS) as running:
        yield running


def code_of(
    sim: Simulator, config: dict[str, Any] | None = None, **changed: Any
) -> tuple[str, int]:
    settings = {"retries": {"max_attempts": 1}} | (config or {})
    client = boto3.client("s3", **sim.boto3_options() | changed, config=Config(**settings))
    try:
        with pytest.raises(ClientError) as raised:
            client.put_object(Bucket="bucket", Key="refused", Body=b"x")
    finally:
        client.close()
    response = raised.value.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


def test_signed_requests_of_boto3_are_taken(sim: Simulator) -> None:
    client = boto3.client("s3", **sim.boto3_options())
    for key in KEYS:
        client.put_object(Bucket="bucket", Key=key, Body=key.encode())
        body = client.get_object(Bucket="bucket", Key=key, Range="bytes=0-99")["Body"].read()
        assert body == key.encode()
        assert client.list_objects_v2(Bucket="bucket", Prefix=key)["KeyCount"] == 1
    client.close()


async def test_signed_requests_of_s3fs_and_obstore_are_taken(sim: Simulator) -> None:
    fs = S3FileSystem(**sim.s3_options(), asynchronous=True, skip_instance_cache=True)
    session = await fs.set_session()
    store = sim.obstore_s3("bucket")
    for key in KEYS:
        await fs._pipe_file(f"bucket/{key}", b"s3fs")
        found = await obstore.get_range_async(store, key, start=0, end=4)
        assert bytes(found) == b"s3fs"
        await obstore.put_async(store, key, b"obstore")
        assert await fs._cat_file(f"bucket/{key}", start=0, end=7) == b"obstore"
    assert len(await obstore.list(store).collect_async()) >= len(KEYS)
    await session.close()


def test_wrong_missing_and_expired_credentials_are_refused(sim: Simulator) -> None:
    assert code_of(sim, aws_secret_access_key="other") == ("SignatureDoesNotMatch", 403)
    assert code_of(sim, aws_access_key_id="nobody") == ("InvalidAccessKeyId", 403)
    assert code_of(sim, {"signature_version": UNSIGNED}) == ("AccessDenied", 403)
    assert code_of(sim, aws_session_token="old") == ("ExpiredToken", 400)
    assert code_of(sim, aws_session_token="unknown") == ("InvalidToken", 400)
    assert "refused" not in sim.objects()


def test_tokens_of_gcs_are_checked(sim: Simulator) -> None:
    where = "/storage/v1/b/bucket"
    nobody = ask(sim.gcs_endpoint, "GET", where)
    assert (nobody.status, nobody.json["error"]["errors"][0]["reason"]) == (401, "required")
    wrong = ask(sim.gcs_endpoint, "GET", where, None, {"Authorization": "Bearer old"})
    assert (wrong.status, wrong.json["error"]["message"]) == (401, "Invalid Credentials")
    right = {"Authorization": "Bearer token"}
    assert ask(sim.gcs_endpoint, "GET", where, None, right).status == 200
    assert ask(sim.gcs_endpoint, "GET", "/bucket?list-type=2", None, right).status == 200
    assert ask(sim.gcs_endpoint, "GET", "/bucket?list-type=2").status == 401


def test_no_secret_is_kept_or_shown(sim: Simulator) -> None:
    options = sim.boto3_options() | {"aws_session_token": "old"}
    client = boto3.client("s3", **options)
    with pytest.raises(ClientError):
        client.head_object(Bucket="bucket", Key="a")
    client.close()
    headers = sim.requests[-1].headers
    assert "user-agent" in headers
    assert not {"authorization", "x-amz-security-token"} & headers.keys()
    shown = repr(CREDENTIALS)
    assert "secret" not in shown
    assert "old" not in shown


def test_requests_signed_for_another_region_are_sent_away() -> None:
    with simulator(region="eu-west-1") as sim:
        assert sim.s3_options()["client_kwargs"] == {"region_name": "eu-west-1"}
        client = boto3.client("s3", **sim.boto3_options())
        client.put_object(Bucket="bucket", Key="a", Body=b"x")
        client.close()
        config = {"s3": {"addressing_style": "path"}}
        store = sim.obstore_s3("bucket", region="us-east-1", retry_config={"max_retries": 0})
        with pytest.raises(Exception, match="expecting 'eu-west-1'"):
            obstore.put(store, "b", b"x")
        answer = sim.requests[-1]
        assert answer.status == 400
        # botocore follows the region that the answer names.
        client = boto3.client(
            "s3", **sim.boto3_options() | {"region_name": "us-east-1"}, config=Config(**config)
        )
        client.put_object(Bucket="bucket", Key="c", Body=b"x")
        client.close()
        assert list(sim.objects()) == ["a", "c"]


def test_a_bucket_of_another_region_redirects() -> None:
    with simulator() as sim:
        sim.create_bucket("far", region="ap-south-1")
        store = sim.obstore_s3("far", retry_config={"max_retries": 0})
        with pytest.raises(Exception, match=r"(?i)redirect|region"):
            obstore.put(store, "b", b"x")
        assert sim.requests[-1].status == 301
        near = sim.obstore_s3("far", region="ap-south-1")
        obstore.put(near, "b", b"x")
        assert list(sim.objects("far")) == ["b"]
