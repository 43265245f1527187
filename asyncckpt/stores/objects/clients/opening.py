"""Opening of the client of an object store from a URL and `storage_options`.

Two keys of `storage_options` are our own; all others are arguments of the fsspec filesystem:

- ``"client"``: ``"auto"`` (the default: obstore for `s3://` and `gs://` where it is installed, the
  other options are simple, and it was not used before a fork of this process; else fsspec),
  ``"fsspec"``, ``"obstore"``, or a store of obstore.
- ``"filesystem"``: an fsspec filesystem, used as it is and not closed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from asyncckpt.errors import UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.classification import hidden_values, request_error
from asyncckpt.stores.objects.clients.client import ClientTraits, ObjectClient
from asyncckpt.stores.objects.clients.fsspec_apis import (
    GcsClient,
    S3Client,
    connect,
    gcs_options,
    s3_options,
)
from asyncckpt.stores.objects.clients.fsspec_client import FsspecClient, MemoryClient
from asyncckpt.stores.objects.clients.fsspec_session import FilesystemSession, is_async
from asyncckpt.stores.objects.clients.obstore_client import (
    ObstoreClient,
    bucket_of,
    is_forked,
    made_store,
    obstore_client,
)
from asyncckpt.stores.objects.clients.obstore_options import NotSimple, store_options
from asyncckpt.stores.objects.clients.urls import (
    ALIASES,
    Url,
    check_options,
    check_scheme,
    is_url,
    parse_url,
)

EXTRAS = {"s3": "s3", "gs": "gcs"}
"""Extras of this package that install the libraries of a scheme."""

LIBRARIES = {"s3": "s3fs", "gs": "gcsfs"}

CLIENTS = ("auto", "fsspec", "obstore")


def open_client(
    location: str, *, storage_options: Mapping[str, Any] | None = None, workers: Workers
) -> ObjectClient:
    """Return the client for the URL of a root; makes no request.

    Blocks: it may import libraries for half a second, and reads small configuration files.

    Args:
        location: `scheme://bucket/prefix`.
        storage_options: see the module's docstring.
        workers: threads for filesystems that are not async, and for finding credentials.

    Raises:
        UsageError: unknown scheme, missing library, or contradictory options.
    """
    url = parse_url(location)
    check_options(storage_options)
    options = dict(storage_options or {})
    filesystem = options.pop("filesystem", None)
    chosen = _chosen(url, options)
    if filesystem is not None:
        if chosen not in ("auto", "fsspec") or options:
            raise UsageError(
                f'{url}: storage_options={{"filesystem": …}} excludes all other options: the '
                "filesystem was made with its own. Leave them out, or pass them when you make it",
                location=str(url),
            )
        return _borrowed(url, filesystem, workers)
    if not isinstance(chosen, str):
        return _given(url, chosen, options)
    options = configured(url, options)
    if chosen == "obstore" or (chosen == "auto" and url.scheme in LIBRARIES):
        client = _obstore(url, options, workers, required=chosen == "obstore")
        if client is not None:
            return client
    return _own(url, options, workers)


def configured(url: Url, options: Mapping[str, Any]) -> dict[str, Any]:
    """Add the options of fsspec's configuration (`~/.config/fsspec`, `FSSPEC_…`)."""
    from fsspec.config import conf

    found: dict[str, Any] = {}
    for scheme in (url.scheme, *(alias for alias, name in ALIASES.items() if name == url.scheme)):
        found |= conf.get(scheme) or {}
    return {**found, **options}


def _chosen(url: Url, options: dict[str, Any]) -> Any:
    """Remove our own `client` from the options, and return it.

    Any other object may be an option of the filesystem, except that s3fs and gcsfs have none of
    that name.
    """
    value = options.get("client")
    named = isinstance(value, str)
    known = value in CLIENTS if named else _is_of(type(value), ("obstore", "_obstore"))
    if value is None or known:
        options.pop("client", None)
        return "auto" if value is None else value
    if not named and url.scheme not in LIBRARIES:
        return "auto"
    raise UsageError(
        f'{url}: storage_options={{"client": …}} takes '
        f"{', '.join(repr(name) for name in CLIENTS)}, or a store of obstore, not "
        f'this {type(value).__name__}. Leave it out, or pass a filesystem as "filesystem"',
        location=str(url),
        expected=CLIENTS,
        found=type(value),
    )


