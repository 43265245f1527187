"""Buckets, objects and uploads in memory. Nothing here waits or knows a protocol."""

# Rule 1: a change is one call under the lock, with its precondition; of two, one is first.
# Rule 2: contents are never copied or changed; an overwritten one is freed with its last reader.

from __future__ import annotations

import bisect
import hashlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LAST = "\U0010ffff"
"""Above every character of a key."""


class Refused(Exception):
    """The state does not allow the operation; `code` is the name that S3 has for the reason."""

    def __init__(self, code: str, detail: str = "", **fields: str) -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail
        self.fields = fields


class Content:
    """Bytes in one or more segments."""

    __slots__ = ("nbytes", "segments")

    def __init__(self, *segments: bytes | bytearray | memoryview) -> None:
        self.segments = tuple(memoryview(segment) for segment in segments)
        self.nbytes = sum(segment.nbytes for segment in self.segments)

    @classmethod
    def joined(cls, contents: Sequence[Content]) -> Content:
        """The contents one after the other, without a copy."""
        return cls(*(segment for content in contents for segment in content.segments))

    def slices(self, start: int, stop: int) -> Iterator[memoryview]:
        """Views of the bytes from `start` to `stop`."""
        for segment in self.segments:
            if start < segment.nbytes and stop > 0 and start < stop:
                yield segment[max(start, 0) : stop]
            start -= segment.nbytes
            stop -= segment.nbytes

    def tobytes(self) -> bytes:
        """A copy of all bytes."""
        return b"".join(self.segments)

    def flip(self, offset: int) -> None:
        """The lowest bit of one byte is changed; the offset is taken modulo the length."""
        at = offset % self.nbytes if self.nbytes else 0
        for segment in self.segments:
            if at < segment.nbytes:
                segment[at] ^= 1
                return
            at -= segment.nbytes


@dataclass(frozen=True, slots=True)
class Digests:
    """What is known about some contents.

    Attributes:
        etag: without quotes.
        md5: digest, where it was computed.
        crc32c: value, where it was computed.
        checksums: what the client sent or asked for, by algorithm, in base64.
    """

    etag: str
    md5: bytes | None = None
    crc32c: int | None = None
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Precondition:
    """What must hold at the moment of a change.

    Attributes:
        absent: no object has the key.
        etag: the object has this ETag; ``*`` for any.
        generation: the object has this generation; 0 for none.
        generation_not: the object has another generation than this.
    """

    absent: bool = False
    etag: str | None = None
    generation: int | None = None
    generation_not: int | None = None

    def check(self, found: StoredObject | None) -> None:
        """Raise `Refused` unless it holds of `found`."""
        generation = 0 if found is None else found.generation
        if self.absent and found is not None:
            raise Refused("PreconditionFailed", Condition="If-None-Match")
        if self.etag is not None:
            if found is None:
                raise Refused("NoSuchKey")
            if self.etag != "*" and self.etag.strip('"') != found.digests.etag:
                raise Refused("PreconditionFailed", Condition="If-Match")
        if self.generation is not None and self.generation != generation:
            raise Refused("PreconditionFailed")
        if self.generation_not is not None and self.generation_not == generation:
            raise Refused("PreconditionFailed")


NO_CONDITION = Precondition()


@dataclass(frozen=True, slots=True, eq=False)
class StoredObject:
    """One version of an object."""

    key: str
    content: Content
    digests: Digests
    generation: int
    modified_s: float
    content_type: str = "binary/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)
    parts: int = 0

    @property
    def nbytes(self) -> int:
        """Length of the contents."""
        return self.content.nbytes


class Part(NamedTuple):
    """One part of an upload."""

    content: Content
    digests: Digests
    modified_s: float


