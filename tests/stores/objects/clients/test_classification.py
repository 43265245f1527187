"""What the errors of client libraries mean, and that none of them shows a credential."""

from __future__ import annotations

import errno
import json
import socket
import ssl
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import aiohttp
import botocore.exceptions as boto
import google.auth.exceptions as google
import pytest
import requests
from gcsfs.retry import HttpError, validate_response
from s3fs.errors import translate_boto_error

from asyncckpt.stores.objects.clients.classification import (
    DETAIL_LENGTH,
    NO_ANSWER,
    one_line,
    request_error,
    status_error,
)
from asyncckpt.stores.objects.clients.client import RETRYABLE, RequestError


def s3(status: int, code: str, message: str = "Said by the server.", **headers: str) -> Exception:
    """What s3fs raises for this answer of S3."""
    error = boto.ClientError(
        {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        },
        "PutObject",
    )
    translated: Exception = translate_boto_error(error)
    return translated


def gcs(status: int, reason: str, message: str = "Said by the server.") -> Exception:
    """What gcsfs raises for this answer of GCS."""
    body = {"error": {"code": status, "message": message, "errors": [{"reason": reason}]}}
    try:
        validate_response(status, json.dumps(body).encode(), "b/bucket/o/key")
    except Exception as error:
        return error
    raise AssertionError("an error was expected")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


KEY = Mock(host="host.example", port=443, is_ssl=True, ssl=True)
OS = OSError(errno.ECONNREFUSED, "refused")

S3_ANSWERS = [
    (s3(404, "NoSuchKey"), "missing"),
    (s3(404, "404"), "missing"),
    (s3(404, "NoSuchUpload"), "missing"),
    (s3(404, "NoSuchBucket"), "no_bucket"),
    (s3(412, "PreconditionFailed"), "exists"),
    (s3(412, "412"), "exists"),
    (s3(409, "ConditionalRequestConflict"), "conflict"),
    (s3(409, "OperationAborted"), "conflict"),
    (s3(503, "SlowDown"), "throttled"),
    (s3(429, "TooManyRequests"), "throttled"),
    (s3(429, "429"), "throttled"),
    (s3(503, "ServiceUnavailable"), "unavailable"),
    (s3(503, "503"), "unavailable"),
    (s3(500, "InternalError"), "unavailable"),
    (s3(200, "InternalError"), "unavailable"),
    (s3(502, "502"), "unavailable"),
    (s3(400, "RequestTimeout"), "timeout"),
    (s3(400, "IncompleteBody"), "short"),
    (s3(400, "BadDigest"), "connection"),
    (s3(400, "XAmzContentSHA256Mismatch"), "connection"),
    (s3(400, "ExpiredToken"), "credentials"),
    (s3(400, "InvalidToken"), "credentials"),
    (s3(403, "InvalidAccessKeyId"), "credentials"),
    (s3(403, "SignatureDoesNotMatch"), "credentials"),
    (s3(403, "RequestTimeTooSkewed"), "invalid"),
    (s3(403, "InvalidObjectState"), "invalid"),
    (s3(401, "AccessDenied"), "credentials"),
    (s3(403, "AccessDenied"), "forbidden"),
    (s3(403, "403"), "forbidden"),
    (s3(301, "PermanentRedirect"), "endpoint"),
    (s3(301, "301"), "endpoint"),
    (s3(307, "TemporaryRedirect"), "endpoint"),
    (s3(400, "AuthorizationHeaderMalformed", "the region 'a' is wrong"), "endpoint"),
    (s3(403, "AccountProblem"), "quota"),
    (s3(403, "QuotaExceeded"), "quota"),
    (s3(507, "XMinioStorageFull"), "quota"),
    (s3(400, "EntityTooLarge"), "invalid"),
    (s3(405, "MethodNotAllowed"), "invalid"),
    (s3(416, "InvalidRange"), "invalid"),
    (s3(501, "NotImplemented"), "invalid"),
]

BOTO = [
    (boto.NoCredentialsError(), "credentials"),
    (boto.PartialCredentialsError(provider="env", cred_var="x"), "credentials"),
    (boto.CredentialRetrievalError(provider="p", error_msg="m"), "credentials"),
    (boto.TokenRetrievalError(provider="p", error_msg="m"), "credentials"),
    (boto.UnauthorizedSSOTokenError(), "credentials"),
    (boto.ProfileNotFound(profile="p"), "credentials"),
    (boto.EndpointConnectionError(endpoint_url="https://x"), "connection"),
    (boto.ConnectionClosedError(endpoint_url="https://x"), "connection"),
    (boto.HTTPClientError(error="e"), "connection"),
    (boto.ReadTimeoutError(endpoint_url="https://x"), "timeout"),
    (boto.ConnectTimeoutError(endpoint_url="https://x"), "timeout"),
    (boto.SSLError(endpoint_url="https://x", error="certificate verify failed"), "endpoint"),
    (boto.SSLError(endpoint_url="https://x", error="EOF in violation of protocol"), "connection"),
    (boto.NoRegionError(), "endpoint"),
    (boto.InvalidRegionError(region_name="?"), "endpoint"),
    (boto.ResponseStreamingError(error="e"), "short"),
    (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), "short"),
    (boto.ParamValidationError(report="r"), "invalid"),
]

