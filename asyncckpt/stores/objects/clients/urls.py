"""URLs of object stores: normal form, parts, and removal of credentials."""

# Rule 1: keys are literal. Nothing in a URL is an escape, a query or a pattern.
# Rule 2: a URL is shown only after a check that it contains no credentials.

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
"""A query that grants access to anyone with the URL."""

_ARN = re.compile(
    r"arn:aws[^/]*:s3(-outposts|-object-lambda)?:[^/]*(:accesspoint[:/][^/]+"
    r"|:outpost[/:][^/:]+[/:](bucket|accesspoint)[/:][^/:]+)"
)


class Url(NamedTuple):
    """A URL in its normal form.

    Attributes:
        scheme: in lower case, without aliases.
        host: text between `//` and the next `/`: a bucket, a host, or empty.
        parts: path parts, without empty ones.
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
"""Schemes whose user part alone may be a credential, like an access token."""


def is_url(location: object) -> bool:
    """Return whether the location is a URL, but not of a local file."""
    return (
        isinstance(location, str)
        and re.match(rf"(?:[\w+.\-]+::)*{_SCHEME.pattern}", location) is not None
        and _LOCAL.match(location) is None
    )


def without_scheme(location: str) -> str:
    """Return the path in a local file's URL; return other locations unchanged.

    Raises:
        UsageError: the URL's path is empty or the root directory.
    """
    path = _LOCAL.sub("", location)
    if path != location and not path.strip("/"):
        raise UsageError(
            f"{location}: names no directory; pass its whole path, like file:///data/run",
            location=location,
        )
    return path


def parse_url(location: str) -> Url:
    """Return the URL in its normal form: no doubled or final `/`, the usual scheme.

    Raises:
        UsageError: the location is no URL, is chained, or contains credentials or parts like
            ``..``.
    """
    text = location_text(location)
    if _is_chained(location):
        raise UsageError(
            f"{text}: chained URLs are not supported: a cache in front of the store would return "
            "replaced checkpoints; pass only the last URL of the chain",
            location=text,
        )
    if (found := _SCHEME.match(location)) is None:
        raise UsageError(f"{text}: pass a URL with a scheme, like s3://bucket/run", location=text)
    scheme = found.group(1).lower()
    scheme = ALIASES.get(scheme, scheme)
    rest = location[found.end() :]
    if _credentials(scheme, rest):
        raise UsageError(
            f"{text}: the URL seems to hold credentials, and URLs are logged; pass them by "
            "storage_options= or the environment",
            location=text,
        )
    # s3fs reads and deletes another key than the one that was written.
    if (scheme in _WEB and set(rest) & set("?#")) or (scheme == "s3" and "?versionId=" in rest):
        raise UsageError(
            f"{text}: a URL with a query or fragment is no prefix of objects; pass the part "
            "before it",
            location=text,
        )
    if _CONTROL.search(rest):
        raise UsageError(f"{text!r}: control characters in a URL", location=text)
    if scheme == "memory":  # has no host
        host, path = "", rest
    elif scheme in _BUCKETS:
        host, path = split_bucket(rest)
    else:
        host, _, path = rest.partition("/")
    parts = tuple(filter(None, path.split("/")))
    if scheme in _BUCKETS and not host:
        raise UsageError(f"{text}: names no bucket; pass {scheme}://bucket/run", location=text)
    for part in parts:
        if part in (".", ".."):
            raise UsageError(
                f"{text}: {part!r} does not navigate in a key; pass the URL that it should lead to",
                location=text,
                found=part,
            )
    return Url(scheme, host, parts)


def split_url(location: str) -> tuple[str, str]:
    """Split the location of one checkpoint into the URL of its root and its name there.

    Raises:
        UsageError: as `parse_url`, or the URL names only a bucket.
    """
    url = parse_url(location)
    if not url.parts:
        raise UsageError(
            f"{url}: names no checkpoint; add its name: {below(str(url), 'name')}",
            location=str(url),
        )
    return str(url._replace(parts=url.parts[:-1])), url.parts[-1]


def location_text(location: str) -> str:
    """Return the URL for errors and logs, without possible credentials."""
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
    """Split a path into bucket (or the ARN of an access point) and key."""
    if found := _ARN.match(path):
        return found.group(), path[found.end() :].strip("/")
    bucket, _, key = path.partition("/")
    return bucket, key.strip("/")


def _is_chained(location: str) -> bool:
    """Return whether fsspec would treat this as a chain of URLs, such as `zip://a::s3://b/c`."""
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
    # A password may contain slashes, so the host seems to end early: then the text after a colon is
    # no port.
    _, colon, port = place.rpartition(":")
    return (
        ":" in user
        or (scheme in _WEB and bool(user))
        or bool(colon and not place.endswith("]") and port.strip("0123456789"))
    )


def check_options(storage_options: object) -> None:
    """Check that options are a mapping or None, without control characters in credentials.

    Raises:
        UsageError: the options are not; it shows no value.
    """
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise UsageError(
            f"storage_options={type(storage_options).__name__}(…): pass a dict of options",
            found=type(storage_options),
        )
    for name in ("key", "secret", "token", "username", "password"):
        value = (storage_options or {}).get(name)
        check_credential(name, value, f"storage_options={{{name!r}: …}}")


def check_credential(name: str, value: object, place: str) -> None:
    """Raise `UsageError`, which does not show it, if a credential contains a control character."""
    # obstore panics on them in a header. For gcsfs, a token may be JSON of several lines.
    if isinstance(value, str) and _CONTROL.search(value) and value.strip()[:1] != "{":
        raise UsageError(
            f"{place} contains a control character, such as a newline at its end; pass the value "
            "without it",
            found=name,
        )


def check_scheme(url: Url) -> None:
    """Raise `UsageError` if fsspec knows no filesystem of this scheme, without importing any."""
    from fsspec.registry import known_implementations, registry

    if url.scheme not in known_implementations and url.scheme not in registry:
        raise UsageError(
            f"{url}: fsspec knows no filesystem for {url.scheme}://; use s3://, gs://, memory:// "
            "or another of its schemes, or the path of a directory",
            location=str(url),
            found=url.scheme,
        )
