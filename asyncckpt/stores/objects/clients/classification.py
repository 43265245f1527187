"""Classification of client-library errors by one table, and removal of credentials from their text.

No library is imported: errors are recognized by their class names and attributes.
"""

# Rule 1: the most specific error decides. fsspec's backends wrap the server's response in an
#   OSError whose cause has status and code; obstore gives only text: one line for people, then the
#   whole response, then a dump of the layers below.
# Rule 2: no text of an error is shown before `one_line` has removed possible credentials. Messages
#   about keys and signatures may repeat them, so those in obstore's text are omitted.

from __future__ import annotations

import errno
import html
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from asyncckpt.stores.objects.clients.client import Kind, RequestError

# HTTP statuses, codes, class names and errnos. Codes of S3 and compatible stores:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; of GCS, the `reason` in
# https://cloud.google.com/storage/docs/json_api/v1/status-codes. Of an error's classes, the most
# derived one in the table decides.
_TABLE: dict[Kind, str] = {
    "missing": """
        404 410 NoSuchKey NoSuchUpload NoSuchVersion notFound FileNotFoundError NotFoundError
        IsADirectoryError NotADirectoryError""",
    "exists": """
        412 PreconditionFailed conditionNotMet FileExistsError AlreadyExistsError
        PreconditionError""",
    "conflict": "409 ConditionalRequestConflict OperationAborted",
    "throttled": """
        429 509 SlowDown SlowDownRead SlowDownWrite BandwidthLimitExceeded KMS.ThrottlingException
        LimitExceededException ProvisionedThroughputExceededException RequestLimitExceeded
        RequestThrottled RequestThrottledException ServerBusy Throttling ThrottlingException
        TooManyRequests TooManyRequestsException rateLimitExceeded userRateLimitExceeded EBUSY""",
    "unavailable": """
        500 502 503 504 InternalError ServiceUnavailable backendError internalError
        ProxyError JSONDecodeError""",
    "timeout": """
        408 RequestTimeout RequestTimeoutException ReadTimeoutError ConnectTimeoutError
        ServerTimeoutError Timeout TimeoutError ETIMEDOUT""",
    # A wrong digest: the body was damaged in transit and can be sent again.
    "connection": """
        BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch EndpointConnectionError
        ConnectionClosedError HTTPClientError ProxyConnectionError ClientConnectionError
        ServerDisconnectedError ConnectionError ConnectionReset gaierror TransportError
        ServiceRequestError ServiceResponseError
        ECONNREFUSED ECONNRESET ECONNABORTED EPIPE EHOSTUNREACH ENETUNREACH ENETDOWN""",
    "short": """
        IncompleteBody ResponseStreamingError IncompleteReadError IncompleteRead ClientPayloadError
        ContentDecodingError ChunkedEncodingError FlexibleChecksumError ChecksumError""",
    "no_bucket": "NoSuchBucket ContainerNotFound ContainerBeingDeleted",
    "credentials": """
        401 AuthFailure AuthenticationFailed CredentialsNotSupported ExpiredToken
        ExpiredTokenException InvalidAccessKeyId InvalidClientTokenId InvalidSecurity InvalidToken
        MissingSecurityHeader RequestExpired SignatureDoesNotMatch
        TokenRefreshRequired UnrecognizedClientException authError invalid_grant
        NoCredentialsError PartialCredentialsError CredentialRetrievalError NoAuthTokenError
        TokenRetrievalError UnknownTokenProviderError ProfileNotFound SSOError LoginError
        RefreshWithMFAUnsupportedError UnknownCredentialError DefaultCredentialsError RefreshError
        GoogleAuthError UnauthenticatedError ClientAuthenticationError""",
    "forbidden": """
        403 AccessDenied AllAccessDisabled InvalidPayer forbidden KMS.AccessDenied PermissionError
        PermissionDeniedError EACCES""",
    "endpoint": """
        AuthorizationHeaderMalformed IllegalLocationConstraintException
        PermanentRedirect Redirect TemporaryRedirect InvalidLocationConstraint InvalidRegionName
        BaseEndpointResolverError EndpointProviderError InvalidRegionError
        InvalidEndpointConfigurationError UnknownRegionError InvalidURL InvalidUrlClientError
        NonHttpUrlClientError ResponseParserError""",
    "quota": """
        507 AccountProblem NotSignedUp QuotaExceeded StorageQuotaExceeded
        XMinioAdminBucketQuotaExceeded XMinioStorageFull accountDisabled billingNotEnabled
        dailyLimitExceeded quotaExceeded storageQuotaExceeded ENOSPC EDQUOT""",
    "invalid": """
        InvalidObjectState RequestTimeTooSkewed
        ParamValidationError UnseekableStreamError NotImplementedError EINVAL EPERM ENOSYS EROFS""",
}

