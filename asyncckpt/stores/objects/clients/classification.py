"""What an error of a client library says about a request, whichever library it is.

No library is imported: errors are known by the names of their classes and by what they carry.
"""

# Rule 1: the error that knows most decides: fsspec's backends wrap what the server said into
#   OSErrors, whose cause has the status and the code.
# Rule 2: no text of an error is passed on before `one_line` has cut out what may be a credential.

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from asyncckpt.stores.objects.client import Kind, RequestError
from asyncckpt.stores.objects.kinds import CLASSES, CODES, ERRNOS, STATUSES, TLS_CLASSES

DETAIL_LENGTH = 300
"""Characters of a detail; what a server says beyond them is rarely read."""

HIDDEN_MIN_LENGTH = 4
"""Shorter option values are no credentials, and would cut common words."""


def request_error(error: BaseException, hidden: Collection[str] = ()) -> RequestError:
    """What the error of a library means, without the values in `hidden` and other credentials."""
    if isinstance(error, RequestError):
        return error
    chain = list(_chain(error))
    for link in chain:
        # google.auth says itself whether another try is worth it; gcsfs makes a 401 of it.
        if "GoogleAuthError" in _names(link) and getattr(link, "retryable", False):
            return RequestError("connection", one_line(_text(link), hidden))
    for link in chain:
        if (found := _server_said(link, hidden)) is not None:
            return found
    for link in chain:
        if (kind := _known(link)) is not None:
            return RequestError(kind, one_line(_text(link), hidden))
    kind = "unavailable" if isinstance(error, OSError) else "invalid"
    return RequestError(kind, one_line(_text(error), hidden))


def status_error(
    status: int,
    code: str | None,
    message: str,
    hidden: Collection[str] = (),
    *,
    retry_after: str | None = None,
) -> RequestError:
    """What an answer with this status and code means."""
    kind = CODES.get(code or "")
    if code == "notFound" or (kind is None and status == 404):
        kind = "no_bucket" if "bucket does not exist" in message.lower() else "missing"
    # Some codes say less than the status or the message beside them.
    if status in (401, 408, 507):
        kind = STATUSES[status]
    if code in ("forbidden", "InvalidRequest") and "billing" in message.lower():
        kind = "quota"
    if kind is None:
        if code is not None and code.isdigit() and not 100 <= status < 600:
            status = int(code)
        kind = STATUSES.get(status, "unavailable" if status >= 500 and status != 501 else "invalid")
    said = ": ".join(filter(None, (code, message))) or "no more was said"
    return RequestError(
        kind,
        one_line(f"HTTP {status}, {said}", hidden),
        status=status or None,
        retry_after_s=_delay(retry_after),
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _server_said(error: BaseException, hidden: Collection[str]) -> RequestError | None:
    """The error if it carries an answer of the server: botocore's, gcsfs's or aiohttp's."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping) and isinstance(response.get("Error"), Mapping):
        said: Mapping[str, Any] = response["Error"]
        meta: Mapping[str, Any] = response.get("ResponseMetadata") or {}
        headers: Mapping[str, str] = meta.get("HTTPHeaders") or {}
        return status_error(
            int(meta.get("HTTPStatusCode") or 0),
            str(said.get("Code") or "") or None,
            str(said.get("Message") or ""),
            hidden,
            retry_after=headers.get("retry-after"),
        )
    name = type(error).__name__
    if name == "HttpError" and hasattr(error, "code"):
        answer = getattr(error, "_error_response", None) or {}
        reasons = [e.get("reason") for e in answer.get("errors") or () if isinstance(e, Mapping)]
        return status_error(
            int(error.code or 0) if str(error.code or 0).isdigit() else 0,
            reasons[0] if reasons else None,
            str(answer.get("message") or ""),
            hidden,
        )
    status = getattr(error, "status", None)
    if name == "ClientResponseError" and isinstance(status, int):
        headers = getattr(error, "headers", None) or {}
        message = str(getattr(error, "message", ""))
        return status_error(status, None, message, hidden, retry_after=headers.get("Retry-After"))
    return None


def _names(error: BaseException) -> list[str]:
    return [cls.__name__ for cls in type(error).__mro__]


def _known(error: BaseException) -> Kind | None:
    names = _names(error)
    if not TLS_CLASSES.isdisjoint(names):
        # A handshake that is cut off may succeed later, a wrong certificate will not.
        text = str(error).lower()
        wrong = "certificate" in text or "wrong_version_number" in text or "wrong version" in text
        return "endpoint" if wrong else "connection"
    if type(error) is OSError and str(error).startswith("Forbidden: "):
        return _gcsfs_forbidden(str(error))
    for name in names:
        if (kind := CLASSES.get(name)) is not None:
            return kind
    if isinstance(error, OSError):
        return ERRNOS.get(error.errno or 0)
    return None


def _gcsfs_forbidden(text: str) -> Kind:
    # gcsfs keeps the message of a 403 and drops its reason.
    lower = text.lower()
    if "rate limit" in lower or "ratelimit" in lower:
        return "throttled"
    if "billing" in lower or "quota" in lower:
        return "quota"
    return "forbidden"


def _delay(retry_after: str | None) -> float | None:
    # The other form, a date, is not used by object stores.
    return (
        float(retry_after)
        if retry_after and retry_after.isascii() and retry_after.isdigit()
        else None
    )


def _text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ---------------------------------------------------------------------------------- what is shown

_SECRETS = re.compile(
    r"""
    (?P<query>\?[^\s'"<>?]*=[^\s'"<>]*)                  # a query string: signatures, upload ids
    | (?P<user>(?<=://)[^/\s@'"]+@)                       # user:password@
    | \b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA|GOOG)[A-Z0-9]{8,}
    | \bya29\.[\w.\-]+                                   # OAuth tokens
    | \beyJ[\w\-]+(?:\.[\w\-]+)+                         # JSON web tokens
    | (?i:\b(?:bearer|basic|aws4-hmac-sha256)\s+)[^\s'"<>;]+(?:[,\s]+\w+=[^\s,'"<>]+)*
    | (?i:\b(?:[\w\-]*(?:signature|credential|secret|password|token|authorization|api[_-]?key
        |access[_-]?key(?:[_-]?id)?|upload[_-]?id))['"]?\s*[=:]\s*)['"]?[^\s,;'"<>&]+
    | -----BEGIN[^-]*-----.*?(?:-----END[^-]*-----|$)
    | \b[A-Za-z0-9+/_\-]{40,}={0,2}                       # what else is long and random
    """,
    re.VERBOSE | re.DOTALL,
)


def one_line(text: str, hidden: Collection[str] = ()) -> str:
    """The text as one short line, without `hidden` and without what looks like a credential."""
    names: set[str] = set()
    for value in hidden:
        names.add(value)
        # An endpoint is named by its host alone as well.
        if "://" in value:
            names |= {urlsplit(value).netloc, urlsplit(value).hostname or ""}
    for value in sorted(names, key=len, reverse=True):
        if len(value) >= HIDDEN_MIN_LENGTH:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "…", text)
    text = _SECRETS.sub("…", text)
    text = " ".join(re.sub(r"[\x00-\x1f\x7f\u2028\u2029\x85]", " ", text).split())
    return text if len(text) <= DETAIL_LENGTH else text[: DETAIL_LENGTH - 1] + "…"
