"""Client of obstore, a Rust library that makes requests in its own threads.

It is the extra ``fast``. Bodies and responses are not copied (except by a `MemoryStore`); a request
costs microseconds on the event loop.
"""

# Rule 1: one call is one request: obstore's own retries are off, and its timeout never expires.
# Rule 2: obstore holds the body object, and so its memory, until it drops it: after a cancellation,
#   later than the end of the call.
# Rule 3: errors are raised outside of the handlers of the library's errors, so that no traceback
#   shows their text, which may contain signed data.
# Rule 4: obstore's threads touch Python objects for some microseconds after a call has ended. If
#   the interpreter exits meanwhile, the process aborts (PyO3/pyo3-async-runtimes#40), so its exit
#   waits. (test_a_process_that_ends_right_after_a_request_is_not_aborted)
# Rule 5: obstore's threads do not survive a fork, and in the child its requests never end, so no
#   client is made there. (test_obstore_used_before_a_fork_is_replaced_or_refused_in_the_child)

from __future__ import annotations

import asyncio
import atexit
import os
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncckpt.errors import UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.classification import FOREIGN, hidden_values, obstore_error
from asyncckpt.stores.objects.clients.client import (
    Body,
    ClientTraits,
    Listed,
    ObjectClient,
    RequestError,
    unless_missing,
)
from asyncckpt.stores.objects.clients.fsspec_client import LOCATED, each
from asyncckpt.stores.objects.clients.obstore_options import StoreOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

Entries = list[Listed]

TIMEOUT = timedelta(days=1)
"""Timeout of a whole request; the default of 30 s is too short for large ones. `Requests` sets
deadlines."""

RETRIES_OFF = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
"""`Requests` retries; obstore's ten retries would hide throttling from its limiter."""

DROP_POLL_S = 0.02
"""Interval of checks for bodies that obstore dropped."""

DROP_WAIT_S = 1.0
"""How long `delete` and `close` wait for obstore to drop bodies: a cancelled request was seen to
sign 512 MiB for 0.7 s; if it were then sent, it would restore a deleted object."""

EXIT_WAIT_S = 0.2
"""How long the exit of the process waits for threads: microseconds suffice on an idle core, and on
an overloaded one 0.05 s did not."""

LIST_CHUNK = 1000
"""Entries of a listing per page, as S3."""

NO_OBJECT = ".asyncckpt-no-object"
"""A name that no object has."""

REGION_TIMEOUT_S = 10.0
"""Timeout of a HEAD request without a body."""

_SCHEMES = {
    "S3Store": "s3",
    "GCSStore": "gs",
    "AzureStore": "az",
    "HTTPStore": "https",
    "MemoryStore": "memory",
    "LocalStore": "local",
}
_BUCKETS = {"S3Store": "bucket", "GCSStore": "bucket", "AzureStore": "container_name"}


def made_store(options: StoreOptions) -> Backend:
    """Return an obstore store with these options."""
    from obstore import store

    make: Any = getattr(store, options.kind)
    made: Backend = make(
        options.bucket,
        config=options.config,
        client_options={**options.client_options, "timeout": TIMEOUT},
        retry_config=RETRIES_OFF,
        **({} if options.credentials is None else {"credential_provider": options.credentials}),
    )
    return made


def bucket_of(store: Backend) -> str:
    """Return the bucket of a store; empty if unknown."""
    config = getattr(store, "config", None) or {}
    return str(config.get(_BUCKETS.get(_kind(store).__name__, ""), ""))


def _kind(store: Any) -> Any:
    """Return obstore's class of a store, which a user may have derived another from."""
    return next((cls for cls in type(store).__mro__ if cls.__name__ in _SCHEMES), type(store))


