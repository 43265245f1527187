"""Object stores through obstore, whose requests are made by threads of its own, in Rust.

It is the extra ``fast``. A body is sent from where it lies and an answer arrives in the buffer that
is handed over, so that nothing is copied; what a request costs on the event loop is microseconds.
"""

# Rule 1: one call is one request: obstore's own retries are off and its timeout is out of the way.
# Rule 2: a body belongs to obstore until it has dropped it, which after a cancellation is later
#   than the call's end: it holds the very object that was passed, and with it the memory.
# Rule 3: errors are raised where the library's own are no longer handled, so that no traceback of
#   ours shows its text, which may hold what was signed.

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asyncckpt.options import GIB
from asyncckpt.stores.objects.client import (
    Body,
    ClientTraits,
    Kind,
    Listed,
    PendingParts,
    RequestError,
)
from asyncckpt.stores.objects.fsspec_client import each
from asyncckpt.stores.objects.fsspec_session import hidden_values
from asyncckpt.stores.objects.obstore_account import Untranslatable
from asyncckpt.stores.objects.obstore_errors import is_past_the_end, translated
from asyncckpt.stores.objects.obstore_options import s3_config

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

Entries = list[Listed]
Held = list[weakref.ref[memoryview]]

TIMEOUT = timedelta(days=1)
"""Of a whole request; the default of 30 s ends large ones. `Requests` has deadlines of its own."""

RETRIES_OFF = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
"""`Requests` retries, within its limiter; obstore's ten tries would hide throttling from it."""

DROP_POLL_S = 0.02
"""Between two looks for bodies that obstore has dropped after their requests ended."""

DROP_WAIT_S = 1.0
"""How long `close` waits for them: a cancelled request was seen to sign 512 MiB for 0.7 s."""

LIST_CHUNK = 1000
"""Entries that a listing hands over at once: a page of S3."""

_SCHEMES = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az", "HTTPStore": "https"}
_BUCKETS = {"S3Store": "bucket", "GCSStore": "bucket", "AzureStore": "container_name"}

_CONDITIONAL: dict[Kind, Kind] = {"conflict": "unavailable", "exists": "invalid"}

# Azure stores at most 5,000 MiB by one request.
_PUT_MAX_NBYTES = {"AzureStore": 4 * GIB}


