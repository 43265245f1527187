"""Credentials: signatures of S3 (version 4) and tokens of GCS.

The signature is that of "Signature Calculations for the Authorization Header" in the documentation
of S3; presigned URLs are not known.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote

from tests.simulator.requests import Request
from tests.simulator.state import Refused

AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=([^/]+)/(\d+)/([^/]*)/s3/aws4_request,"
    r"\s*SignedHeaders=([^,\s]+),\s*Signature=([0-9a-f]+)"
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of the one user of a service.

    Attributes:
        access_key: of the S3 user.
        secret_key: that goes with it.
        session_token: that must come with it, or None.
        expired_tokens: session tokens of S3 and tokens of GCS that have expired.
        token: bearer token of the GCS user.
    """

    access_key: str = "key"
    secret_key: str = field(default="secret", repr=False)
    session_token: str | None = field(default=None, repr=False)
    expired_tokens: frozenset[str] = field(default=frozenset(), repr=False)
    token: str = field(default="token", repr=False)


def scope_region(request: Request) -> str | None:
    """Return the region of the credential scope, or None if the request is not signed."""
    found = AUTHORIZATION.match(request.secrets.get("authorization", ""))
    return found.group(3) if found else None


def check_token(credentials: Credentials, request: Request) -> None:
    """Raise `Refused` unless the request carries the bearer token."""
    sent = request.secrets.get("authorization", "")
    if not sent:
        raise Refused("Anonymous")
    if sent != f"Bearer {credentials.token}":
        raise Refused("InvalidCredentials")


def check_s3(credentials: Credentials, request: Request) -> None:
    """Raise `Refused` unless the request is signed with the credentials."""
    if "authorization" not in request.secrets:
        raise Refused("AccessDenied")
    found = AUTHORIZATION.match(request.secrets["authorization"])
    if found is None:
        raise Refused("AuthorizationHeaderMalformed")
    access_key, day, region, signed, signature = found.groups()
    token = request.secrets.get("x-amz-security-token")
    if token in credentials.expired_tokens:
        raise Refused("ExpiredToken")
    if access_key != credentials.access_key:
        raise Refused("InvalidAccessKeyId", AWSAccessKeyId=access_key)
    if token != credentials.session_token:
        raise Refused("InvalidToken")
    scope = f"{day}/{region}/s3/aws4_request"
    canonical = _canonical(request, signed.split(";"))
    text = "\n".join(
        (
            "AWS4-HMAC-SHA256",
            request.headers.get("x-amz-date", ""),
            scope,
            hashlib.sha256(canonical.encode()).hexdigest(),
        )
    )
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (day, region, "s3", "aws4_request", text):
        key = hmac.digest(key, part.encode(), "sha256")
    if not hmac.compare_digest(key.hex(), signature):
        raise Refused("SignatureDoesNotMatch")


def _canonical(request: Request, signed: list[str]) -> str:
    raw, _, query = request.target.partition("?")
    pairs = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    sent = request.headers | request.secrets
    headers = "".join(f"{name}:{' '.join(sent.get(name, '').split())}\n" for name in signed)
    return "\n".join(
        (
            request.method,
            raw,
            "&".join(f"{name}={value}" for name, value in pairs),
            headers,
            ";".join(signed),
            request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        )
    )
