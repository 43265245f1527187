"""Public errors for failed requests: the action, the location, and what to do next."""

# Rule: errors show only `RequestError.detail`, from which the client has removed credentials.

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from asyncckpt.errors import AsyncCheckpointError, CheckpointNotFoundError, StoreError
from asyncckpt.stores.objects.clients.client import Kind, RequestError
from asyncckpt.stores.objects.clients.urls import ALIASES

_MEANINGS: dict[Kind, str] = {
    "exists": "an object already exists there",
    "conflict": "another process kept writing the same object",
    "throttled": "the store asked for fewer requests until the last try",
    "unavailable": "the store failed until the last try",
    "timeout": "the store did not answer in time",
    "connection": "no connection could be kept",
    "short": "the answer ended too early",
    "no_bucket": "there is no such bucket",
    "credentials": "the store does not accept the credentials, or there are none",
    "forbidden": "these credentials may not do that",
    "endpoint": "the bucket is not at this endpoint or in this region",
    "quota": "the account or the bucket is full, or its billing is off",
    "invalid": "the store refused the request",
}

_NEXT_STEPS: dict[Kind, str] = {
    "exists": "choose another name, or overwrite what is there",
    "conflict": "make sure that one job at a time saves there, and try again",
    "throttled": "lower concurrency=, raise target_data_file_nbytes=, or have the rate limit of "
    "the bucket raised, and try again",
    "unavailable": "look at the status page of the store, and try again",
    "timeout": "look at the network between here and the store; if the link is just slow, lower "
    "concurrency= and target_data_file_nbytes=",
    "connection": "check the endpoint, the network and its proxies, and try again",
    "short": "look at the network and its proxies, and try again",
    "no_bucket": "create the bucket first, or check its name and the project or account",
    "endpoint": "give the bucket's own endpoint and region in storage_options=",
    "quota": "remove objects, raise the quota or turn billing on",
    "invalid": "check the URL and storage_options=; this store may lack what the request needs",
}

_CREDENTIALS = {
    "s3": "give key, secret and, for temporary ones, token in storage_options=, or what the AWS "
    "tools use (environment, profile, instance role); renew them if they have expired",
    "gs": "give token in storage_options=, or run `gcloud auth application-default login`, or use "
    "the machine's service account; renew it if it has expired",
}

_RIGHTS = {
    "s3": "allow s3:ListBucket and, for exports, s3:ListBucketMultipartUploads on the bucket, and "
    "s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload on its objects",
    "gs": "give the account the role Storage Object User (roles/storage.objectUser) on the bucket",
}


def store_error(
    action: str, location: str, error: RequestError, *, stage: str | None = None
) -> AsyncCheckpointError:
    """Return the public error for a failed request: where, what, why, what next.

    A `CheckpointNotFoundError` if the object is missing, else a `StoreError`. `action` says what
    was being done, like ``"writing"``.
    """
    kind = error.kind
    if kind == "missing":
        return CheckpointNotFoundError(
            f"{location}: {action} failed: there is no such object ({error.detail}); check the "
            "location, and whether the checkpoint was deleted",
            location=location,
            stage=stage,
            expected="an object",
        )
    status = "" if error.status is None else f"{error.status}, "
    return StoreError(
        f"{location}: {action} failed: {_MEANINGS[kind]} ({status}{error.detail}); "
        f"{error.hint or _next_step(kind, location)}",
        retryable=error.retryable,
        location=location,
        stage=stage,
        found=kind,
    )


@contextlib.contextmanager
def reported(action: str, location: str, *, stage: str | None = None) -> Iterator[None]:
    """Convert a `RequestError` of the block to the public error with action and location."""
    try:
        yield
    except RequestError as error:
        raise store_error(action, location, error, stage=stage) from error


def _next_step(kind: Kind, location: str) -> str:
    scheme = location.partition("://")[0]
    scheme = ALIASES.get(scheme, scheme)
    if kind == "credentials":
        return _CREDENTIALS.get(scheme, "give them in storage_options=; renew them if they expired")
    if kind == "forbidden":
        return _RIGHTS.get(scheme, "have the rights to list, read, write and delete objects there")
    return _NEXT_STEPS[kind]