def obstore_client(store: Any, prefix: str = "") -> ObstoreClient:
    """Return a client of a user's store and a prefix in it.

    The store keeps its options, except that retries are off and a default timeout is replaced. The
    client's URL contains only bucket and prefix, since the URL of an HTTPStore may hold a password.
    """
    kind = _kind(store)
    prefix = prefix.strip("/")
    within = "/".join(part for part in (str(getattr(store, "prefix", None) or ""), prefix) if part)
    scheme = _SCHEMES.get(kind.__name__, "obstore")
    url = f"{scheme}://" + "/".join(part for part in (bucket_of(store), within.strip("/")) if part)
    secret = {name: getattr(store, name, None) for name in ("config", "client_options", "url")}
    hidden = hidden_values(secret) - {bucket_of(store)}  # which the URL shows
    if kind.__name__ in _BUCKETS:
        store = kind(
            prefix=store.prefix,
            config=store.config,
            client_options={"timeout": TIMEOUT, **(store.client_options or {})},
            retry_config=RETRIES_OFF,
            credential_provider=store.credential_provider,
        )
    return ObstoreClient(store, url, prefix=prefix, hidden=hidden)


def bucket_region(endpoint: str, bucket: str) -> str | None:
    """Return the bucket's region according to an S3 server. Blocks; needs no credentials."""
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=REGION_TIMEOUT_S) as answer:
            return str(answer.headers.get("x-amz-bucket-region") or "") or None
    except urllib.error.HTTPError as error:
        with error:  # redirections and refusals name it, too
            return error.headers.get("x-amz-bucket-region")
    except (OSError, HTTPException):  # no connection, or to something else than a web server
        return None


@cache
def _first_pid() -> int:
    """Return the id of the process that made the first client; its exit waits for threads."""
    atexit.register(time.sleep, EXIT_WAIT_S)
    return os.getpid()


def is_forked() -> bool:
    """Return whether this process was forked after the first client was made.

    To be called when a client is made: the first call decides which process made the first one.
    """
    return os.getpid() != _first_pid()


