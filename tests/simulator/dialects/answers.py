"""Documents of both dialects, XML and JSON, their errors, and headers that they share."""

from __future__ import annotations

import json
import time
from typing import Any
from xml.sax.saxutils import escape

from tests.simulator.requests import Request, Response
from tests.simulator.state import Part, Precondition, Refused, StoredObject

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
JSON = {"Content-Type": "application/json; charset=UTF-8"}
SLOW = "The rate of requests is too high. Please reduce your request rate."
HELD = "At least one of the pre-conditions you specified did not hold."

ERRORS: dict[str, tuple[int, str, str]] = {
    "AccessDenied": (403, "forbidden", "Access Denied."),
    "Anonymous": (401, "required", "Anonymous caller does not have storage access."),
    "AuthorizationHeaderMalformed": (400, "invalid", "The authorization header is malformed."),
    "BadDigest": (400, "invalid", "The checksum you specified did not match the content."),
    "ConditionalRequestConflict": (409, "conflict", "A conflicting operation occurred. Try again."),
    "EntityTooSmall": (400, "invalid", "A part is smaller than the minimum allowed size."),
    "ExpiredToken": (400, "invalid", "The provided token has expired."),
    "InternalError": (500, "internalError", "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "forbidden", "The access key id does not exist in our records."),
    "InvalidArgument": (400, "invalid", "Invalid Argument."),
    "InvalidCredentials": (401, "authError", "Invalid Credentials"),
    "InvalidDigest": (400, "invalid", "The Content-MD5 you specified was invalid."),
    "InvalidPart": (400, "invalid", "A part could not be found, or has another entity tag."),
    "InvalidPartOrder": (400, "invalid", "The list of parts was not in ascending order."),
    "InvalidRange": (416, "requestedRangeNotSatisfiable", "The range is not satisfiable."),
    "InvalidRequest": (400, "invalid", "Invalid Request."),
    "InvalidToken": (400, "invalid", "The provided token is malformed or otherwise invalid."),
    "KeyTooLongError": (400, "invalid", "Your key is too long."),
    "MalformedXML": (400, "invalid", "The XML you provided did not validate against our schema."),
    "MethodNotAllowed": (405, "methodNotAllowed", "The method is not allowed on this resource."),
    "MissingContentLength": (411, "required", "You must provide the Content-Length HTTP header."),
    "NoSuchBucket": (404, "notFound", "The specified bucket does not exist."),
    "NoSuchKey": (404, "notFound", "The specified key does not exist."),
    "NoSuchUpload": (404, "notFound", "The specified upload does not exist."),
    "NotImplemented": (501, "notImplemented", "The simulator does not implement this."),
    "NotModified": (304, "notModified", "Not Modified."),
    "ObjectWriteRate": (429, "rateLimitExceeded", "The object exceeded the rate limit for object "
                        "mutation operations. Please reduce your request rate."),
    "PermanentRedirect": (301, "redirect", "The bucket must be addressed at another endpoint."),
    "PreconditionFailed": (412, "conditionNotMet", HELD),
    "SignatureDoesNotMatch": (403, "forbidden", "The signature does not match. Check your key."),
    "SlowDown": (503, "rateLimitExceeded", SLOW),
    "TooManyRequests": (429, "rateLimitExceeded", SLOW),
}  # fmt: skip
"""Status, reason in GCS, and message of each code. GCS answers 429 to SlowDown."""

USUAL: dict[int, tuple[str, str]] = {
    400: ("InvalidRequest", "invalid"),
    401: ("AccessDenied", "authError"),
    403: ("AccessDenied", "forbidden"),
    404: ("NoSuchKey", "notFound"),
    409: ("ConditionalRequestConflict", "conflict"),
    412: ("PreconditionFailed", "conditionNotMet"),
    416: ("InvalidRange", "requestedRangeNotSatisfiable"),
    429: ("TooManyRequests", "rateLimitExceeded"),
    500: ("InternalError", "internalError"),
    501: ("NotImplemented", "notImplemented"),
    502: ("InternalError", "badGateway"),
    503: ("SlowDown", "backendError"),
    504: ("InternalError", "gatewayTimeout"),
}
"""Code in S3 and reason in GCS of a fault that has only a status."""


class Markup(str):
    """Text that is XML already."""

    __slots__ = ()


def xml(name: str, *content: object) -> Markup:
    """Return one element; everything but `Markup` is escaped."""
    inner = "".join(c if isinstance(c, Markup) else escape(str(c)) for c in content)
    return Markup(f"<{name}>{inner}</{name}>")


def document(root: str, *content: object) -> Response:
    """Return a document of S3 with this root element."""
    text = str(xml(root, *content)).replace(f"<{root}>", f'<{root} xmlns="{NAMESPACE}">', 1)
    whole = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return Response(200, {"Content-Type": "application/xml"}, (whole,))


def answer(value: dict[str, Any], status: int = 200) -> Response:
    """Return the value as JSON."""
    return Response(status, JSON, (json.dumps(value).encode(),))


def failed(status: int, reason: str, message: str) -> Response:
    """Return an error of the JSON API of GCS."""
    if status == 304:
        return Response(304, length=0)
    errors = [{"message": message, "domain": "global", "reason": reason}]
    return answer({"error": {"code": status, "message": message, "errors": errors}}, status)


def iso(seconds: float) -> str:
    """Format a time as both services write it into documents."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def byte_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """Return the range of bytes that a Range header means, or None for all.

    Raises:
        Refused: it begins behind the end.
    """
    if header is None or not header.startswith("bytes=") or "," in header:
        return None
    first, dash, last = header[6:].strip().partition("-")
    if not dash or not (first + last).isdecimal():
        return None
    if not first:
        start, stop = max(0, nbytes - int(last)) if int(last) else nbytes, nbytes
    else:
        start, stop = int(first), min(int(last) + 1, nbytes) if last else nbytes
        if last and int(last) < start:
            return None
    if start >= nbytes:
        raise Refused("InvalidRange", ActualObjectSize=str(nbytes), RangeRequested=header)
    return start, stop


def condition(request: Request, of: str = "", *, absence: bool = True) -> Precondition:
    """Return the condition that the headers name, ``copy-source-`` for one on a copy's source."""
    sent = request.headers
    vendor = "x-amz-" if "x-amz-copy-source" in sent else "x-goog-"
    unwanted = sent.get("if-none-match") if absence and not of else None
    if unwanted not in (None, "*"):
        raise Refused("NotImplemented", "Only * may follow If-None-Match of a write.")
    generation = sent.get(f"x-goog-{of}if-generation-match")
    return Precondition(
        absent=unwanted == "*",
        etag=sent.get(f"{vendor}{of}if-match" if of else "if-match"),
        generation=None if generation is None else int(generation),
    )


def metadata(request: Request) -> dict[str, str]:
    """Return the user's own headers, by name without prefix."""
    return {
        name.split("-meta-", 1)[1]: value
        for name, value in request.headers.items()
        if name.startswith(("x-amz-meta-", "x-goog-meta-"))
    }


def checksum_headers(item: StoredObject | Part) -> dict[str, str]:
    """Return the checksums as headers."""
    return {f"x-amz-checksum-{name}": value for name, value in item.digests.checksums.items()}