@dataclass(slots=True, eq=False)
class Upload:
    """A multipart or resumable upload that is open."""

    id: str
    bucket: str
    key: str
    begun_s: float
    content_type: str = "binary/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)
    algorithm: str | None = None
    condition: Precondition = NO_CONDITION
    parts: dict[int, Part] = field(default_factory=dict)
    chunks: list[Content] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored for it."""
        return sum(part.content.nbytes for part in self.parts.values()) + sum(
            chunk.nbytes for chunk in self.chunks
        )


class Bucket:
    """Objects by key, and the keys in order."""

    def __init__(self, name: str, region: str | None = None) -> None:
        self.name = name
        self.region = region
        self.created_s = time.time()
        self.objects: dict[str, StoredObject] = {}
        self.keys: list[str] = []

    def put(self, item: StoredObject) -> None:
        """The object is there, in place of one with its key."""
        if item.key not in self.objects:
            bisect.insort(self.keys, item.key)
        self.objects[item.key] = item

    def remove(self, key: str) -> StoredObject | None:
        """No object has the key; returns the one that had."""
        item = self.objects.pop(key, None)
        if item is not None:
            del self.keys[bisect.bisect_left(self.keys, key)]
        return item


class Page(NamedTuple):
    """One page of a listing; `next` is the last entry if there is more, else None."""

    objects: list[StoredObject]
    prefixes: list[str]
    next: str | None


class State:
    """All buckets and uploads of a service."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._generation = 0

    def next_generation(self) -> int:
        """Microseconds since 1970, as in GCS, and never the same number twice."""
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return self._generation

    def create_bucket(self, name: str, region: str | None = None) -> Bucket:
        """The bucket is there, and empty. Raises `Refused`: it was there before."""
        with self._lock:
            if name in self.buckets:
                raise Refused("BucketAlreadyOwnedByYou", BucketName=name)
            bucket = self.buckets[name] = Bucket(name, region)
            return bucket

    def delete_bucket(self, name: str) -> None:
        """The bucket is gone. Raises `Refused`: it holds something, or was not there."""
        with self._lock:
            if self.bucket(name).objects:
                raise Refused("BucketNotEmpty", BucketName=name)
            del self.buckets[name]

    def bucket(self, name: str) -> Bucket:
        """The bucket. Raises `Refused`: there is none."""
        bucket = self.buckets.get(name)
        if bucket is None:
            raise Refused("NoSuchBucket", BucketName=name)
        return bucket

    def get(self, bucket: str, key: str) -> StoredObject:
        """The object. Raises `Refused`: there is none."""
        item = self.bucket(bucket).objects.get(key)
        if item is None:
            raise Refused("NoSuchKey", Key=key)
        return item

    def put(
        self,
        bucket: str,
        key: str,
        content: Content,
        digests: Digests,
        *,
        condition: Precondition = NO_CONDITION,
        content_type: str = "binary/octet-stream",
        metadata: dict[str, str] | None = None,
    ) -> StoredObject:
        """The object is `content`."""
        with self._lock:
            target = self.bucket(bucket)
            condition.check(target.objects.get(key))
            item = StoredObject(
                key,
                content,
                digests,
                self.next_generation(),
                time.time(),
                content_type,
                metadata or {},
            )
            target.put(item)
            return item

    def delete(
        self, bucket: str, key: str, condition: Precondition = NO_CONDITION
    ) -> StoredObject | None:
        """No object has the key; returns the one that had."""
        with self._lock:
            target = self.bucket(bucket)
            condition.check(target.objects.get(key))
            return target.remove(key)

    def list(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        after: str = "",
        start: str = "",
        end: str = "",
        limit: int,
    ) -> Page:
        """At most `limit` objects and common prefixes behind `after`, in order.

        Keys are from `start` on and before `end`; empty ones do not limit.
        """
        with self._lock:
            return _page(self.bucket(bucket), prefix, delimiter, after, start, end, limit)

    def begin_upload(self, upload: Upload) -> Upload:
        """The upload is open."""
        with self._lock:
            self.bucket(upload.bucket)
            self.uploads[upload.id] = upload
            return upload

    def new_upload_id(self) -> str:
        """Unlike every other, and not to be guessed from the number of uploads."""
        number = next(self._numbers)
        return hashlib.sha256(b"%d %d" % (number, time.time_ns())).hexdigest()[:40]

    def upload(self, bucket: str, key: str | None, upload_id: str) -> Upload:
        """The open upload; of any key if that is None. Raises `Refused`: there is none."""
        self.bucket(bucket)
        upload = self.uploads.get(upload_id)
        if upload is None or upload.bucket != bucket or key not in (None, upload.key):
            raise Refused("NoSuchUpload", UploadId=upload_id)
        return upload

    def end_upload(
        self,
        upload: Upload,
        content: Content,
        digests: Digests,
        *,
        condition: Precondition = NO_CONDITION,
        parts: int = 0,
    ) -> StoredObject:
        """The object is `content` and the upload is no more; a failed condition keeps it open."""
        with self._lock:
            target = self.bucket(upload.bucket)
            if upload.id not in self.uploads:
                raise Refused("NoSuchUpload", UploadId=upload.id)
            condition.check(target.objects.get(upload.key))
            item = StoredObject(
                upload.key,
                content,
                digests,
                self.next_generation(),
                time.time(),
                upload.content_type,
                upload.metadata,
                parts,
            )
            target.put(item)
            del self.uploads[upload.id]
            return item

    def abort_upload(self, upload: Upload) -> None:
        """The upload and its parts are gone."""
        with self._lock:
            self.uploads.pop(upload.id, None)

    def clear(self) -> None:
        """Buckets are empty, no upload is open."""
        with self._lock:
            for bucket in self.buckets.values():
                bucket.objects.clear()
                bucket.keys.clear()
            self.uploads.clear()


def _page(
    bucket: Bucket, prefix: str, delimiter: str, after: str, start: str, end: str, limit: int
) -> Page:
    keys = bucket.keys
    objects: list[StoredObject] = []
    prefixes: list[str] = []
    last: str | None = None
    at = bisect.bisect_left(keys, max(prefix, start))
    stop = bisect.bisect_left(keys, end) if end else len(keys)
    if after:
        is_prefix = bool(delimiter) and after.startswith(prefix) and after.endswith(delimiter)
        at = max(at, bisect.bisect_right(keys, after + LAST if is_prefix else after))
    while at < stop and keys[at].startswith(prefix):
        if len(objects) + len(prefixes) == limit:
            return Page(objects, prefixes, last)
        key = keys[at]
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            objects.append(bucket.objects[key])
            last = key
            at += 1
        else:
            last = key[: cut + len(delimiter)]
            prefixes.append(last)
            at = bisect.bisect_right(keys, last + LAST, lo=at)
    return Page(objects, prefixes, None)
