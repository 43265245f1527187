"""What an error of obstore means: its kind, and one line without secrets."""

# Rule 1: obstore tells what happened in text alone: a line for people with the server's whole
#   answer behind it, then a dump of the layers below. Status, code and message are picked out of
#   the first, words out of the second; nothing else is passed on. An answer of S3 also holds the
#   key id, the string that was signed and the session token; a URL may hold a password.
# Rule 2: what a server says about keys and signatures may repeat them, and is left out.

from __future__ import annotations

import html
import re
from collections.abc import Collection

from asyncckpt.stores.objects.answers import one_line, status_error
from asyncckpt.stores.objects.client import Kind, RequestError

_DUMP = "\n\nDebug source:"
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>|\(code: ([\w.]{1,64})\)")
_MESSAGE = re.compile(r"<Message>([^<]{1,1000})")
_REGION = re.compile(r"<Region>([\w-]{1,40})</Region>")
_VERB = re.compile(r"Error performing ([A-Z]{3,7}) ")
_SYSTEM = re.compile(r'kind: \w+,\s+message: "([^"]{1,100})"')

# Codes of Azure whose status says less.
_AZURE: dict[str, Kind] = {
    "AuthenticationFailed": "credentials",
    "ContainerNotFound": "no_bucket",
    "ContainerBeingDeleted": "no_bucket",
    "ServerBusy": "throttled",
}

# What stands in a dump, the most telling first: kind, what to say, words.
_WORDS: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    (
        "credentials",
        "no keys were given or found, and no instance role answered",
        ("169.254.169.254", "169.254.170.2", "169.254.170.23", "/latest/api/token"),
    ),
    (
        "endpoint",
        "the server names another endpoint: the bucket is in another region",
        ("BareRedirect", "redirect without LOCATION"),
    ),
    ("endpoint", "the endpoint is not encrypted, which was not allowed", ("BadScheme",)),
    (
        "endpoint",
        "TLS failed",
        ("InvalidCertificate", "certificate", "InvalidContentType", "HandshakeFailure", "TLS"),
    ),
    ("timeout", "no answer in time", ("TimedOut", "kind: Timeout")),
    (
        "short",
        "the connection ended before the answer did",
        ("IncompleteBody", "UnexpectedEof", "kind: Decode", "end of file before message length"),
    ),
    ("connection", "no connection", ("HttpError", "reqwest::Error", "hyper::Error", "kind: Body")),
    ("missing", "nothing is there", ("kind: NotADirectory",)),
    ("quota", "the device is full", ("kind: StorageFull", "kind: QuotaExceeded")),
    ("forbidden", "permission denied", ("kind: PermissionDenied",)),
)

_CLASSES: dict[str, tuple[Kind, str]] = {
    "AlreadyExistsError": ("exists", "the object exists"),
    "FileNotFoundError": ("missing", "nothing is there"),
    "NotFoundError": ("missing", "nothing is there"),
    "PermissionDeniedError": ("forbidden", "permission denied"),
    "PreconditionError": ("exists", "the object exists"),
    "UnauthenticatedError": ("credentials", "no keys were found, or they could not be renewed"),
}


def translated(
    error: BaseException, hidden: Collection[str] = (), *, of_bucket: bool = False
) -> RequestError:
    """What to raise instead of `error`, which a call of obstore raised.

    Args:
        error: the exception, of obstore or built in.
        hidden: texts that are not repeated.
        of_bucket: the request names no object, so that what is missing is the bucket.
    """
    text, _, dump = str(error).partition(_DUMP)
    found = _STATUS.search(text)
    code = _code(text)
    if found is not None or code is not None:
        # Without a status it is one key of many, in an answer of 200.
        return _answered(text, int(found[1]) if found else 200, code, hidden, of_bucket=of_bucket)
    kind, detail = _unanswered(type(error).__name__, f"{text}\n{dump}")
    return RequestError(kind, one_line(_verb(text) + detail, hidden))


def is_past_the_end(error: BaseException) -> bool:
    """Whether a range was refused because the object ends before it begins."""
    text, _, dump = str(error).partition(_DUMP)
    if (found := _STATUS.search(text)) is not None:
        return found[1] == "416"
    return "StartTooLarge" in dump


def _answered(
    text: str, status: int, code: str | None, hidden: Collection[str], *, of_bucket: bool
) -> RequestError:
    said = _MESSAGE.search(text)
    failure = status_error(status, code, html.unescape(said[1]) if said else "", hidden)
    kind = _AZURE.get(code or "", failure.kind)
    if kind == "missing" and of_bucket:
        kind = "no_bucket"
    detail = failure.detail
    if kind == "credentials":
        detail = f"HTTP {status}" + (f", {code}" if code else "")
    if kind == "endpoint" and (region := _REGION.search(text)) is not None:
        detail += f"; the bucket is in region {region[1]}"
    return RequestError(kind, one_line(_verb(text) + detail, hidden), status=status)


def _unanswered(name: str, everything: str) -> tuple[Kind, str]:
    if (known := _CLASSES.get(name)) is not None:
        return known
    for kind, detail, words in _WORDS:
        if any(word in everything for word in words):
            return kind, detail + _cause(everything) * (kind == "connection")
    return "invalid", f"obstore refused the request with {name}"


def _code(text: str) -> str | None:
    found = _CODE.search(text)
    return (found[1] or found[2]) if found is not None else None


def _verb(text: str) -> str:
    found = _VERB.search(text)
    return f"{found[1]}: " if found is not None else ""


def _cause(dump: str) -> str:
    if "dns error" in dump:
        return ": the name of the endpoint is not known"
    found = _SYSTEM.search(dump)
    return f": {found[1]}" if found is not None else ""
