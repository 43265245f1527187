"""From a URL and `storage_options` to the client of an object store.

Two keys of `storage_options` are ours, all others are arguments of the fsspec filesystem:

- ``"client"``: ``"auto"`` (the default: obstore for `s3://` where it is installed and does exactly
  what the other options say, else fsspec), ``"fsspec"``, ``"obstore"``, or an object: a store of
  obstore, or an `ObjectClient` of one's own.
- ``"filesystem"``: an fsspec filesystem, which is used as it is and not closed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects import fsspec_gcs, fsspec_s3
from asyncckpt.stores.objects.client import ObjectClient
from asyncckpt.stores.objects.fsspec_client import FsspecClient, MemoryClient
from asyncckpt.stores.objects.fsspec_gcs import GcsClient
from asyncckpt.stores.objects.fsspec_s3 import S3Client
from asyncckpt.stores.objects.fsspec_session import FilesystemSession, is_async, made_again
from asyncckpt.stores.objects.urls import (
    ALIASES,
    Url,
    is_url,
    location_text,
    parse_url,
    split_url,
)

__all__ = ["is_url", "location_text", "open_client", "parse_url", "split_url"]

EXTRAS = {"s3": "s3", "gs": "gcs"}
"""The extra of this package that installs what a scheme needs."""

CLIENTS = ("auto", "fsspec", "obstore")


def open_client(
    location: str, *, storage_options: Mapping[str, Any] | None = None, workers: Workers
) -> ObjectClient:
    """The client of the URL of a root; no request is made before its first call.

    May take a second: it imports the libraries, and obstore reads the configuration of the
    account.

    Args:
        location: `scheme://bucket/prefix`.
        storage_options: see the module.
        workers: threads for filesystems that are not async, and for finding credentials.

    Raises:
        UsageError: no such scheme, its library is not installed, or options that contradict each
            other.
    """
    url = parse_url(location)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise UsageError(
            f"{url}: storage_options={type(storage_options).__name__}(…): pass a dict of options",
            location=str(url),
            found=type(storage_options),
        )
    options = dict(storage_options or {})
    filesystem = options.pop("filesystem", None)
    chosen: Any = "auto"
    if "client" in options and (filesystem is not None or _is_choice(options["client"])):
        chosen = options.pop("client")
    elif "client" in options and not _is_of_filesystem(url, options["client"]):
        given = options.pop("client")
        if given is not None:
            raise UsageError(
                f'{url}: storage_options={{"client": …}} takes '
                f"{', '.join(repr(name) for name in CLIENTS)}, a store of obstore or an "
                f"ObjectClient; the {type(given).__name__} that was given is none of them. "
                'Leave it out, or pass a filesystem as "filesystem"',
                location=str(url),
                expected=CLIENTS,
                found=type(given),
            )
    if filesystem is not None:
        if chosen not in ("auto", "fsspec") or options:
            raise UsageError(
                f'{url}: storage_options={{"filesystem": …}} leaves nothing else to choose: '
                "the filesystem has its options; leave the others out",
                location=str(url),
            )
        return _borrowed(url, filesystem, workers)
    if not isinstance(chosen, str):
        return _given(url, chosen, options)
    if chosen == "obstore" or (chosen == "auto" and url.scheme == "s3"):
        client = _obstore(url, options, required=chosen == "obstore")
        if client is not None:
            return client
    return _own(url, options, workers)


def _is_choice(value: object) -> bool:
    """Whether it is for us, or an option of a filesystem that happens to have this name."""
    return value in CLIENTS if isinstance(value, str) else _is_client(value) or _is_obstore(value)


def _is_of_filesystem(url: Url, value: object) -> bool:
    """Whether a value that is no choice may be meant for the filesystem.

    s3fs and gcsfs have no such option; others have one if they name it, or take an object.
    """
    if url.scheme in ("s3", "gs"):
        return False
    return (
        not isinstance(value, str)
        or "client" in inspect.signature(_filesystem_class(url).__init__).parameters
    )


def _is_client(value: object) -> bool:
    return all(hasattr(value, name) for name in ("put", "get", "list", "begin_parts", "traits"))


def _is_obstore(value: object) -> bool:
    # A class derived from one of its stores is one, too.
    modules = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    return not modules.isdisjoint(("obstore", "_obstore"))


def _given(url: Url, client: Any, options: Mapping[str, Any]) -> ObjectClient:
    if options:
        raise UsageError(
            f"{url}: a client object has its options; leave the other storage_options out",
            location=str(url),
        )
    if _is_client(client):
        given: ObjectClient = client
        return given
    from asyncckpt.stores.objects.obstore_client import bucket_of, obstore_client

    found = obstore_client(client, "/".join(url.parts))
    scheme, bucket = found.url.partition("://")[0], bucket_of(client)
    elsewhere = scheme != url.scheme or bucket not in ("", url.host)
    if elsewhere and {scheme, url.scheme} <= {"s3", "gs"}:
        raise UsageError(
            f'{url}: the store that was given as "client" leads to {found.url}; pass the URL of '
            "its bucket",
            location=str(url),
            expected=f"{url.scheme}://{url.host}",
            found=found.url,
        )
    return found


def _obstore(url: Url, options: dict[str, Any], *, required: bool) -> ObjectClient | None:
    from asyncckpt.stores.objects.obstore_client import obstore_from

    client = obstore_from(str(url), options)
    if client is None and required:
        try:
            import obstore  # noqa: F401
        except ImportError:
            raise UsageError(
                f"{url}: the client obstore is not installed: "
                'pip install "asyncckpt[fast]", or leave "client" out',
                location=str(url),
            ) from None
        raise UsageError(
            f"{url}: obstore serves s3:// and has a translation for most options of s3fs, "
            'not for these; leave "client" out, or pass a store of obstore as "client"',
            location=str(url),
        )
    return client


# ------------------------------------------------------------------------------------------ fsspec


def _own(url: Url, options: dict[str, Any], workers: Workers) -> ObjectClient:
    """A client with a filesystem of its own, which is made at its first request."""
    root = "/".join((url.host, *url.parts))
    cls = _filesystem_class(url)
    if url.scheme == "s3":
        return S3Client(
            _s3(lambda: fsspec_s3.s3_filesystem(options), workers), str(url), root, options=options
        )
    if url.scheme == "gs":
        return GcsClient(
            _gcs(lambda: fsspec_gcs.gcs_filesystem(options), workers),
            str(url),
            root,
            options=options,
        )
    arguments = {**cls._get_kwargs_from_urls(str(url)), **options, "skip_instance_cache": True}
    if _takes(cls, "use_listings_cache"):
        arguments["use_listings_cache"] = False
    if cls.async_impl:
        arguments["asynchronous"] = True
    session = FilesystemSession(lambda: cls(**arguments), workers, dispose=_close_session)
    return _generic(cls, session, url, options)


def _borrowed(url: Url, filesystem: Any, workers: Workers) -> ObjectClient:
    """A client of a filesystem of the user."""
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
    # What it was made with is as secret as storage_options.
    options = {"args": filesystem.storage_args, "kwargs": filesystem.storage_options}
    root = "/".join((url.host, *url.parts))
    lent = FilesystemSession(lambda: filesystem, workers)
    again = is_async(filesystem) and filesystem.asynchronous
    if _is_a(filesystem, "s3fs", "S3FileSystem"):
        session = _s3(lambda: fsspec_s3.connected(made_again(filesystem)), workers)
        return S3Client(session if again else lent, str(url), root, options=options)
    if _is_a(filesystem, "gcsfs", "GCSFileSystem"):
        session = _gcs(lambda: made_again(filesystem), workers)
        return GcsClient(session if again else lent, str(url), root, options=options)
    session = FilesystemSession(lambda: made_again(filesystem), workers, dispose=_close_session)
    return _generic(type(filesystem), session if again else lent, url, options)


def _s3(make: Callable[[], Any], workers: Workers) -> FilesystemSession:
    return FilesystemSession(make, workers, dispose=fsspec_s3.disconnect)


def _gcs(make: Callable[[], Any], workers: Workers) -> FilesystemSession:
    return FilesystemSession(
        make, workers, prepare=fsspec_gcs.connect, dispose=fsspec_gcs.disconnect
    )


def _generic(
    cls: Any, session: FilesystemSession, url: Url, options: Mapping[str, Any]
) -> ObjectClient:
    root = cls._strip_protocol(str(url))
    if url.scheme == "memory":
        return MemoryClient(session, str(url), root, options=options)
    return FsspecClient(session, str(url), root, name=cls.__name__, options=options)


def _filesystem_class(url: Url) -> Any:
    from fsspec.registry import get_filesystem_class, known_implementations

    try:
        return get_filesystem_class(url.scheme)
    except ValueError:
        raise UsageError(
            f"{url}: fsspec knows no filesystem for {url.scheme}://; use s3://, gs://, memory:// "
            "or another of its schemes, or the path of a directory",
            location=str(url),
            found=url.scheme,
        ) from None
    except ImportError as error:
        if url.scheme in EXTRAS:
            hint = f'pip install "asyncckpt[{EXTRAS[url.scheme]}]"'
        else:
            hint = str(known_implementations.get(url.scheme, {}).get("err") or error)
        raise UsageError(
            f"{url}: what {url.scheme}:// needs is not installed: {hint}",
            location=str(url),
            found=url.scheme,
        ) from error


def _takes(cls: Any, name: str) -> bool:
    parameters = inspect.signature(cls.__init__).parameters
    return name in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _is_a(filesystem: object, package: str, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.partition(".")[0] == package
        for cls in type(filesystem).__mro__
    )


async def _close_session(filesystem: Any) -> None:
    """What fsspec's own backends keep open is closed; others have finalizers."""
    session = getattr(filesystem, "_session", None)
    close = getattr(session, "close", None)
    if inspect.iscoroutinefunction(close):
        await close()
