"""What a failed request says: where, what, why, and what to do next."""

from __future__ import annotations

from typing import get_args

import pytest

from asyncckpt.errors import CheckpointNotFoundError, StoreError
from asyncckpt.stores.objects.clients.client import RETRYABLE, Kind, RequestError
from asyncckpt.stores.objects.failures import reported, store_error
from tests.simulator import Fault, Simulator
from tests.stores.objects.stores import ROOT, opened

S3 = "s3://bucket/run/7/checkpoint.json"
GS = "gs://bucket/run/7/checkpoint.json"

MESSAGES: dict[Kind, str] = {
    "exists": "an object already exists there (412, said so); choose another name, or overwrite "
    "what is there",
    "conflict": "another process kept writing the same object (412, said so); make sure that one "
    "job at a time saves there, and try again",
    "throttled": "the store asked for fewer requests until the last try (412, said so); lower "
    "concurrency=, raise target_data_file_nbytes=, or have the rate limit of the bucket raised, "
    "and try again",
    "unavailable": "the store failed until the last try (412, said so); look at the status page "
    "of the store, and try again",
    "timeout": "the store did not answer in time (412, said so); look at the network between here "
    "and the store; if the link is just slow, lower concurrency= and target_data_file_nbytes=",
    "connection": "no connection could be kept (412, said so); check the endpoint, the network "
    "and its proxies, and try again",
    "short": "the answer ended too early (412, said so); look at the network and its proxies, and "
    "try again",
    "no_bucket": "there is no such bucket (412, said so); create the bucket first, or check its "
    "name and the project or account",
    "credentials": "the store does not accept the credentials, or there are none (412, said so); "
    "give key, secret and, for temporary ones, token in storage_options=, or what the AWS tools "
    "use (environment, profile, instance role); renew them if they have expired",
    "forbidden": "these credentials may not do that (412, said so); allow s3:ListBucket and, "
    "for exports, s3:ListBucketMultipartUploads on the bucket, and s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload on its objects",
    "endpoint": "the bucket is not at this endpoint or in this region (412, said so); give the "
    "bucket's own endpoint and region in storage_options=",
    "quota": "the account or the bucket is full, or its billing is off (412, said so); remove "
    "objects, raise the quota or turn billing on",
    "invalid": "the store refused the request (412, said so); check the URL and "
    "storage_options=; this store may lack what the request needs",
}


@pytest.mark.parametrize("kind", sorted(set(get_args(Kind)) - {"missing"}))
def test_every_kind_has_its_meaning_and_its_next_step(kind: Kind) -> None:
    error = store_error("writing", S3, RequestError(kind, "said so", status=412), stage="upload")
    assert isinstance(error, StoreError)
    assert str(error) == f"{S3}: writing failed: {MESSAGES[kind]}"
    assert error.retryable == (kind in RETRYABLE)
    assert (error.location, error.stage, error.found) == (S3, "upload", kind)


def test_what_is_missing_is_a_checkpoint_that_is_not_there() -> None:
    error = store_error("reading", S3, RequestError("missing", "NoSuchKey", status=404))
    assert isinstance(error, CheckpointNotFoundError)
    assert str(error) == (
        f"{S3}: reading failed: there is no such object (NoSuchKey); check the location, and "
        "whether the checkpoint was deleted"
    )
    assert error.location == S3


@pytest.mark.parametrize(
    ("url", "step"),
    [
        (GS, "gcloud auth application-default login"),
        ("gcs://b/k", "gcloud auth application-default login"),
        ("s3a://b/k", "environment, profile, instance role"),
        ("abfs://b/k", "give them in storage_options="),
    ],
)
def test_how_to_give_credentials_depends_on_the_store(url: str, step: str) -> None:
    assert step in str(store_error("reading", url, RequestError("credentials", "expired")))


@pytest.mark.parametrize(
    ("url", "step"),
    [(GS, "roles/storage.objectUser"), ("abfs://b/k", "the rights to list, read, write")],
)
def test_which_rights_are_needed_depends_on_the_store(url: str, step: str) -> None:
    assert step in str(store_error("reading", url, RequestError("forbidden", "no")))


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
@pytest.mark.parametrize(
    ("code", "step"),
    [
        ("InvalidObjectState", "the object is archived: restore it"),
        ("RequestTimeTooSkewed", "the clock of this machine is wrong: set it"),
    ],
)
async def test_what_rights_and_keys_do_not_mend_says_what_does(
    sim: Simulator, kind: str, code: str, step: str
) -> None:
    sim.put("bucket", f"{ROOT}/7/checkpoint.json", b"{}")
    sim.faults.append(Fault(number=0, status=403, code=code))
    async with opened(kind, sim) as store:
        with pytest.raises(StoreError) as caught:
            await store.files("7").read("checkpoint.json", max_nbytes=9)
    assert f"{code}: A scripted fault." in str(caught.value)
    assert step in str(caught.value)


def test_the_cause_is_kept_and_other_errors_pass() -> None:
    with pytest.raises(StoreError, match="listing failed") as caught, reported("listing", S3):
        raise RequestError("unavailable", "by script")
    assert isinstance(caught.value.__cause__, RequestError)
    with pytest.raises(KeyError), reported("listing", S3):
        raise KeyError
