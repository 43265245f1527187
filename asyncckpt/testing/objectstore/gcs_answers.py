"""What the JSON API of GCS answers: resources, and errors with their reasons."""

from __future__ import annotations

import json
from typing import Any

from asyncckpt.testing.objectstore.digests import base64_of
from asyncckpt.testing.objectstore.requests import Response
from asyncckpt.testing.objectstore.s3_documents import iso
from asyncckpt.testing.objectstore.state import Bucket, StoredObject

ERRORS: dict[str, tuple[int, str, str]] = {
    "AccessDenied": (403, "forbidden", "Access denied."),
    "Anonymous": (
        401,
        "required",
        "Anonymous caller does not have storage access to the Google Cloud Storage object.",
    ),
    "BucketAlreadyOwnedByYou": (409, "conflict", "Your previous request succeeded."),
    "BucketNotEmpty": (409, "conflict", "The bucket you tried to delete is not empty."),
    "BadDigest": (400, "invalid", "The checksum you specified did not match the content."),
    "InvalidCredentials": (401, "authError", "Invalid Credentials"),
    "InvalidArgument": (400, "invalid", "Invalid argument."),
    "InvalidRange": (416, "requestedRangeNotSatisfiable", "Request range not satisfiable"),
    "MethodNotAllowed": (405, "methodNotAllowed", "Method not allowed."),
    "NoSuchBucket": (404, "notFound", "The specified bucket does not exist."),
    "NoSuchKey": (404, "notFound", "No such object"),
    "NoSuchUpload": (404, "notFound", "No such upload"),
    "NotModified": (304, "notModified", "Not Modified"),
    "ObjectWriteRate": (
        429,
        "rateLimitExceeded",
        "The object exceeded the rate limit for object mutation operations (create, update, "
        "and delete). Please reduce your request rate.",
    ),
    "PreconditionFailed": (
        412,
        "conditionNotMet",
        "At least one of the pre-conditions you specified did not hold.",
    ),
    "SlowDown": (
        429,
        "rateLimitExceeded",
        "The rate of requests to the bucket is too high. Please reduce your request rate.",
    ),
}
"""Status, reason and message of each code."""

REASONS: dict[int, str] = {
    400: "invalid",
    401: "authError",
    403: "forbidden",
    404: "notFound",
    409: "conflict",
    412: "conditionNotMet",
    416: "requestedRangeNotSatisfiable",
    429: "rateLimitExceeded",
    500: "internalError",
    502: "badGateway",
    503: "backendError",
    504: "gatewayTimeout",
}
"""The reason that a fault with a status has unless it names one."""

JSON = {"Content-Type": "application/json; charset=UTF-8"}


def answer(value: dict[str, Any]) -> Response:
    """The value as JSON."""
    return Response(200, JSON, (json.dumps(value).encode(),))


def failed(status: int, reason: str, message: str) -> Response:
    """An error as JSON."""
    if status == 304:
        return Response(304, length=0)
    error = {
        "code": status,
        "message": message,
        "errors": [{"message": message, "domain": "global", "reason": reason}],
    }
    return Response(status, JSON, (json.dumps({"error": error}).encode(),))


def resource_of(bucket: str, item: StoredObject) -> dict[str, Any]:
    """As the documentation of objects says; times are that of the write."""
    digests = item.digests
    when = iso(item.modified_s)
    found: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{bucket}/{item.key}/{item.generation}",
        "name": item.key,
        "bucket": bucket,
        "generation": str(item.generation),
        "metageneration": "1",
        "contentType": item.content_type,
        "storageClass": "STANDARD",
        "size": str(item.nbytes),
        "etag": digests.etag,
        "timeCreated": when,
        "updated": when,
    }
    if digests.crc32c is not None:
        found["crc32c"] = base64_of(digests.crc32c.to_bytes(4, "big"))
    if digests.md5 is not None:
        found["md5Hash"] = base64_of(digests.md5)
    if item.metadata:
        found["metadata"] = item.metadata
    return found


def bucket_resource(bucket: Bucket) -> dict[str, Any]:
    """As the documentation of buckets says."""
    name, created_s = bucket.name, bucket.created_s
    return {
        "kind": "storage#bucket",
        "id": name,
        "name": name,
        "location": "US",
        "locationType": "multi-region",
        "storageClass": "STANDARD",
        "metageneration": "1",
        "timeCreated": iso(created_s),
        "updated": iso(created_s),
    }