GCS_ANSWERS = [
    (gcs(404, "notFound"), "missing"),
    (gcs(412, "conditionNotMet"), "exists"),
    (gcs(429, "rateLimitExceeded"), "throttled"),
    (gcs(403, "rateLimitExceeded", "User Rate Limit Exceeded"), "throttled"),
    (gcs(403, "quotaExceeded", "Quota exceeded for the project"), "quota"),
    (gcs(403, "accountDisabled", "The billing account is disabled"), "quota"),
    (gcs(403, "forbidden", "does not have storage.objects.create access"), "forbidden"),
    (gcs(401, "authError", "Invalid Credentials"), "credentials"),
    (gcs(500, "backendError"), "unavailable"),
    (gcs(502, "badGateway"), "unavailable"),
    (gcs(503, "backendError"), "unavailable"),
    (gcs(409, "conflict"), "conflict"),
    (gcs(410, "gone"), "missing"),
    (HttpError({"code": "429", "message": "slow"}), "throttled"),
    (google.DefaultCredentialsError("none"), "credentials"),
    (google.RefreshError("invalid_grant"), "credentials"),
    (google.RefreshError("later", retryable=True), "connection"),
    (google.TransportError("network"), "connection"),
    (caused(HttpError({"code": 401, "message": "x"}), google.RefreshError("x")), "credentials"),
    (
        caused(HttpError({"code": 401, "message": "x"}), google.RefreshError("x", retryable=True)),
        "connection",
    ),
    (requests.exceptions.ProxyError(), "unavailable"),
    (requests.exceptions.ReadTimeout(), "timeout"),
    (requests.exceptions.ConnectionError(), "connection"),
]


def answered(kind: type[Exception], status: int, code: object = None) -> Exception:
    """What a library raises that keeps the response, as those of Azure and requests do."""
    error = kind("Said by the server.")
    error.response = Mock(status_code=status, headers={"Retry-After": "7"})  # type: ignore[attr-defined]
    error.error_code = code  # type: ignore[attr-defined]
    return error


ANSWERED = [
    (answered(Exception, 503, "ServerBusy"), "throttled"),
    (answered(Exception, 404, Mock(value="ContainerNotFound")), "no_bucket"),
    (answered(Exception, 404), "missing"),
    (answered(Exception, 500), "unavailable"),
    (answered(requests.exceptions.HTTPError, 403), "forbidden"),
    (answered(requests.exceptions.HTTPError, 401), "credentials"),
    (caused(RuntimeError("Failed to remove"), answered(Exception, 429)), "throttled"),
    (type("ServiceResponseError", (Exception,), {})("reset"), "connection"),
    (type("ClientAuthenticationError", (Exception,), {})("none"), "credentials"),
]

OTHERS = [
    (aiohttp.ServerDisconnectedError(), "connection"),
    (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), "connection"),
    (aiohttp.ClientConnectorError(KEY, OS), "connection"),
    (aiohttp.ClientConnectorCertificateError(KEY, ssl.CertificateError("certificate")), "endpoint"),
    (aiohttp.ClientConnectorSSLError(KEY, OSError(1, "unexpected eof")), "connection"),
    (aiohttp.ClientPayloadError("half"), "short"),
    (aiohttp.ServerTimeoutError("slow"), "timeout"),
    (aiohttp.InvalidURL("nowhere"), "endpoint"),
    (aiohttp.ClientResponseError(Mock(), (), status=404, message="Not Found"), "missing"),
    (aiohttp.ClientResponseError(Mock(), (), status=429, message="Slow"), "throttled"),
    (TimeoutError(), "timeout"),
    (TimeoutError(), "timeout"),
    (socket.gaierror(-2, "Name or service not known"), "connection"),
    (ConnectionResetError(errno.ECONNRESET, "reset"), "connection"),
    (ssl.SSLCertVerificationError("certificate verify failed"), "endpoint"),
    (ssl.SSLEOFError("unexpected eof"), "connection"),
    (FileNotFoundError("key"), "missing"),
    (IsADirectoryError("key"), "missing"),
    (FileExistsError("key"), "exists"),
    (PermissionError("key"), "forbidden"),
    (OSError(errno.ENOSPC, "full"), "quota"),
    (OSError(errno.EBUSY, "busy"), "throttled"),
    (OSError(errno.EINVAL, "what"), "invalid"),
    (OSError(errno.EIO, "io"), "unavailable"),
    (OSError("unknown"), "unavailable"),
    (NotImplementedError(), "invalid"),
    (ValueError("what"), "invalid"),
    (caused(OSError(22, "x"), s3(412, "PreconditionFailed")), "exists"),
    (RequestError("quota", "full"), "quota"),
]


