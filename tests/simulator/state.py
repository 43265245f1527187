"""Buckets, objects and uploads in memory, without waiting and without a protocol."""

# Rule 1: a change is one call under the lock together with its precondition, so that of two
#   conditional writes that race exactly one succeeds.
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

KEY_MAX_NBYTES = 1024
"""Both services refuse longer keys, counted in UTF-8."""


class Refused(Exception):
    """The service refuses the request; `code` is S3's name for the reason."""

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
        """Join contents without a copy."""
        return cls(*(segment for content in contents for segment in content.segments))

    def slices(self, start: int, stop: int) -> Iterator[memoryview]:
        """Iterate over views of the bytes from `start` to `stop`."""
        for segment in self.segments:
            if start < segment.nbytes and stop > 0 and start < stop:
                yield segment[max(start, 0) : stop]
            start -= segment.nbytes
            stop -= segment.nbytes

    def tobytes(self) -> bytes:
        """Copy all bytes."""
        return b"".join(self.segments)

    def flip(self, offset: int) -> None:
        """Change the lowest bit of one byte; the offset is taken modulo the length."""
        at = offset % self.nbytes if self.nbytes else 0
        for segment in self.segments:
            if at < segment.nbytes:
                segment[at] ^= 1
                return
            at -= segment.nbytes


@dataclass(frozen=True, slots=True)
class Digests:
    """Known digests of some contents.

    Attributes:
        etag: without quotes.
        md5: in base64, where it was computed.
        crc32c: in base64, where it was computed.
        checksums: those that the client sent, by algorithm, in base64.
    """

    etag: str
    md5: str | None = None
    crc32c: str | None = None
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Precondition:
    """A condition on an object at the moment of a change.

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
        """Raise `Refused` unless the condition holds of `found`."""
        generation = 0 if found is None else found.generation
        if self.absent and found is not None:
            raise Refused("PreconditionFailed", Condition="If-None-Match")
        if self.etag is not None:
            if found is None:
                raise Refused("NoSuchKey")
            if self.etag != "*" and self.etag.strip('"') != found.digests.etag:
                raise Refused("PreconditionFailed", Condition="If-Match")
        if self.generation not in (None, generation) or self.generation_not == generation:
            raise Refused("PreconditionFailed")


NO_CONDITION = Precondition()


@dataclass(slots=True, eq=False)
class StoredObject:
    """One version of an object; generation and time are set when it is stored."""

    key: str
    content: Content
    digests: Digests
    content_type: str = "binary/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)
    generation: int = 0
    modified_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Length of the contents."""
        return self.content.nbytes


class Part(NamedTuple):
    """One part of an upload."""

    content: Content
    digests: Digests