KINDS: dict[str, Kind] = {name: kind for kind, names in _TABLE.items() for name in names.split()}

_HINTS = {
    "InvalidObjectState": "the object is archived: restore it to a storage class that can be read "
    "at once (`aws s3api restore-object`), and try again",
    "RequestTimeTooSkewed": "the clock of this machine is wrong: set it, and try again",
    "checksum": "if the bucket has Object Lock, install s3fs, and pass storage_options="
    "{'config_kwargs': {'request_checksum_calculation': 'when_supported'}} without 'client'",
}

_LACKS_CHECKSUM = re.compile(r"(?i)(required|missing).*Content-MD5|Content-MD5.*required")
_TLS_CLASSES = frozenset(("SSLError", "ClientSSLError", "ClientConnectorCertificateError"))

FOREIGN = "this is not a store's answer; check endpoint_url and proxies"

# Kind, detail and words in obstore's dumps, the most specific first.
_DUMPED: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    (
        "credentials",
        "no keys were given or found, and no instance role answered",
        ("169.254.169.254", "169.254.170.2", "169.254.170.23", "/latest/api/token"),
    ),
    (
        "endpoint",
        "the server redirects to another endpoint: the bucket is in another region",
        ("BareRedirect", "redirect without LOCATION"),
    ),
    # See `foreign_answer`.
    ("connection", FOREIGN, ("MissingEtag",)),
    ("endpoint", FOREIGN, ("NotPartial", "MissingContentLength", "MissingLastModified")),
    ("endpoint", "the endpoint is not encrypted, which was not allowed", ("BadScheme",)),
    (
        "endpoint",
        "TLS failed",
        ("InvalidCertificate", "certificate", "InvalidContentType", "HandshakeFailure", "TLS"),
    ),
    ("timeout", "no response in time", ("TimedOut", "kind: Timeout")),
    (
        "short",
        "the connection ended before the response did",
        ("IncompleteBody", "UnexpectedEof", "kind: Decode", "end of file before message length"),
    ),
    ("endpoint", FOREIGN, ("InvalidListResponse",)),
    ("connection", "no connection", ("HttpError", "reqwest::Error", "hyper::Error", "kind: Body")),
    ("missing", "no such object", ("kind: NotADirectory",)),
    ("quota", "the device is full", ("kind: StorageFull", "kind: QuotaExceeded")),
    ("forbidden", "permission denied", ("kind: PermissionDenied",)),
)

NO_ANSWER = "the server closed the connection without an answer"
"""Error of a body that is to be sent again. botocore reports a server that cannot be reached."""

DETAIL_LENGTH = 300
"""Maximum length of a detail, in characters."""

HIDDEN_MIN_LENGTH = 4
"""Shorter option values are no credentials, and hiding them would cut common words."""


