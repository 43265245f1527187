"""The REST API of S3, one request at a time: conditions, copies, limits, subresources."""

from __future__ import annotations

import base64
import contextlib
import http.client
import zlib
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from tests.simulator import Fault, Simulator, simulator
from tests.simulator_tests.asking import Answer, ask


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Iterator[Simulator]:
    running.clear()
    yield running
    running.faults.clear()


def send(
    sim: Simulator, method: str, key: str, body: bytes | None = None, /, **headers: str
) -> Answer:
    """Send one request about a key; `_` in the names of headers stands for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ask(sim.s3_endpoint, method, f"/bucket/{key}", body, named)


def delete_objects(sim: Simulator, *entries: tuple[str, str], quiet: bool = False) -> Answer:
    """Delete keys by one request, each under the condition of its ETag if that is not empty."""
    objects = "".join(
        f"<Object><Key>{key}</Key>{f'<ETag>{etag}</ETag>' if etag else ''}</Object>"
        for key, etag in entries
    )
    body = f"<Delete><Quiet>{str(quiet).lower()}</Quiet>{objects}</Delete>".encode()
    return ask(sim.s3_endpoint, "POST", "/bucket?delete", body)


def test_a_write_with_if_match_needs_the_object_as_it_was(sim: Simulator) -> None:
    first = send(sim, "PUT", "a", b"1").headers["etag"]
    second = send(sim, "PUT", "a", b"2", If_Match=first)
    assert second.status == 200
    refused = send(sim, "PUT", "a", b"3", If_Match=first)
    assert (refused.status, refused.code) == (412, "PreconditionFailed")
    missing = send(sim, "PUT", "none", b"3", If_Match=first)
    assert (missing.status, missing.code) == (404, "NoSuchKey")
    assert send(sim, "PUT", "a", b"4", If_Match="*").status == 200
    assert send(sim, "PUT", "none", b"4", If_Match="*").status == 404
    assert sim.objects() == {"a": b"4"}


def test_a_deletion_with_if_match_needs_the_object_as_it_was(sim: Simulator) -> None:
    first = send(sim, "PUT", "a", b"1").headers["etag"]
    second = send(sim, "PUT", "a", b"2").headers["etag"]
    refused = send(sim, "DELETE", "a", If_Match=first)
    assert (refused.status, refused.code) == (412, "PreconditionFailed")
    assert send(sim, "DELETE", "a", If_Match=second).status == 204
    missing = send(sim, "DELETE", "a", If_Match=second)
    assert (missing.status, missing.code) == (404, "NoSuchKey")
    assert send(sim, "DELETE", "a").status == 204


def test_a_deletion_of_many_obeys_the_etag_of_each(sim: Simulator) -> None:
    etag = send(sim, "PUT", "a", b"1").headers["etag"].strip('"')
    send(sim, "PUT", "b", b"2")
    send(sim, "PUT", "c", b"3")
    answer = delete_objects(sim, ("a", etag), ("b", etag), ("c", ""), ("none", etag), quiet=True)
    assert sim.objects() == {"b": b"2"}
    text = answer.body.decode()
    assert "<Error><Key>b</Key><Code>PreconditionFailed</Code>" in text
    assert "<Error><Key>none</Key><Code>NoSuchKey</Code>" in text
    assert "<Deleted>" not in text


def test_a_copy_obeys_conditions_on_source_and_target(sim: Simulator) -> None:
    source = send(sim, "PUT", "a", b"new").headers["etag"]
    target = send(sim, "PUT", "b", b"old").headers["etag"]
    where = {"x_amz_copy_source": "/bucket/a"}
    assert send(sim, "PUT", "b", If_Match=source, **where).code == "PreconditionFailed"
    assert send(sim, "PUT", "b", If_None_Match="*", **where).code == "PreconditionFailed"
    stale = send(sim, "PUT", "b", x_amz_copy_source_if_match=target, **where)
    assert (stale.status, stale.code) == (412, "PreconditionFailed")
    assert sim.objects() == {"a": b"new", "b": b"old"}
    copied = send(sim, "PUT", "b", If_Match=target, x_amz_copy_source_if_match=source, **where)
    assert copied.status == 200
    assert sim.objects() == {"a": b"new", "b": b"new"}
    assert send(sim, "HEAD", "b").headers["etag"] == source


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/bucket/a?tagging"),
        ("PUT", "/bucket/a?acl"),
        ("GET", "/bucket/a?tagging"),
        ("GET", "/bucket/a?versionId=1"),
        ("DELETE", "/bucket/a?tagging"),
        ("DELETE", "/bucket/a?versionId=1"),
        ("POST", "/bucket/a?uploads&acl"),
        ("GET", "/bucket?versions"),
        ("POST", "/bucket?delete&other"),
    ],
)
def test_an_unknown_subresource_never_runs_the_plain_operation(
    sim: Simulator, method: str, target: str
) -> None:
    sim.put("bucket", "a", b"body")
    answer = ask(sim.s3_endpoint, method, target, b"" if method == "PUT" else None)
    assert (answer.status, answer.code) == (501, "NotImplemented")
    assert (sim.objects(), sim.uploads) == ({"a": b"body"}, [])


def test_parameters_that_only_name_the_operation_are_ignored(sim: Simulator) -> None:
    assert send(sim, "PUT", "a?x-id=PutObject", b"body").status == 200
    assert send(sim, "GET", "a?X-Amz-Expires=60").body == b"body"


def test_a_key_has_at_most_1024_bytes(sim: Simulator) -> None:
    assert send(sim, "PUT", "a" * 1024, b"x").status == 200
    for key in ("a" * 1025, "%C3%BC" * 513):
        for method in ("PUT", "GET"):
            refused = send(sim, method, key, b"x" if method == "PUT" else None)
            assert (refused.status, refused.code) == (400, "KeyTooLongError")
        assert send(sim, "POST", f"{key}?uploads").code == "KeyTooLongError"
        target = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={key}"
        assert ask(sim.gcs_endpoint, "POST", target, b"x").status == 400
    assert list(sim.objects()) == ["a" * 1024]


def test_a_deletion_names_at_most_1000_keys(sim: Simulator) -> None:
    sim.put("bucket", "0", b"x")
    names = [(str(number), "") for number in range(1001)]
    refused = delete_objects(sim, *names)
    assert (refused.status, refused.code) == (400, "MalformedXML")
    assert list(sim.objects()) == ["0"]
    assert delete_objects(sim, *names[:1000]).status == 200
    assert sim.objects() == {}


@pytest.mark.parametrize("target", ["a", "a?partNumber=1&uploadId=none"])
def test_a_body_needs_a_length(sim: Simulator, target: str) -> None:
    with contextlib.closing(http.client.HTTPConnection(sim.s3_endpoint[7:], timeout=30)) as client:
        client.putrequest("PUT", f"/bucket/{target}")
        client.endheaders()
        answer = client.getresponse()
        assert (answer.status, b"MissingContentLength" in answer.read()) == (411, True)
    assert sim.objects() == {}


def begin(sim: Simulator, key: str, **headers: str) -> str:
    """Begin an upload, and return what addresses it."""
    text = send(sim, "POST", f"{key}?uploads", **headers).body.decode()
    return f"{key}?uploadId={text.partition('<UploadId>')[2].partition('<')[0]}"


def complete(sim: Simulator, upload: str, *parts: str, **headers: str) -> Answer:
    """Complete an upload; each part is the inside of its element."""
    body = "".join(f"<Part>{part}</Part>" for part in parts)
    whole = f"<CompleteMultipartUpload>{body}</CompleteMultipartUpload>".encode()
    return send(sim, "POST", upload, whole, **headers)


def part(sim: Simulator, upload: str, number: int, body: bytes, **headers: str) -> str:
    """Send a part, and return what names it when its upload is completed."""
    etag = send(sim, "PUT", f"{upload}&partNumber={number}", body, **headers).headers["etag"]
    return f"<PartNumber>{number}</PartNumber><ETag>{etag}</ETag>"


def test_a_completed_upload_can_be_completed_again(sim: Simulator) -> None:
    upload = begin(sim, "a")
    named = part(sim, upload, 1, b"body")
    sim.faults.append(Fault(kind="complete_upload", status=503, applied=True))
    assert complete(sim, upload, named, If_None_Match="*").status == 503
    first = complete(sim, upload, named, If_None_Match="*")
    again = complete(sim, upload, named, If_None_Match="*")
    assert (first.status, again.status, first.body == again.body) == (200, 200, True)
    assert sim.objects() == {"a": b"body"}
    other = complete(sim, upload, named.replace(">1<", ">2<"))
    assert (other.status, other.code) == (404, "NoSuchUpload")
    assert complete(sim, upload.replace("a?", "b?"), named).code == "NoSuchUpload"


def crc(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize("full", [False, True])
def test_checksums_of_an_upload_are_compared_at_its_end(sim: Simulator, full: bool) -> None:
    kind = "FULL_OBJECT" if full else "COMPOSITE"
    upload = begin(sim, "a", x_amz_checksum_algorithm="CRC32", x_amz_checksum_type=kind)
    named = part(sim, upload, 1, b"body", x_amz_checksum_crc32=crc(b"body"))
    wrong = complete(sim, upload, f"{named}<ChecksumCRC32>{crc(b'x')}</ChecksumCRC32>")
    assert (wrong.status, wrong.code) == (400, "InvalidPart")
    right = f"{named}<ChecksumCRC32>{crc(b'body')}</ChecksumCRC32>"
    whole = crc(b"body") if full else f"{crc(zlib.crc32(b'body').to_bytes(4, 'big'))}-1"
    wrong = complete(sim, upload, right, x_amz_checksum_crc32=crc(b"x"))
    assert (wrong.status, wrong.code) == (400, "BadDigest")
    wrong = complete(sim, upload, right, x_amz_mp_object_size="5")
    assert (wrong.status, wrong.code) == (400, "InvalidRequest")
    assert sim.objects() == {}
    done = complete(sim, upload, right, x_amz_checksum_crc32=whole, x_amz_mp_object_size="4")
    assert (done.status, f"<ChecksumCRC32>{whole}<" in done.body.decode()) == (200, True)


def listed(sim: Simulator, target: str, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the texts of all elements of a name in a document, and the other texts by name."""
    root = ElementTree.fromstring(ask(sim.s3_endpoint, "GET", target).body)
    found = [element.text or "" for element in root.findall(f".//{{*}}{name}")]
    return found, {e.tag.rpartition("}")[2]: e.text or "" for e in root}