def obstore_from(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> ObstoreClient | None:
    """A client of an `s3://` URL, or None where obstore would not do what s3fs does.

    None when obstore is not installed, the scheme is another one, or an option, profile or setting
    has no exact translation; `s3_config` says which. Blocks: it imports, reads AWS's configuration
    files, and may ask the machine for its role.
    """
    try:
        from obstore.store import S3Store
    except ImportError:
        return None
    options = storage_options or {}
    try:
        found = s3_config(url, options)
    except Untranslatable:
        return None
    make: Any = S3Store
    store = make(
        found.bucket,
        config=found.config,
        client_options={**found.client_options, "timeout": TIMEOUT},
        retry_config=RETRIES_OFF,
        credential_provider=found.credentials,
    )
    return ObstoreClient(store, url.rstrip("/"), prefix=found.prefix, hidden=hidden_values(options))


def bucket_of(store: Backend) -> str:
    """The bucket that a store object of obstore was made for; empty if it does not say."""
    config = getattr(store, "config", None) or {}
    return str(config.get(_BUCKETS.get(type(store).__name__, ""), ""))


def obstore_client(store: Backend, prefix: str = "") -> ObstoreClient:
    """A client of a store object of obstore and a prefix in it.

    The object keeps its options, but for retries, which are off, and its timeout, where it says
    none. Its URL tells bucket and prefix alone; that of an HTTPStore may hold a password.
    """
    name = type(store).__name__
    prefix = prefix.strip("/")
    within = "/".join(part for part in (str(getattr(store, "prefix", None) or ""), prefix) if part)
    bucket = bucket_of(store)
    scheme = _SCHEMES.get(name, name.removesuffix("Store").lower())
    url = f"{scheme}://" + "/".join(part for part in (bucket, within.strip("/")) if part)
    return ObstoreClient(_without_retries(store), url, prefix=prefix)


def _without_retries(store: Any) -> Any:
    if type(store).__name__ not in ("S3Store", "GCSStore", "AzureStore"):
        return store
    return type(store)(
        prefix=store.prefix,
        config=store.config,
        client_options={"timeout": TIMEOUT, **(store.client_options or {})},
        retry_config=RETRIES_OFF,
        credential_provider=store.credential_provider,
    )


class ObstoreClient:
    """An `ObjectClient` on the native API of obstore.

    Objects are sent in one request each: obstore has no request for one part of an upload, and
    leaves the parts of a cancelled one behind.

    Args:
        store: the store object; of its own thread-safe kind, made by anyone.
        url: what the client is called; holds no credentials.
        prefix: below which all keys are, without `/` at its ends.
        hidden: texts that no error repeats.
    """

    def __init__(
        self, store: Backend, url: str, *, prefix: str = "", hidden: Collection[str] = ()
    ) -> None:
        import obstore

        self.url = url
        name = type(store).__name__
        self.traits = ClientTraits(
            name="obstore",
            body="any",
            put_copies=0,
            get_copies=1,
            conditional_create=name != "HTTPStore",
            put_max_nbytes=_PUT_MAX_NBYTES.get(name, 5 * GIB),
        )
        self._deletes_many = any(cls.__name__ == "S3Store" for cls in type(store).__mro__)
        self._api = obstore
        self._store: Any = store
        self._prefix = prefix.strip("/")
        self._hidden = frozenset(hidden)
        self._held: Held = []
        self._all_dropped = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(obstore, {self.url!r})"

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """The object is exactly `body`, durable and visible; with `create` it is new.

        Cancellation: ends at once, while obstore may go on reading `body`, usually for some
        milliseconds, until the connection is closed. It holds the object that was passed: when
        that is collected, the memory is free.
        """
        mode = "create" if create else "overwrite"
        path = self._path(key)
        views = [memoryview(body)]  # of its own, so that its end tells that obstore dropped it
        held = weakref.ref(views[0])
        try:
            await self._ask(
                lambda: self._api.put_async(
                    self._store, path, views.pop(), mode=mode, use_multipart=False
                )
            )
        except RequestError as error:
            # Without a condition these are a server's other troubles.
            if not create and error.kind in _CONDITIONAL:
                error.kind = _CONDITIONAL[error.kind]
            raise
        finally:
            views.clear()
            if held() is not None:
                self._held.append(held)
                self._all_dropped.clear()
                self._watch()

    async def get(self, key: str, start: int, stop: int) -> Body:
        """The buffer that obstore received them in; read-only."""
        path = self._path(key)
        answer = await self._ask(
            lambda: self._api.get_range_async(self._store, path, start=start, end=stop),
            past_the_end=b"",
        )
        return memoryview(answer)

    async def size(self, key: str) -> int:
        """Length of the object in bytes, by a read of its first one.

        The answer to a HEAD has no body, which alone tells a missing object from a missing bucket.
        """
        path = self._path(key)

        async def first() -> int:
            found = await self._api.get_async(self._store, path, options={"range": (0, 1)})
            await found.bytes_async()  # a connection with unread bytes is of no further use
            return int(found.meta["size"])

        return int(await self._ask(first, past_the_end=0))

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        """What stands below `prefix`; of one level all pages are asked for, whatever the limit."""
        below = "/".join(part for part in (self._prefix, prefix) if part)
        if recursive:
            found = await self._list_all(below, limit)
        else:
            found = await self._list_level(below)
        found.sort(key=lambda entry: entry.key)
        return found[: limit + 1]

    async def delete(self, keys: Sequence[str]) -> None:
        """None of the objects is there; by one request for 1,000 of them where a server has it."""
        if not keys:
            return
        if self._deletes_many and len(keys) > 1:
            paths = [self._path(key) for key in keys]
            try:
                await self._ask(lambda: self._api.delete_async(self._store, paths))
            except RequestError as error:
                if error.kind not in ("missing", "invalid"):
                    raise
            else:
                return
        # Others end at the first object that is missing, or know no deletion of many and send one
        # request each themselves, without telling which of them failed.
        await each(self._delete, keys)

    async def begin_parts(self, key: str) -> str:
        """Always raises: see the class."""
        raise _no_parts()

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """Always raises: see the class."""
        raise _no_parts()

    async def complete_parts(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Always raises: see the class."""
        raise _no_parts()

    async def abort_parts(self, key: str, upload: str) -> None:
        """Always raises: see the class."""
        raise _no_parts()

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        """Always empty: it cannot tell."""
        return ()

    async def close(self) -> None:
        """The store object is let go, and with the last reference its connections. Idempotent.

        Waits up to `DROP_WAIT_S` for bodies of cancelled requests to be dropped.
        """
        if self._still_held():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DROP_WAIT_S):
                    await self._all_dropped.wait()
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()
        self._store = None

    # ------------------------------------------------------------------------------------ requests

    async def _ask(
        self,
        call: Callable[[], Awaitable[Any]],
        *,
        of_bucket: bool = False,
        past_the_end: Any = RequestError,
    ) -> Any:
        if self._store is None:
            raise RequestError("invalid", "the client was closed")
        try:
            return await call()
        except Exception as error:
            if past_the_end is not RequestError and is_past_the_end(error):
                return past_the_end
            failure = translated(error, self._hidden, of_bucket=of_bucket)
        try:
            raise failure
        finally:
            del failure  # a cycle of error and frame would hold the body until it is collected

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DROP_POLL_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._still_held():
            self._watch()
        else:
            self._all_dropped.set()

    def _still_held(self) -> Held:
        """Bodies that obstore still holds, after what it dropped has been released.

        A thread of Rust that drops a reference to Python may leave the release to the next call
        of the library from Python, whichever it is; without one a body would never be free.
        """
        repr(self._store)
        self._held = [held for held in self._held if held() is not None]
        return self._held

    async def _delete(self, key: str) -> None:
        path = self._path(key)
        try:
            await self._ask(lambda: self._api.delete_async(self._store, path))
        except RequestError as error:
            if error.kind != "missing":
                raise

    async def _list_all(self, below: str, limit: int) -> Entries:
        found: Entries = []
        stream: Any = None

        async def next_page() -> Any:
            nonlocal stream
            if stream is None:
                stream = self._api.list(self._store, below or None, chunk_size=LIST_CHUNK)
            return await anext(stream, None)

        while len(found) <= limit:
            page = await self._ask(next_page, of_bucket=True)
            if page is None:
                break
            for meta in page:
                if meta["path"] == below:
                    continue  # the marker of the directory itself
                entry = self._listed(meta)
                # That of one below it comes right before what is in it.
                if found and not found[-1].nbytes and entry.key.startswith(found[-1].key + "/"):
                    found.pop()
                found.append(entry)
        return found

    async def _list_level(self, below: str) -> Entries:
        level = await self._ask(
            lambda: self._api.list_with_delimiter_async(self._store, below or None),
            of_bucket=True,
        )
        found = [Listed(self._key(path), 0, is_prefix=True) for path in level["common_prefixes"]]
        found += [self._listed(meta) for meta in level["objects"] if meta["path"] != below]
        return found

    def _listed(self, meta: Any) -> Listed:
        modified_s = meta["last_modified"].timestamp()
        return Listed(self._key(meta["path"]), meta["size"], modified_s=modified_s)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _key(self, path: str) -> str:
        return path[len(self._prefix) + 1 :] if self._prefix else path


def _no_parts() -> RequestError:
    return RequestError("invalid", "obstore sends no parts: put the object in one request")
