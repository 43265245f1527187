"""What both dialects share: the state, the settings, digests and who may ask."""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.flow.threads import Workers
from asyncckpt.testing.objectstore.credentials import (
    Credentials,
    check_s3,
    check_token,
    scope_region,
)
from asyncckpt.testing.objectstore.digests import digests_of, sent_checksums, verify
from asyncckpt.testing.objectstore.requests import Request
from asyncckpt.testing.objectstore.state import Content, Digests, Refused, State

INLINE_NBYTES = 64 * 1024
"""Digests of more than this are computed in a thread, while other requests go on."""

MD5_MAX_NBYTES = 1024 * 1024
PART_MIN_NBYTES = 5 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Service:
    """State and settings of a simulated service.

    Attributes:
        state: buckets and uploads.
        workers: threads for digests.
        credentials: who may ask, or None for everybody.
        region: of the S3 endpoint; requests that are signed for another one are refused. None
            for any.
        part_min_nbytes: parts of an S3 upload but the last are not smaller; 0 for no limit.
        md5_max_nbytes: contents above have no MD5, and an ETag of another kind.
        verify_checksums: whether bodies are held against the checksums that came with them.
    """

    state: State
    workers: Workers
    credentials: Credentials | None = None
    region: str | None = None
    part_min_nbytes: int = PART_MIN_NBYTES
    md5_max_nbytes: int = MD5_MAX_NBYTES
    verify_checksums: bool = True

    def region_of(self, request: Request) -> str | None:
        """The region for which the request is signed, or None."""
        return scope_region(request)

    def authorize_s3(self, request: Request) -> None:
        """Raise `Refused` unless the request may be made, as S3 does."""
        if self.credentials is not None:
            check_s3(self.credentials, request)
        used = scope_region(request)
        if self.region is not None and used is not None and used != self.region:
            raise Refused(
                "AuthorizationHeaderMalformed",
                f"The authorization header is malformed; the region '{used}' is wrong; "
                f"expecting '{self.region}'",
                Region=self.region,
            )

    def authorize_gcs(self, request: Request) -> None:
        """Raise `Refused` unless the request may be made, as GCS does."""
        if self.credentials is not None:
            check_token(self.credentials, request)

    async def digests(
        self,
        request: Request,
        content: Content,
        *,
        with_crc32c: bool = False,
        composed: bool = False,
    ) -> Digests:
        """The digests of contents that the request brought, held against those it names.

        Raises:
            Refused: they differ.
        """
        checksums = sent_checksums(request.headers) | sent_checksums(request.trailers)
        content_md5 = request.headers.get("content-md5")
        goog = request.headers.get("x-goog-hash", "")
        for item in goog.split(","):
            name, _, value = item.strip().partition("=")
            if name == "crc32c":
                checksums["crc32c"] = value
            elif name == "md5":
                content_md5 = value
        generation = self.state.next_generation()

        def compute() -> Digests:
            if self.verify_checksums:
                verify(content, checksums, content_md5)
            return digests_of(
                content,
                md5_max_nbytes=-1 if composed else self.md5_max_nbytes,
                generation=generation,
                checksums=checksums,
                with_crc32c=with_crc32c,
            )

        cheap = not with_crc32c and content.nbytes > self.md5_max_nbytes
        if content.nbytes <= INLINE_NBYTES or (
            cheap and not (self.verify_checksums and (checksums or content_md5))
        ):
            return compute()
        return await self.workers.run(compute)