def test_uploads_are_listed_in_pages(sim: Simulator) -> None:
    wanted = [begin(sim, key).partition("=")[2] for key in ("a", "b", "b", "b", "c")]
    begin(sim, "other")
    found, markers, pages = [], "", 0
    while True:
        target = f"/bucket?uploads&max-uploads=2{markers}"
        ids, rest = listed(sim, target, "UploadId")
        found += ids
        pages += 1
        if rest["IsTruncated"] == "false":
            break
        markers = f"&key-marker={rest['NextKeyMarker']}"
        markers += f"&upload-id-marker={rest['NextUploadIdMarker']}"
    assert (found[:5], pages) == (wanted, 3)
    assert listed(sim, "/bucket?uploads&key-marker=b", "Key")[0] == ["c", "other"]
    assert listed(sim, "/bucket?uploads&prefix=b", "Key")[0] == ["b"] * 3


def test_an_object_is_not_copied_to_itself_without_a_change(sim: Simulator) -> None:
    send(sim, "PUT", "a", b"body", x_amz_meta_a="1")
    where = {"x_amz_copy_source": "/bucket/a"}
    assert send(sim, "PUT", "a", **where).code == "InvalidRequest"
    answer = send(sim, "PUT", "a", x_amz_metadata_directive="REPLACE", x_amz_meta_a="2", **where)
    assert answer.status == 200
    assert send(sim, "GET", "a").headers["x-amz-meta-a"] == "2"