@dataclass(slots=True, eq=False)
class Upload:
    """An open multipart or resumable upload."""

    id: str
    bucket: str
    key: str
    begun_s: float
    content_type: str = "binary/octet-stream"
    metadata: dict[str, str] = field(default_factory=dict)
    algorithm: str | None = None
    full_checksum: bool = False
    condition: Precondition = NO_CONDITION
    parts: dict[int, Part] = field(default_factory=dict)
    chunks: list[Content] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored for it."""
        contents = [part.content for part in self.parts.values()] + self.chunks
        return sum(content.nbytes for content in contents)


class Bucket:
    """Objects by key, and the keys in order."""

    def __init__(self, name: str, region: str | None = None) -> None:
        self.name = name
        self.region = region
        self.created_s = time.time()
        self.objects: dict[str, StoredObject] = {}
        self.keys: list[str] = []


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
        """Return microseconds since 1970, as GCS does, and never the same number twice."""
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return self._generation

    def create_bucket(self, name: str, region: str | None = None) -> Bucket:
        """Create an empty bucket. Raises `Refused` if it exists."""
        with self._lock:
            if name in self.buckets:
                raise Refused("BucketAlreadyOwnedByYou", BucketName=name)
            bucket = self.buckets[name] = Bucket(name, region)
            return bucket

    def bucket(self, name: str) -> Bucket:
        """Return the bucket. Raises `Refused` if it does not exist."""
        bucket = self.buckets.get(name)
        if bucket is None:
            raise Refused("NoSuchBucket", BucketName=name)
        return bucket

    def get(self, bucket: str, key: str) -> StoredObject:
        """Return the object. Raises `Refused` if it does not exist."""
        item = self.bucket(bucket).objects.get(key)
        if item is None:
            _check_key(key)
            raise Refused("NoSuchKey", Key=key)
        return item

    def put(
        self,
        bucket: str,
        item: StoredObject,
        condition: Precondition = NO_CONDITION,
        ending: Upload | None = None,
    ) -> StoredObject:
        """Create or replace an object, and close its upload; a failed condition keeps that open."""
        with self._lock:
            target = self.bucket(bucket)
            _check_key(item.key)
            if ending is not None and ending.id not in self.uploads:
                raise Refused("NoSuchUpload", UploadId=ending.id)
            condition.check(target.objects.get(item.key))
            item.generation, item.modified_s = self.next_generation(), time.time()
            if item.key not in target.objects:
                bisect.insort(target.keys, item.key)
            target.objects[item.key] = item
            if ending is not None:
                del self.uploads[ending.id]
            return item

    def delete(
        self, bucket: str, key: str, condition: Precondition = NO_CONDITION
    ) -> StoredObject | None:
        """Delete the object, and return it if it existed."""
        with self._lock:
            target = self.bucket(bucket)
            condition.check(target.objects.get(key))
            item = target.objects.pop(key, None)
            if item is not None:
                del target.keys[bisect.bisect_left(target.keys, key)]
            return item

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
        """List at most `limit` objects and common prefixes behind `after`, in order.

        Keys are from `start` on and before `end`; empty strings do not limit.
        """
        with self._lock:
            found = self.bucket(bucket)
            keys = found.keys
            objects: list[StoredObject] = []
            prefixes: list[str] = []
            last: str | None = None
            at = bisect.bisect_left(keys, max(prefix, start))
            stop = bisect.bisect_left(keys, end) if end else len(keys)
            if after:
                below = delimiter and after.startswith(prefix) and after.endswith(delimiter)
                at = max(at, bisect.bisect_right(keys, after + LAST if below else after))
            while at < stop and keys[at].startswith(prefix):
                if len(objects) + len(prefixes) == limit:
                    return Page(objects, prefixes, last)
                key = keys[at]
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if cut < 0:
                    objects.append(found.objects[key])
                    last = key
                    at += 1
                else:
                    last = key[: cut + len(delimiter)]
                    prefixes.append(last)
                    at = bisect.bisect_right(keys, last + LAST, lo=at)
            return Page(objects, prefixes, None)

    def begin_upload(self, upload: Upload) -> Upload:
        """Open the upload."""
        with self._lock:
            self.bucket(upload.bucket)
            _check_key(upload.key)
            self.uploads[upload.id] = upload
            return upload

    def new_upload_id(self) -> str:
        """Return a unique id; ids are in the order of their uploads, but cannot be guessed."""
        number = next(self._numbers)
        secret = hashlib.sha256(b"%d %d" % (number, time.time_ns())).hexdigest()
        return f"{number:08x}{secret[:32]}"

    def upload(self, bucket: str, key: str | None, upload_id: str) -> Upload:
        """Return the open upload, of any key if that is None. Raises `Refused`."""
        self.bucket(bucket)
        upload = self.uploads.get(upload_id)
        if upload is None or upload.bucket != bucket or key not in (None, upload.key):
            raise Refused("NoSuchUpload", UploadId=upload_id)
        return upload

    def abort_upload(self, upload: Upload) -> None:
        """Drop the upload and its parts."""
        with self._lock:
            self.uploads.pop(upload.id, None)

    def clear(self) -> None:
        """Empty all buckets and drop all uploads."""
        with self._lock:
            for bucket in self.buckets.values():
                bucket.objects.clear()
                bucket.keys.clear()
            self.uploads.clear()


def _check_key(key: str) -> None:
    if len(key.encode()) > KEY_MAX_NBYTES:
        raise Refused("KeyTooLongError", MaxSizeAllowed=str(KEY_MAX_NBYTES))