def request_error(error: BaseException, hidden: Collection[str] = ()) -> RequestError:
    """Classify a library's error; its detail shows neither texts in `hidden` nor credentials."""
    if isinstance(error, RequestError):
        return error
    chain = list(_chain(error))
    for link in chain:
        if str(link) == NO_ANSWER:
            return RequestError("connection", NO_ANSWER)
        # google.auth knows whether to retry; gcsfs turns the error into a 401.
        if "GoogleAuthError" in _names(link) and getattr(link, "retryable", False):
            return RequestError("connection", one_line(_text(link), hidden))
        if str(link).startswith("Cannot follow redirect"):
            # aiohttp cannot send a body again; botocore reports that as a closed connection.
            return RequestError("endpoint", "the server redirects the upload")
    for link in chain:
        if (found := _response(link, hidden)) is not None:
            return found
    for link in chain:
        if (kind := _kind(link)) is not None:
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
    """Classify a response with this status and code."""
    if code is not None and code.isdigit() and not 100 <= status < 600:
        status = int(code)
    kind = KINDS.get(code or "")
    # Some codes are less specific than the status or message.
    if 300 <= status < 400:
        kind = "endpoint"
    if status in (401, 408, 507):
        kind = KINDS[str(status)]
    if code in ("forbidden", "InvalidRequest") and "billing" in message.lower():
        kind = "quota"
    if kind is None:
        other: Kind = "unavailable" if status >= 500 and status != 501 else "invalid"
        kind = KINDS.get(str(status), other)
    if kind == "missing" and "bucket does not exist" in message.lower():
        kind = "no_bucket"
    said = ": ".join(filter(None, (code, message))) or "without a message"
    failure = RequestError(
        kind,
        one_line(f"HTTP {status}, {said}", hidden),
        status=status or None,
        # Object stores do not use the other form of the header, a date.
        retry_after_s=float(retry_after) if retry_after and retry_after.isdecimal() else None,
    )
    if kind == "invalid" and _LACKS_CHECKSUM.search(message):
        code = "checksum"
    failure.hint = _HINTS.get(code or "")
    return failure


def foreign_answer(kind: Kind, status: int, headers: Mapping[str, str]) -> RequestError:
    """Return the error for a success that is not an object store's answer, like a login page.

    Its `kind` is `endpoint`, or `connection` for a write: as after a lost answer, the store may or
    may not have received the request.
    """
    content_type = headers.get("Content-Type") or headers.get("content-type") or "no content type"
    detail = one_line(f"HTTP {status}, {content_type}: {FOREIGN}")
    return RequestError(kind, detail, status=status)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _response(error: BaseException, hidden: Collection[str]) -> RequestError | None:
    """Classify the response in an error of botocore, gcsfs, aiohttp, or most other libraries.

    Return None if there is none.
    """
    name, response = type(error).__name__, getattr(error, "response", None)
    message, code = getattr(error, "message", ""), None
    if isinstance(response, Mapping) and isinstance(said := response.get("Error"), Mapping):
        meta: Mapping[str, Any] = response.get("ResponseMetadata") or {}
        status, headers = meta.get("HTTPStatusCode") or 0, meta.get("HTTPHeaders") or {}
        code, message = str(said.get("Code") or "") or None, said.get("Message") or ""
    elif isinstance(status := getattr(response, "status_code", None), int):
        headers = getattr(response, "headers", {})  # Azure, requests, httpx
        code = getattr(error, "error_code", None)  # of Azure, an enumeration or text
        code, message = getattr(code, "value", code), message or error
    elif name in ("HttpError", "ClientResponseError"):
        status = getattr(error, "code" if name == "HttpError" else "status", None)
        headers = getattr(error, "headers", None) or {}
    if not str(status).isdigit():
        return None
    retry_after = headers.get("Retry-After") or headers.get("retry-after")  # as botocore has it
    return status_error(int(str(status)), code, str(message), hidden, retry_after=retry_after)


def _names(error: BaseException) -> list[str]:
    return [cls.__name__ for cls in type(error).__mro__]


def _kind(error: BaseException) -> Kind | None:
    names, text = _names(error), str(error).lower()
    if not _TLS_CLASSES.isdisjoint(names):
        # An interrupted handshake may succeed later, unlike a wrong certificate.
        wrong = "certificate" in text or "wrong_version_number" in text or "wrong version" in text
        return "endpoint" if wrong else "connection"
    if type(error) is OSError and text.startswith("forbidden: "):
        # gcsfs keeps the message of a 403 and drops its reason.
        if "rate limit" in text or "ratelimit" in text:
            return "throttled"
        return "quota" if "billing" in text or "quota" in text else "forbidden"
    for name in names:
        if (kind := KINDS.get(name)) is not None:
            return kind
    if isinstance(error, OSError):
        return KINDS.get(errno.errorcode.get(error.errno or 0, ""))
    return None