class ObstoreClient(ObjectClient):
    """An `ObjectClient` on the native API of obstore.

    Each object is sent in one request: obstore cannot send a single part of an upload, and leaves
    the parts of a cancelled upload behind.

    Args:
        store: obstore's store.
        url: the client's name; holds no credentials.
        prefix: of all keys, without `/` at its ends.
        hidden: texts that no error repeats.
        options: options of a `store` that we made: the client then finds the bucket's region, and
            errors name the endpoint.
        workers: threads in which it looks for the region; needed with `options`.
        other: returns another library's client of the same objects, for listings that obstore
            refuses.

    Raises:
        UsageError: a client was made before this process was forked.
    """

    def __init__(
        self,
        store: Backend,
        url: str,
        *,
        prefix: str = "",
        hidden: Collection[str] = (),
        options: StoreOptions | None = None,
        workers: Workers | None = None,
        other: Callable[[], ObjectClient] | None = None,
    ) -> None:
        import obstore

        if is_forked():
            raise UsageError(
                f"{url}: obstore was used before this process was forked, and its threads do not "
                "survive a fork; start processes with spawn, or pass "
                'storage_options={"client": "fsspec"}',
                location=url,
            )
        self.url = url
        kind = _kind(store).__name__
        self._is_gcs, self._is_s3 = kind == "GCSStore", kind == "S3Store"
        self._is_memory = kind == "MemoryStore"
        self.traits = ClientTraits(
            name="obstore",
            put_copies=int(self._is_memory),  # see `_put`
            # Measured, with hedged reads and its own receive buffers.
            get_copies=2,
            conditional_create=kind != "HTTPStore",
            conditional_replace=self._is_gcs or self._is_s3,
        )
        self._api = obstore
        self._store: Any = store
        self._prefix = prefix.strip("/")
        self._hidden = frozenset(hidden)
        self._options = options
        self._is_store = not (self._is_gcs or self._is_s3)
        self._region_known = not self._is_s3 or options is None
        self._workers = workers
        self._make_other = other
        self._other: ObjectClient | None = None
        self._held: list[weakref.ref[memoryview]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """See `ObjectClient`.

        Cancellation: ends at once. obstore holds `body`, and may read it until the connection is
        closed, usually for some milliseconds.
        """
        await self._put(key, body, "create" if create else "overwrite")

    async def get(self, key: str, start: int, stop: int) -> Body:
        """See `ObjectClient`; returns the read-only buffer in which obstore received the bytes."""
        path = self._path(key)
        try:
            found = await self._ask(
                lambda store: self._api.get_range_async(store, path, start=start, end=stop)
            )
        except RequestError as error:
            if error.status != 416:
                raise
            return b""
        self._is_store = True
        return memoryview(found)

    async def size(self, key: str) -> int:
        return int((await self._meta(key))["size"])

    async def version(self, key: str) -> str:
        return str((await self._meta(key))["version" if self._is_gcs else "e_tag"])

    async def replace(self, key: str, body: Body, *, version: str) -> None:
        """See `ObjectClient`; by `If-Match` on S3 and by generation on GCS."""
        await self._put(key, body, {"version" if self._is_gcs else "e_tag": version})

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        """See `ObjectClient`; reads all pages of one level, regardless of the limit.

        obstore refuses a listing with an empty or dot part in a key, like `run//x`. The other
        library then reads this and all later listings.
        """
        below = "/".join(part for part in (self._prefix, prefix) if part)
        if self._other is None:
            try:
                found = await (self._all(below, limit) if recursive else self._level(below))
                if not found and not self._is_store:
                    await self._check_nothing(below)
                return sorted(found)[: limit + 1]
            except RequestError as error:
                if error.kind == "missing":
                    error.kind = "no_bucket"  # no object was requested
                if "InvalidPathError" not in error.detail:
                    raise
                if self._make_other is None:
                    error.detail += "; install s3fs or gcsfs, or delete the object"
                    raise
                self._other = self._make_other()
        return await self._other.list(prefix, recursive=recursive, limit=limit)

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectClient`; one request deletes 1,000 objects if the server supports that.

        Waits up to `DROP_WAIT_S` for bodies of cancelled requests to be dropped.
        """
        await self._dropped()
        if self._is_s3 and len(keys) > 1:
            paths = [self._path(key) for key in keys]
            try:
                await self._ask(lambda store: self._api.delete_async(store, paths))
                return
            except RequestError as error:
                if error.kind not in ("missing", "invalid"):
                    raise
        # On other stores obstore stops at the first missing object, or deletes one by one without
        # reporting which deletion failed.
        await each(self._delete, keys)

    async def close(self) -> None:
        """Drop the store, and with the last reference its connections. Idempotent.

        Waits up to `DROP_WAIT_S` for bodies of cancelled requests to be dropped.
        """
        await self._dropped()
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()
        self._store = None
        if self._other is not None:
            await self._other.close()

    # ------------------------------------------------------------------------------------ requests

    async def _ask(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the answer of a call with the store; convert its errors to `RequestError`."""
        while True:
            if self._store is None:
                raise RequestError("invalid", "the client is closed")
            options = self._options  # a reference to the store would keep its connections open
            try:
                answer = await call(self._store)
                self._region_known = True
                return answer
            except Exception as error:
                failure = obstore_error(error, self._hidden)
            if failure.kind in LOCATED and options is not None:
                failure.detail += f" (endpoint {urlsplit(options.endpoint).netloc})"
                # Servers may close the connection instead of answering a large PUT.
                if failure.kind != "timeout":
                    await self._find_region()
                    # Another request may have found it while this one was in flight.
                    if self._options is not options:
                        continue
            try:
                raise failure
            finally:
                del failure  # breaks the reference cycle of error and frame, which holds the body

    async def _find_region(self) -> None:
        """Recreate the store, with new options, if the bucket is in another region."""
        options, workers = self._options, self._workers
        if self._region_known or options is None or workers is None:
            return
        region = await workers.run_or_abandon(bucket_region, options.endpoint, options.bucket)
        if self._store is None or self._options is not options:
            return  # closed, or found by another request
        self._region_known = region is not None
        if region not in (None, options.config["region"]):
            self._options = replace(options, config={**options.config, "region": region})
            self._store = made_store(self._options)

    async def _put(self, key: str, body: Body, mode: Any) -> None:
        path, bodies = self._path(key), [body]
        held: list[weakref.ref[memoryview]] = []

        def put(store: Any) -> Any:
            if self._is_memory:  # it keeps the buffer that it is given, and the caller's may change
                view = memoryview(bytes(bodies[0]))
            else:
                view = memoryview(bodies[0])  # collected when obstore has dropped it
                held.append(weakref.ref(view))
            return self._api.put_async(store, path, view, mode=mode, use_multipart=False)

        try:
            await self._ask(put)
            self._is_store = True
        finally:
            bodies.clear()  # a traceback may keep `put` alive
            if kept := [view for view in held if view() is not None]:
                self._held += kept
                self._look()

    async def _meta(self, key: str) -> Any:
        """Return an object's metadata, by reading its first byte.

        A HEAD has no response body, which distinguishes a missing object from a missing bucket.
        """
        path = self._path(key)

        async def first(store: Any) -> Any:
            found = await self._api.get_async(store, path, options={"range": (0, 1)})
            await found.bytes_async()  # a connection with unread bytes cannot be reused
            return found.meta

        try:
            return await self._ask(first)
        except RequestError as error:
            if error.status != 416:
                raise
        return await self._ask(lambda store: self._api.head_async(store, path))

    async def _dropped(self) -> None:
        for _ in range(round(DROP_WAIT_S / DROP_POLL_S)):
            if not self._held:
                return
            await asyncio.sleep(DROP_POLL_S)

    def _look(self) -> None:
        """Forget bodies that obstore dropped, and check for the others again later.

        An object that a Rust thread drops may only be released by the next call into the library.
        """
        repr(self._store)
        self._held = [held for held in self._held if held() is not None]
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(DROP_POLL_S, self._look) if self._held else None

    async def _delete(self, key: str) -> None:
        path = self._path(key)
        with unless_missing():
            await self._ask(lambda store: self._api.delete_async(store, path))

    async def _all(self, below: str, limit: int) -> Entries:
        found: list[Listed] = []
        stream: Any = None

        async def next_page(store: Any) -> Any:
            nonlocal stream
            if stream is None:
                stream = self._api.list(store, below or None, chunk_size=LIST_CHUNK)
            try:
                return await anext(stream, None)
            except Exception:
                stream = None if not found else stream
                raise

        while len(found) <= limit and (page := await self._ask(next_page)) is not None:
            for meta in page:
                if meta["path"] == below:
                    continue  # the directory's own marker
                entry = self._listed(meta)
                # The marker of a directory comes right before its contents.
                if found and not found[-1].nbytes and entry.key.startswith(found[-1].key + "/"):
                    found.pop()
                found.append(entry)
        return found

    async def _check_nothing(self, below: str) -> None:
        """Raise unless a store answers, since obstore takes any web page for an empty listing.

        Needed once, and not after a write or a ranged read has succeeded: obstore accepts no web
        page as the answer to these.
        """
        path = f"{below}/{NO_OBJECT}" if below else NO_OBJECT
        try:
            await self._ask(lambda store: self._api.get_range_async(store, path, start=0, end=1))
        except RequestError as error:
            if error.kind in ("missing", "forbidden"):
                self._is_store = True
                return
            raise
        raise RequestError("endpoint", FOREIGN)

    async def _level(self, below: str) -> Entries:
        level = await self._ask(
            lambda store: self._api.list_with_delimiter_async(store, below or None)
        )
        found = [Listed(self._key(path), 0, is_prefix=True) for path in level["common_prefixes"]]
        found += [self._listed(meta) for meta in level["objects"] if meta["path"] != below]
        return found

    def _listed(self, meta: Any) -> Listed:
        return Listed(
            self._key(meta["path"]),
            meta["size"],
            modified_s=meta["last_modified"].timestamp(),
            checksum=(meta["e_tag"] or "").strip('"') if self._is_s3 or self._is_gcs else "",
        )

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _key(self, path: str) -> str:
        return path[len(self._prefix) + 1 :] if self._prefix else path