def _given(url: Url, store: Any, options: Mapping[str, Any]) -> ObjectClient:
    if options:
        raise UsageError(
            f"{url}: a store of obstore has its own options; leave the other storage_options out",
            location=str(url),
        )
    found = obstore_client(store, "/".join(url.parts))
    scheme = found.url.partition("://")[0]
    elsewhere = scheme != url.scheme or bucket_of(store) not in ("", url.host)
    if elsewhere and {scheme, url.scheme} <= LIBRARIES.keys():
        raise UsageError(
            f'{url}: the store passed as "client" is for {found.url}; pass the URL of its bucket',
            location=str(url),
            expected=f"{url.scheme}://{url.host}",
            found=found.url,
        )
    return found


def _obstore(
    url: Url, options: dict[str, Any], workers: Workers, *, required: bool
) -> ObjectClient | None:
    """Return a client of obstore, or None to use fsspec."""
    if not _has("obstore"):
        if not required:
            return None
        raise UsageError(
            f"{url}: the client obstore is not installed: "
            'pip install "asyncckpt[fast]", or leave "client" out',
            location=str(url),
        )
    has_fsspec = _is_installed(url)
    try:
        # Variables of AWS and Google, which fsspec reads too.
        environ = os.environ  # noqa: TID251
        found = store_options(url, options, environ, alone=required or not has_fsspec)
    except NotSimple as reason:
        if not required:
            if has_fsspec:
                return None
            hint = f"; obstore alone might not do the same with {reason}"
            raise _not_installed(url, hint) from None
        raise UsageError(
            f"{url}: obstore serves s3:// and gs:// with simple options, and might not do what "
            f'fsspec does with {reason}; leave "client" out, or pass a store of obstore '
            'as "client"',
            location=str(url),
        ) from None
    if not required and has_fsspec and is_forked():
        return None
    return ObstoreClient(
        _opened(partial(made_store, found), url, options),
        str(url),
        prefix="/".join(url.parts),
        hidden=hidden_values(options),
        options=found,
        workers=workers,
        other=(lambda: _own(url, options, workers)) if has_fsspec else None,
    )


# ------------------------------------------------------------------------------------------ fsspec


def _own(url: Url, options: dict[str, Any], workers: Workers) -> ObjectClient:
    """Return a client with its own filesystem, which its first request makes."""
    kind = _filesystem_class(url)  # imported here, outside of any request's deadline
    library, arguments = _library(kind), options
    if library == "gcsfs":
        # The class of fsspec's registry would query the kind of every bucket over gRPC.
        from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

        kind = GCSFileSystem
    elif library is None:
        arguments = {**kind._get_kwargs_from_urls(str(url)), **options}
    return _client(url, kind, partial(_made, kind, (), arguments), options, workers)


def _borrowed(url: Url, filesystem: Any, workers: Workers) -> ObjectClient:
    """Return a client of the user's filesystem."""
    from fsspec import AbstractFileSystem

    if not isinstance(filesystem, AbstractFileSystem):
        raise UsageError(
            f'{url}: storage_options={{"filesystem": …}} takes an fsspec filesystem, '
            f"not {type(filesystem).__name__}",
            location=str(url),
            found=type(filesystem),
        )
    protocols = filesystem.protocol
    protocols = (protocols,) if isinstance(protocols, str) else tuple(protocols)
    if url.scheme not in {ALIASES.get(name, name) for name in protocols}:
        raise UsageError(
            f"{url}: the filesystem is for {', '.join(f'{name}://' for name in protocols)}",
            location=str(url),
            expected=protocols,
            found=url.scheme,
        )
    # Its arguments are as secret as storage_options.
    options = {"args": filesystem.storage_args, **filesystem.storage_options}
    kind = type(filesystem)
    if not is_async(filesystem) or not filesystem.asynchronous:
        return _client(url, kind, lambda: filesystem, options, workers, ours=False)
    return _client(url, kind, partial(_again, filesystem), options, workers)


def _again(value: Any) -> Any:
    """Return an equal filesystem with a session of its own, also inside a wrapper.

    Other values are arguments, and returned unchanged.
    """
    if not hasattr(value, "storage_options"):
        return value
    options = {name: _again(each) for name, each in value.storage_options.items()}
    return _made(type(value), list(map(_again, value.storage_args)), options)


