"""The JSON API of GCS: uploads of each kind, generations, listings, batches, copies."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import pytest

from asyncckpt.format.crc import crc32c
from tests.simulator import Fault, Simulator, simulator
from tests.simulator_tests.asking import Answer, ask

KIB = 1024
OBJECTS = "/storage/v1/b/bucket/o"
UPLOADS = "/upload/storage/v1/b/bucket/o"


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Iterator[Simulator]:
    running.clear()
    yield running
    running.faults.clear()


def insert(sim: Simulator, key: str, body: bytes, query: str = "") -> Answer:
    target = f"{UPLOADS}?uploadType=media&name={quote(key, safe='')}{query}"
    return ask(sim.gcs_endpoint, "POST", target, body)


def read(sim: Simulator, key: str, headers: dict[str, str] | None = None) -> Answer:
    target = f"{OBJECTS}/{quote(key, safe='')}?alt=media"
    return ask(sim.gcs_endpoint, "GET", target, None, headers)


def crc(data: bytes) -> str:
    return base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()


def reason(answer: Answer) -> str:
    found: str = answer.json["error"]["errors"][0]["reason"]
    return found


def test_an_object_has_size_digests_and_a_generation(sim: Simulator) -> None:
    resource = insert(sim, "a/ü b", b"hello").json
    assert (resource["name"], resource["size"], resource["crc32c"]) == (
        "a/ü b",
        "5",
        crc(b"hello"),
    )
    found = ask(sim.gcs_endpoint, "GET", f"{OBJECTS}/{quote('a/ü b', safe='')}").json
    assert found == resource
    answer = read(sim, "a/ü b")
    assert answer.body == b"hello"
    assert answer.headers["x-goog-generation"] == resource["generation"]
    assert answer.headers["x-goog-hash"].split(",")[0] == f"crc32c={crc(b'hello')}"
    again = insert(sim, "a/ü b", b"hello").json
    assert int(again["generation"]) > int(resource["generation"])


def test_ranges_are_served_and_refused(sim: Simulator) -> None:
    insert(sim, "a", b"0123456789")
    part = read(sim, "a", {"Range": "bytes=2-4"})
    assert (part.status, part.body) == (206, b"234")
    assert part.headers["content-range"] == "bytes 2-4/10"
    assert read(sim, "a", {"Range": "bytes=8-99"}).body == b"89"
    assert read(sim, "a", {"Range": "bytes=10-"}).status == 416
    assert read(sim, "none").status == 404
    assert reason(read(sim, "none")) == "notFound"
    missing = ask(sim.gcs_endpoint, "GET", "/storage/v1/b/none/o/a?alt=media")
    assert (missing.status, missing.json["error"]["message"]) == (
        404,
        "The specified bucket does not exist.",
    )


def test_generations_decide_who_writes(sim: Simulator) -> None:
    first = insert(sim, "a", b"1", "&ifGenerationMatch=0")
    assert first.status == 200
    refused = insert(sim, "a", b"2", "&ifGenerationMatch=0")
    assert (refused.status, reason(refused)) == (412, "conditionNotMet")
    generation = first.json["generation"]
    assert insert(sim, "a", b"3", f"&ifGenerationMatch={generation}").status == 200
    assert insert(sim, "a", b"4", f"&ifGenerationMatch={generation}").status == 412
    target = f"{OBJECTS}/a?ifGenerationMatch={generation}"
    assert ask(sim.gcs_endpoint, "DELETE", target).status == 412
    assert ask(sim.gcs_endpoint, "GET", f"{target}&alt=media").status == 412
    assert ask(sim.gcs_endpoint, "DELETE", f"{OBJECTS}/a").status == 204
    assert ask(sim.gcs_endpoint, "DELETE", f"{OBJECTS}/a").status == 404


@pytest.mark.parametrize("line", ["\n", "\r\n"])
@pytest.mark.parametrize("content", [b"", b"body", b"\r\n--x\r\n--x--\r\n", bytes(100_000)])
def test_a_multipart_body_holds_resource_and_content(
    sim: Simulator, line: str, content: bytes
) -> None:
    mark = "==0=="
    resource = json.dumps({"name": "k/ü", "metadata": {"a": "b"}, "crc32c": crc(content)})
    head = f"--{mark}{line}Content-Type: application/json{line}{line}{resource}{line}--{mark}"
    head += f"{line}Content-Type: text/x{line}{line}"
    body = head.encode() + content + f"{line}--{mark}--".encode()
    kind = {"Content-Type": f'multipart/related; boundary="{mark}"'}
    found = ask(sim.gcs_endpoint, "POST", f"{UPLOADS}?uploadType=multipart", body, kind)
    assert found.status == 200
    assert sim.objects() == {"k/ü": content}
    assert (found.json["contentType"], found.json["metadata"]) == ("text/x", {"a": "b"})
    wrong = body.replace(crc(content).encode(), crc(b"other").encode())
    refused = ask(sim.gcs_endpoint, "POST", f"{UPLOADS}?uploadType=multipart", wrong, kind)
    assert refused.status == 400


def begin(sim: Simulator, key: str, query: str = "") -> str:
    target = f"{UPLOADS}?uploadType=resumable&name={key}{query}"
    location = ask(sim.gcs_endpoint, "POST", target, b"{}").headers["location"]
    assert location.startswith(sim.gcs_endpoint)
    parts = urlsplit(location)
    return f"{parts.path}?{parts.query}"


def chunk(sim: Simulator, session: str, content: bytes, said: str) -> Answer:
    return ask(sim.gcs_endpoint, "PUT", session, content, {"Content-Range": f"bytes {said}"})


def test_a_resumable_upload_goes_on_where_it_was(sim: Simulator) -> None:
    data = bytes(range(256)) * 4 * 600
    session = begin(sim, "a")
    assert chunk(sim, session, b"", "*/*").status == 308
    first = chunk(sim, session, data[: 256 * KIB], f"0-{256 * KIB - 1}/*")
    assert (first.status, first.headers["range"]) == (308, f"bytes=0-{256 * KIB - 1}")
    # What is no multiple of 256 KiB is not kept.
    odd = chunk(sim, session, data[256 * KIB : 520 * KIB], f"{256 * KIB}-{520 * KIB - 1}/*")
    assert odd.headers["range"] == f"bytes=0-{512 * KIB - 1}"
    assert chunk(sim, session, b"", "*/*").headers["range"] == f"bytes=0-{512 * KIB - 1}"
    gap = chunk(sim, session, data[520 * KIB :], f"{520 * KIB}-{len(data) - 1}/{len(data)}")
    assert gap.status == 400
    assert sim.objects() == {}
    rest = chunk(sim, session, data[500 * KIB :], f"{500 * KIB}-{len(data) - 1}/{len(data)}")
    assert (rest.status, rest.json["crc32c"]) == (200, crc(data))
    assert sim.objects() == {"a": data}
    assert sim.uploads == []
    kinds = [logged.kind for logged in sim.requests]
    assert kinds.count("query_upload") == 2
    assert kinds[-1] == "complete_upload"


def test_the_lost_answer_of_a_last_chunk_can_be_asked_for(sim: Simulator) -> None:
    session = begin(sim, "a", "&ifGenerationMatch=0")
    sim.faults.append(Fault(kind="complete_upload", status=503, applied=True))
    assert chunk(sim, session, b"body", "0-3/4").status == 503
    for content, said in ((b"", "*/4"), (b"body", "0-3/4")):
        again = chunk(sim, session, content, said)
        assert (again.status, again.json["size"]) == (200, "4")
    assert sim.objects() == {"a": b"body"}


def test_a_resumable_upload_is_decided_at_its_end_and_can_be_cancelled(sim: Simulator) -> None:
    session = begin(sim, "a", "&ifGenerationMatch=0")
    insert(sim, "a", b"winner")
    assert chunk(sim, session, b"loser", "0-4/5").status == 412
    assert [upload.key for upload in sim.uploads] == ["a"]
    assert ask(sim.gcs_endpoint, "DELETE", session).status == 499
    assert ask(sim.gcs_endpoint, "DELETE", session).status == 404
    assert (sim.uploads, sim.objects()) == ([], {"a": b"winner"})
    target = f"{UPLOADS}?uploadType=resumable&name=a&ifGenerationMatch=0"
    assert ask(sim.gcs_endpoint, "POST", target, b"{}").status == 412


def test_listings_have_pages_prefixes_and_offsets(sim: Simulator) -> None:
    keys = ["a", "d/1", "d/2", "d/e/3", "e/é"]
    for key in keys:
        insert(sim, key, b"x")

    def listed(query: str) -> tuple[list[str], list[str]]:
        found, prefixes, token = [], [], ""
        while True:
            page = ask(sim.gcs_endpoint, "GET", f"{OBJECTS}?maxResults=2&{query}{token}").json
            found += [item["name"] for item in page.get("items", [])]
            prefixes += page.get("prefixes", [])
            if "nextPageToken" not in page:
                return found, prefixes
            token = f"&pageToken={quote(page['nextPageToken'], safe='')}"

    assert listed("") == (keys, [])
    assert listed("prefix=d/") == (["d/1", "d/2", "d/e/3"], [])
    assert listed("delimiter=/") == (["a"], ["d/", "e/"])
    assert listed("prefix=d/&delimiter=/") == (["d/1", "d/2"], ["d/e/"])
    assert listed("startOffset=d/2&endOffset=e") == (["d/2", "d/e/3"], [])
    assert listed("prefix=none") == ([], [])
    assert ask(sim.gcs_endpoint, "GET", "/storage/v1/b/none/o").status == 404


def test_a_batch_deletes_and_says_what_came_of_each(sim: Simulator) -> None:
    insert(sim, "a/b", b"x")
    parts = "".join(
        f"\n--==\nContent-Type: application/http\nContent-ID: <id+{at}>\n\n"
        f"{asked} HTTP/1.1\nContent-Type: application/json\n"
        for at, asked in enumerate(
            (f"DELETE {OBJECTS}/a%2Fb", f"DELETE {OBJECTS}/none", f"GET {OBJECTS}")
        )
    )
    kind = {"Content-Type": 'multipart/mixed; boundary="=="'}
    answer = ask(sim.gcs_endpoint, "POST", "/batch/storage/v1", f"{parts}\n--==--".encode(), kind)
    text = answer.body.decode()
    assert [line.split()[1] for line in text.splitlines() if line.startswith("HTTP/")] == [
        "204",
        "404",
        "501",
    ]
    assert "<response-id+1>" in text
    assert sim.objects() == {}


def test_a_batch_has_at_most_100_requests(sim: Simulator) -> None:
    insert(sim, "a", b"x")
    asked = f"\n--==\nContent-Type: application/http\n\nDELETE {OBJECTS}/a HTTP/1.1\n"
    kind = {"Content-Type": 'multipart/mixed; boundary="=="'}
    body = f"{asked * 101}\n--==--".encode()
    assert ask(sim.gcs_endpoint, "POST", "/batch/storage/v1", body, kind).status == 400
    assert sim.objects() == {"a": b"x"}


@pytest.mark.parametrize("query", ["ifMetagenerationMatch=7", "ifSomethingNew=1"])
def test_a_condition_that_is_not_simulated_is_refused(sim: Simulator, query: str) -> None:
    insert(sim, "a", b"x")
    for method in ("DELETE", "GET"):
        answer = ask(sim.gcs_endpoint, method, f"{OBJECTS}/a?{query}")
        assert (answer.status, reason(answer)) == (501, "notImplemented")
    assert ask(sim.gcs_endpoint, "DELETE", f"{OBJECTS}/a/acl/allUsers").status == 405
    assert sim.objects() == {"a": b"x"}


def test_an_object_is_copied(sim: Simulator) -> None:
    insert(sim, "a", b"one")
    target = f"{OBJECTS}/a/rewriteTo/b/bucket/o/c%2Fd"
    assert ask(sim.gcs_endpoint, "POST", target).json["done"] is True
    assert sim.objects() == {"a": b"one", "c/d": b"one"}
    assert ask(sim.gcs_endpoint, "POST", f"{OBJECTS}/z/rewriteTo/b/bucket/o/y").status == 404


@pytest.mark.parametrize("verb", ["rewriteTo", "copyTo"])
def test_a_copy_obeys_the_generations_of_source_and_target(sim: Simulator, verb: str) -> None:
    source = insert(sim, "a", b"new").json["generation"]
    target = insert(sim, "b", b"old").json["generation"]
    where = f"{OBJECTS}/a/{verb}/b/bucket/o/b"
    for query in (
        f"ifGenerationMatch={source}",
        "ifGenerationMatch=0",
        f"ifSourceGenerationMatch={target}",
    ):
        refused = ask(sim.gcs_endpoint, "POST", f"{where}?{query}")
        assert (refused.status, reason(refused)) == (412, "conditionNotMet")
    assert ask(sim.gcs_endpoint, "POST", f"{where}?sourceGeneration={target}").status == 404
    assert sim.objects() == {"a": b"new", "b": b"old"}
    query = f"ifGenerationMatch={target}&ifSourceGenerationMatch={source}"
    assert ask(sim.gcs_endpoint, "POST", f"{where}?{query}").status == 200
    assert sim.objects() == {"a": b"new", "b": b"new"}


def test_a_bucket_is_described_and_never_changed(sim: Simulator) -> None:
    assert ask(sim.gcs_endpoint, "GET", "/storage/v1/b/bucket").json["name"] == "bucket"
    assert ask(sim.gcs_endpoint, "GET", "/storage/v1/b/none").status == 404
    for method, target in (("DELETE", "/bucket"), ("PATCH", "/bucket"), ("POST", "?project=p")):
        assert ask(sim.gcs_endpoint, method, f"/storage/v1/b{target}", b"{}").status == 405
    assert list(sim.buckets) == ["bucket"]


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", f"{UPLOADS}?uploadType=resumable", b"no json"),
        ("POST", f"{UPLOADS}?uploadType=multipart&name=a", b"no parts"),
        ("POST", f"{UPLOADS}?uploadType=media&name=a&ifGenerationMatch=no", b""),
        ("GET", f"{OBJECTS}?maxResults=no", b""),
    ],
)
def test_what_makes_no_sense_is_refused(
    sim: Simulator, method: str, target: str, body: bytes
) -> None:
    answer = ask(sim.gcs_endpoint, method, target, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, 400)