def _text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# ----------------------------------------------------------------------------------------- obstore

_DUMP = "\n\nDebug source:"
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>|\(code: ([\w.]{1,64})\)")
_MESSAGE = re.compile(r"<Message>([^<]{1,1000})")
_REGION = re.compile(r"<Region>([\w-]{1,40})</Region>")
_VERB = re.compile(r"Error performing ([A-Z]{3,7}) ")
_ODD_KEY = re.compile(r'Error parsing Path "([^"]{1,200})"')
_SYSTEM = re.compile(r'kind: \w+,\s+message: "([^"]{1,100})"')


def obstore_error(error: BaseException, hidden: Collection[str] = ()) -> RequestError:
    """Classify an error of obstore by its text, with status 416 past the object's end."""
    text, _, dump = str(error).partition(_DUMP)
    status, code = _STATUS.search(text), _CODE.search(text)
    verb = f"{found[1]}: " if (found := _VERB.search(text)) is not None else ""
    if status is None and code is None:
        kind, detail = _dumped(type(error).__name__, f"{text}\n{dump}")
        past_the_end = 416 if "StartTooLarge" in dump else None
        return RequestError(kind, one_line(verb + detail, hidden), status=past_the_end)
    said, name = _MESSAGE.search(text), (code[1] or code[2]) if code is not None else None
    # An error without a status concerns one of many keys, in a response with status 200.
    failure = status_error(
        int(status[1]) if status else 200, name, html.unescape(said[1]) if said else "", hidden
    )
    if failure.kind == "credentials":
        failure.detail = f"HTTP {failure.status}" + (f", {name}" if name else "")
    if failure.kind == "endpoint" and (region := _REGION.search(text)) is not None:
        failure.detail += f"; the bucket is in region {region[1]}"
    failure.detail = one_line(verb + failure.detail, hidden)
    return failure


def _dumped(name: str, dump: str) -> tuple[Kind, str]:
    if (kind := KINDS.get(name)) is not None:
        return kind, name
    for kind, detail, words in _DUMPED:
        if any(word in dump for word in words):
            if kind == "connection" and "dns error" in dump:
                detail += ": the name of the endpoint is unknown"
            elif kind == "connection" and (found := _SYSTEM.search(dump)) is not None:
                detail += f": {found[1]}"
            return kind, detail
    if (found := _ODD_KEY.search(dump)) is not None:
        return "invalid", f"{name}: obstore refuses the key {found[1]}, which has an odd part"
    return "invalid", f"obstore rejected the request with {name}"


# ----------------------------------------------------------------------------------- what is shown

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
    | \b[A-Za-z0-9+/_\-]{40,}={0,2}                       # anything else long and random
    """,
    re.VERBOSE | re.DOTALL,
)


def one_line(text: str, hidden: Collection[str] = ()) -> str:
    """Return the text as one short line, without `hidden` texts and possible credentials."""
    names: set[str] = set(hidden)
    for value in hidden:
        # Errors may name only the host of an endpoint.
        if "://" in value:
            names |= {urlsplit(value).netloc, urlsplit(value).hostname or ""}
    for value in sorted(names, key=len, reverse=True):
        if len(value) >= HIDDEN_MIN_LENGTH:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "…", text)
    text = _SECRETS.sub("…", text)
    text = " ".join(re.sub(r"[\x00-\x1f\x7f\u2028\u2029\x85]", " ", text).split())
    return text if len(text) <= DETAIL_LENGTH else text[: DETAIL_LENGTH - 1] + "…"


def hidden_values(options: Mapping[str, Any]) -> frozenset[str]:
    """Return every text in the options at any depth, none of which may be shown."""
    found: set[str] = set()
    pending: list[Any] = list(options.values())
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, bytes):
            found.add(value.decode("utf-8", "replace"))
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple | set):
            pending += value
        elif hasattr(value, "storage_options"):  # a filesystem, in the options of its wrapper
            pending += (value.storage_args, value.storage_options)
    return frozenset(found)
