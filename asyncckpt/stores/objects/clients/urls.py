"""URLs of object stores: their normal form, their parts, and what may be shown of them."""

# Rule 1: keys are literal. Nothing in a URL is an escape, a query or a pattern.
# Rule 2: a URL is shown only after a check that it contains no credential.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from asyncckpt.errors import UsageError
from asyncckpt.stores.paths import below

ALIASES = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}
"""Aliases of schemes; URLs are shown with the usual name."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_LOCAL = re.compile(r"(?:file|local)://(?:localhost(?=/|$))?", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CHAINED = re.compile(r"::[A-Za-z][A-Za-z0-9+.\-]*://")
_SIGNED = re.compile(r"\?.*(?:sig=|signature|token=|x-amz-)", re.IGNORECASE)
"""A query that grants access to whoever has the URL."""

_ARN = re.compile(
    r"arn:aws[^/]*:s3(-outposts|-object-lambda)?:[^/]*(:accesspoint[:/][^/]+"
    r"|:outpost[/:][^/:]+[/:](bucket|accesspoint)[/:][^/:]+)"
)


class Url(NamedTuple):
    """A URL in its normal form.

    Attributes:
        scheme: in lower case, without aliases.
        host: between `//` and the next `/`: a bucket, a host, or empty.
        parts: the rest, without empty parts.
    """

    scheme: str
    host: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        head = () if self.scheme == "memory" else (self.host,)
        return f"{self.scheme}://{'/'.join((*head, *self.parts))}"


_BUCKETS = frozenset(("s3", "gs"))
"""Schemes whose hosts are buckets, which have neither user nor port."""

_WEB = frozenset(("http", "https"))
"""Schemes whose user part alone may be a credential, such as an access token."""


def is_url(location: object) -> bool:
    """Return whether the location is a URL of anything but a local file."""
    return (
        isinstance(location, str)
        and re.match(rf"(?:[\w+.\-]+::)*{_SCHEME.pattern}", location) is not None
        and _LOCAL.match(location) is None
    )


def without_scheme(location: str) -> str:
    """Return the path in a local file's URL; any other location unchanged.

    Raises:
        UsageError: the URL has no path, or only that of the root directory.
    """
    path = _LOCAL.sub("", location)
    if path != location and not path.strip("/"):
        raise UsageError(
            f"{location}: names no directory; pass its whole path, like file:///data/run",
            location=location,
        )
    return path


def parse_url(location: str) -> Url:
    """Return the URL in its normal form: no doubled `/`, none at the end, the usual scheme.

    Raises:
        UsageError: it is no URL, is chained, or contains credentials or parts like ``..``.
    """
    text = location_text(location)
    if _is_chained(location):
        raise UsageError(
            f"{text}: chained URLs are not supported: a cache between checkpoints and their store "
            "would hold what others have replaced; pass the last URL of the chain alone",
            location=text,
        )
    if (found := _SCHEME.match(location)) is None:
        raise UsageError(f"{text}: pass a URL with a scheme, like s3://bucket/run", location=text)
    scheme = found.group(1).lower()
    scheme = ALIASES.get(scheme, scheme)
    rest = location[found.end() :]
    if _credentials(scheme, rest):
        raise UsageError(
            f"{text}: the URL holds credentials, or what looks like them, and URLs are logged; "
            "pass them by storage_options= or the environment",
            location=text,
        )
    if scheme in _WEB and set(rest) & set("?#"):
        raise UsageError(
            f"{text}: a URL with a query or fragment names no place for objects; pass the part "
            "before it",
            location=text,
        )
    if _CONTROL.search(rest):
        raise UsageError(f"{text!r}: control characters in a URL", location=text)
    host, parts = _divided(scheme, rest)
    if scheme in _BUCKETS and not host:
        raise UsageError(f"{text}: names no bucket; pass {scheme}://bucket/run", location=text)
    for part in parts:
        if part in (".", ".."):
            raise UsageError(
                f"{text}: {part!r} is part of the key here and goes nowhere; "
                "pass the place it should lead to",
                location=text,
                found=part,
            )
    return Url(scheme, host, parts)


def split_url(location: str) -> tuple[str, str]:
    """Split the location of one checkpoint into the URL of its root and its name there.

    Raises:
        UsageError: as `parse_url`, or it names a bucket alone.
    """
    url = parse_url(location)
    if not url.parts:
        raise UsageError(
            f"{url}: names no checkpoint; add its name: {below(str(url), 'name')}",
            location=str(url),
        )
    return str(url._replace(parts=url.parts[:-1])), url.parts[-1]


def location_text(location: str) -> str:
    """Return the URL as errors and logs show it, without possible credentials."""
    scheme, separator, rest = location.partition("://")
    known = ALIASES.get(scheme.lower(), scheme.lower())
    if not separator:
        return location
    if _is_chained(location) or _credentials(known, rest):
        return f"{known}://…"
    if known in _WEB:
        rest = re.split("[?#]", rest)[0]
    return f"{known}://{rest}".rstrip("/") if rest.strip("/") else f"{known}://"


def split_bucket(path: str) -> tuple[str, str]:
    """Return bucket (or the ARN of an access point) and key of a path."""
    if found := _ARN.match(path):
        return found.group(), path[found.end() :].strip("/")
    bucket, _, key = path.partition("/")
    return bucket, key.strip("/")


def _is_chained(location: str) -> bool:
    """Return whether fsspec would take this for a chain of URLs, such as `zip://a::s3://b/c`."""
    scheme, _, rest = location.partition("://")
    # The second link of a chain may be a path. In a host, "::" is part of an address or password.
    host = rest.partition("/")[0]
    known = ALIASES.get(scheme.lower(), scheme.lower())
    path_follows = known not in _BUCKETS and "::" in host and not set(host) & {"@", "["}
    return "::" in scheme or path_follows or _CHAINED.search(location) is not None


def _credentials(scheme: str, rest: str) -> bool:
    if _SIGNED.search(rest):
        return True
    host = re.sub("%3a", ":", rest.partition("/")[0], flags=re.IGNORECASE)
    if scheme in _BUCKETS:
        return "@" in host or (":" in host and not host.startswith("arn:"))
    user, _, place = host.rpartition("@")
    # A password may contain slashes, so that the host seems to end early: then what follows a colon
    # is no port.
    _, colon, port = place.rpartition(":")
    return (
        ":" in user
        or (scheme in _WEB and bool(user))
        or bool(colon and not place.endswith("]") and port.strip("0123456789"))
    )


def _divided(scheme: str, rest: str) -> tuple[str, tuple[str, ...]]:
    if scheme == "memory":  # begins with the path
        host, path = "", rest
    elif scheme in _BUCKETS:
        host, path = split_bucket(rest)
    else:
        host, _, path = rest.partition("/")
    return host, tuple(filter(None, path.split("/")))


def check_options(storage_options: object) -> None:
    """Check that options are a mapping or None, without control characters in credentials.

    Raises:
        UsageError: they are not; shows no value.
    """
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise UsageError(
            f"storage_options={type(storage_options).__name__}(…): pass a dict of options",
            found=type(storage_options),
        )
    for name in ("key", "secret", "token"):
        value = (storage_options or {}).get(name)
        # obstore panics on them in a header. gcsfs takes a token as JSON, of several lines.
        if isinstance(value, str) and _CONTROL.search(value) and value.strip()[:1] != "{":
            raise UsageError(
                f"storage_options={{{name!r}: …}} contains a control character, such as a newline "
                "at its end; pass the value without it",
                found=name,
            )


def check_scheme(url: Url) -> None:
    """Raise `UsageError` if fsspec knows no filesystem of this scheme, without importing any."""
    from fsspec.registry import known_implementations, registry

    if url.scheme not in known_implementations and url.scheme not in registry:
        raise unknown_scheme(url)


def unknown_scheme(url: Url) -> UsageError:
    """Return the error for a scheme that fsspec does not know."""
    return UsageError(
        f"{url}: fsspec knows no filesystem for {url.scheme}://; use s3://, gs://, memory:// "
        "or another of its schemes, or the path of a directory",
        location=str(url),
        found=url.scheme,
    )