@pytest.mark.parametrize(
    ("error", "kind"),
    [*S3_ANSWERS, *BOTO, *GCS_ANSWERS, *ANSWERED, *OTHERS],
    ids=lambda value: value if isinstance(value, str) else f"{type(value).__name__}-{value!s:.30}",
)
def test_an_error_is_told_by_what_a_caller_can_do_about_it(error: Exception, kind: str) -> None:
    found = request_error(error)
    assert found.kind == kind, found
    assert found.retryable == (kind in RETRYABLE)
    assert "\n" not in found.detail
    assert found.detail


def test_what_a_body_refuses_is_told_as_it_is() -> None:
    """aiohttp and botocore wrap it, the latter as a server that cannot be reached."""
    refused = ConnectionError(NO_ANSWER)
    with pytest.raises(boto.EndpointConnectionError) as caught:
        try:
            raise aiohttp.ClientConnectionError("failed to send") from refused
        except aiohttp.ClientError as error:
            raise boto.EndpointConnectionError(endpoint_url="http://x", error=error) from error
    assert str(request_error(caught.value)) == f"connection: {NO_ANSWER}"


def test_status_and_delay_of_the_server_are_kept() -> None:
    found = request_error(s3(503, "SlowDown", **{"retry-after": "7"}))
    assert (found.status, found.retry_after_s) == (503, 7.0)
    assert found.detail == "HTTP 503, SlowDown: Said by the server."
    found = request_error(s3(503, "SlowDown", **{"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}))
    assert found.retry_after_s is None


def test_a_missing_bucket_of_gcs_is_no_missing_object() -> None:
    said = "The specified bucket does not exist."
    assert status_error(404, "notFound", said).kind == "no_bucket"
    assert status_error(404, "notFound", "No such object: bucket/key").kind == "missing"


SECRETS = {
    "AKIAIOSFODNN7EXAMPLE": "The AWS Access Key Id AKIAIOSFODNN7EXAMPLE does not exist",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY": (
        "secret wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY is wrong"
    ),
    "FwoGZXIvYXdzEJr": "X-Amz-Security-Token: FwoGZXIvYXdzEJr is expired",
    "ya29.a0AfH6SMBx": "Authorization: Bearer ya29.a0AfH6SMBx was rejected",
    "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJh.c2ln": "token eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJh.c2ln bad",
    "f00dfeed": "https://host/bucket/key?X-Amz-Signature=f00dfeed&X-Amz-Expires=10 failed",
    "ADPycdsv": "https://host/upload/storage/v1/b/x/o?uploadType=resumable&upload_id=ADPycdsv",
    "deadbeef": (
        "AWS4-HMAC-SHA256 Credential=AKIA1/20261121/us-east-1/s3/aws4_request, "
        "SignedHeaders=host, Signature=deadbeef"
    ),
    "hunter2": "http://user:hunter2@proxy.example:3128 refused",
    "letmein": "password=letmein; retry",
    "s3cr3t": '{"client_secret": "s3cr3t", "type": "authorized_user"}',
    "MIIEvQIBADANBg": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n-----END PRIVATE KEY-----",
    "GOOG1EXAMPLEHMACKEY": "access id GOOG1EXAMPLEHMACKEY is unknown",
    "c2Vzc2lvbg==": "Basic c2Vzc2lvbg== is not enough",
}


@pytest.mark.parametrize("secret", SECRETS)
def test_no_credential_is_in_a_detail(secret: str) -> None:
    text = SECRETS[secret]
    assert secret not in one_line(text)
    assert secret not in request_error(s3(403, "AccessDenied", text)).detail
    assert secret not in request_error(gcs(403, "forbidden", text)).detail
    assert secret not in request_error(OSError(5, text)).detail
    assert secret not in str(request_error(ValueError(text)))


def test_no_option_value_is_in_a_detail() -> None:
    hidden = {"http://minio.internal:9000", "my-profile", "ab", "us-east-1"}
    text = one_line(
        "Could not connect to http://minio.internal:9000/bucket (host minio.internal:9000, "
        "('minio.internal', 9000)) with my-profile in us-east-1; about us-east-12",
        hidden,
    )
    assert "minio" not in text
    assert "my-profile" not in text
    assert "us-east-1 " not in text + " "
    assert "/bucket" in text
    assert "about us-east-12" in text  # another word, and what is too short to hide


def test_what_a_server_says_is_kept_otherwise() -> None:
    said = "The bucket 'my-bucket' is in region eu-west-1; use https://s3.eu-west-1.amazonaws.com/x"
    assert one_line(said) == said
    assert one_line("a\r\nb\x00\x1b[31m  c") == "a b [31m c"
    assert len(one_line("word " * 1000)) == DETAIL_LENGTH


def test_the_package_and_its_stores_import_no_backend() -> None:
    code = (
        "import sys, asyncckpt, asyncckpt.stores.objects.clients.opening\n"
        "found = {'fsspec', 's3fs', 'gcsfs', 'aiohttp', 'botocore', 'aiobotocore', 'google.auth', "
        "'obstore', 'requests'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_cause_that_is_its_own_is_no_trap() -> None:
    error: Any = OSError("a")
    other = ValueError("b")
    error.__cause__, other.__cause__ = other, error
    assert request_error(error).kind == "unavailable"