def _made(kind: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return a new filesystem with a session of its own, which caches no listings.

    Blocks; call it in a thread: it may look for credentials.
    """
    library = _library(kind)
    if library == "s3fs":
        filesystem = kind(*args, **s3_options(options))
        asyncio.run(connect(filesystem))
        return filesystem
    if library == "gcsfs":
        return kind(*args, **gcs_options(options, hidden_values({"args": args, **options})))
    from fsspec.dircache import DirCache

    more = {"asynchronous": True} if kind.async_impl else {}
    filesystem = kind(*args, **{**options, **more, "skip_instance_cache": True})
    # Not by an argument: some filesystems pass unknown arguments on to their library.
    if isinstance(cache := getattr(filesystem, "dircache", None), DirCache):
        cache.use_listings_cache = False
    return filesystem


def _client(
    url: Url,
    kind: Any,
    make: Callable[[], Any],
    options: Mapping[str, Any],
    workers: Workers,
    *,
    ours: bool = True,
) -> ObjectClient:
    """Return the client of a filesystem of the class `kind`."""
    shown: dict[str, Any] = {"hidden": hidden_values(options), "endpoint": _endpoint(options)}
    session = FilesystemSession(partial(_opened, make, url, options), workers, ours=ours)
    if (library := _library(kind)) is not None:
        return (GcsClient if library == "gcsfs" else S3Client)(session, url, **shown)
    root = kind._strip_protocol(str(url))
    if url.scheme == "memory":
        return MemoryClient(
            session, str(url), root, traits=ClientTraits("memory", conditional_create=True), **shown
        )
    return FsspecClient(
        session, str(url), root, traits=ClientTraits(kind.__name__, get_copies=2), **shown
    )


def _opened(make: Callable[[], Any], url: Url, options: Mapping[str, Any]) -> Any:
    """Return the filesystem or store that `make` makes with these options."""
    try:
        return make()
    except Exception as error:
        failure = _not_opened(url, options, error)
    raise failure  # outside of `except`: its context must not be the library's error


def _not_opened(url: Url, options: Mapping[str, Any], error: Exception) -> Exception:
    """Return the error for options with which no filesystem or store could be opened."""
    failure = request_error(error, hidden_values(options))
    text = str(error)
    if url.scheme == "gs" and failure.kind in ("invalid", "unavailable") and "access" not in text:
        # The token is malformed, expired, of another project, or rejected by Google.
        failure.kind = "credentials"
    if failure.kind != "invalid":
        return failure
    inner = [value for value in options.values() if isinstance(value, Mapping)]
    names = sorted({str(name) for names in (options, *inner) for name in names})
    named = [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)] or names
    return UsageError(
        f"{url}: cannot be opened with the storage_options {', '.join(named)}: {failure.detail}; "
        "correct them, or leave them out",
        location=str(url),
        found=tuple(named),
    )


def _endpoint(options: Mapping[str, Any]) -> str:
    """Return the host of the endpoint in the options; empty if there is none."""
    inner = options.get("client_kwargs")
    endpoint = options.get("endpoint_url")
    if not endpoint and isinstance(inner, Mapping):
        endpoint = inner.get("endpoint_url")
    try:
        return urlsplit(str(endpoint or "")).netloc.rpartition("@")[2]
    except ValueError:
        return ""


def _is_installed(url: Url) -> bool:
    return _has(LIBRARIES.get(url.scheme, "fsspec"))


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _filesystem_class(url: Url) -> Any:
    from fsspec.registry import get_filesystem_class, known_implementations

    check_scheme(url)
    try:
        return get_filesystem_class(url.scheme)
    except ImportError as error:
        known = str(known_implementations.get(url.scheme, {}).get("err") or error)
        raise _not_installed(url, known=known) from error


def _not_installed(url: Url, more: str = "", *, known: str = "") -> UsageError:
    """Return the error that says what to install: an extra, or else `known`."""
    extra = EXTRAS.get(url.scheme)
    hint = f'pip install "asyncckpt[{extra}]"' if extra else known
    return UsageError(
        f"{url}: what {url.scheme}:// needs is not installed: {hint}{more}",
        location=str(url),
        found=url.scheme,
    )


def _library(kind: type) -> str | None:
    """Return the one of `LIBRARIES` that has this filesystem class or a base of it."""
    return next((name for name in LIBRARIES.values() if _is_of(kind, (name,))), None)


def _is_of(kind: type, libraries: Collection[str]) -> bool:
    """Return whether a class, or a base of it, is of one of these libraries."""
    return any(base.__module__.partition(".")[0] in libraries for base in kind.__mro__)


def fsspec_options(
    location: object, storage_options: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Return the options, with fsspec as the client if it is installed and the user chose none.

    Unlike obstore, the default, fsspec sends objects in parts and deletes conditionally.
    """
    if not is_url(location) or (url := parse_url(str(location))).scheme not in LIBRARIES:
        return storage_options
    check_options(storage_options)
    options = storage_options or {}
    if options.keys() & {"client", "filesystem"} or not _is_installed(url):
        return storage_options
    return {**options, "client": "fsspec"}
