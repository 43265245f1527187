"""Timelines: merging of many spans, and output formats."""

from __future__ import annotations

import json
import random
import struct
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt import Span, Timeline
from asyncckpt.cli.tables import gantt
from asyncckpt.errors import UsageError
from asyncckpt.flow.recorder import Recorder
from asyncckpt.format.crc import crc32c
from asyncckpt.format.stored_timeline import (
    MAX_TIMELINE_NBYTES,
    decode_timeline,
    encode_timeline,
)
from asyncckpt.reports.picture import draw
from asyncckpt.reports.timed import trace_document
from asyncckpt.reports.timeline import LANES_PER_STAGE, SPANS_PER_STAGE

Rows = list[tuple[float, float, int]]


def recorded(rows: Rows, stage: str = "upload", process: int = 0) -> Recorder:
    recorder = Recorder(0.0, process)
    for start, end, nbytes in sorted(rows, key=lambda row: row[1]):
        recorder.add(stage, start, nbytes, end)
    return recorder


def many(count: int, at_a_time: int, seed: int = 0) -> Rows:
    rng = random.Random(seed)
    return [
        (start := i / at_a_time + rng.random(), start + 2 * rng.random(), rng.randrange(1 << 20))
        for i in range(count)
    ]


def check_lanes(timeline: Timeline) -> None:
    lanes: dict[tuple[str, int, int], list[Span]] = {}
    for span in timeline.spans:
        lanes.setdefault((span.stage, span.process, span.lane), []).append(span)
    for spans in lanes.values():
        assert all(one.end_s <= other.start_s for one, other in pairwise(spans))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 5), st.integers(0, 1 << 40)),
        min_size=1,
        max_size=700,
    )
)
def test_begin_end_and_bytes_of_a_stage_stay_exact(parts: list[tuple[float, float, int]]) -> None:
    rows = [(start, start + length, nbytes) for start, length, nbytes in parts]
    timeline = recorded(rows).timeline()
    whole = timeline.stages()["upload"]
    assert whole.start_s == min(start for start, _, _ in rows)
    assert whole.end_s == max(end for _, end, _ in rows)
    assert whole.nbytes == sum(nbytes for _, _, nbytes in rows)
    assert len(timeline.spans) <= SPANS_PER_STAGE
    assert whole.lanes <= LANES_PER_STAGE
    check_lanes(timeline)


@pytest.mark.parametrize("at_a_time", [1, 8, 500])
def test_a_hundred_thousand_spans_take_no_more_room_than_a_few_hundred(at_a_time: int) -> None:
    recorder = recorded(many(20_000, at_a_time))
    assert len(recorder.timeline().spans) <= SPANS_PER_STAGE
    assert sum(map(len, recorder._stages["upload"])) <= SPANS_PER_STAGE
    check_lanes(recorder.timeline())


def test_few_spans_are_kept_as_they_are_in_as_few_lanes_as_overlap() -> None:
    rows = [(0.0, 1.0, 5), (0.5, 2.0, 6), (1.0, 3.0, 7), (2.5, 4.0, 8)]
    spans = recorded(rows).timeline().spans
    assert [(s.start_s, s.end_s, s.nbytes) for s in spans] == rows
    assert [s.lane for s in spans] == [0, 1, 0, 1]


def test_busy_seconds_count_overlapping_spans_once_and_gaps_not_at_all() -> None:
    timeline = recorded([(0.0, 1.0, 0), (0.5, 2.0, 0), (3.0, 4.0, 0)]).timeline()
    assert timeline.stages()["upload"].busy_s == 3.0
    assert timeline.end_s == 4.0


def test_threads_record_at_the_same_time() -> None:
    recorder = Recorder()

    def work() -> None:
        for _ in range(2000):
            recorder.add("stage", recorder.begun, 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.timeline().stages()["stage"].nbytes == 4 * 2000 * 3


def test_a_span_that_goes_on_is_seen_until_now_and_one_that_fails_never() -> None:
    recorder = Recorder()
    with recorder.span("upload", 5), recorder.span("upload", 7):
        running = recorder.timeline()
        assert running.stages()["upload"].nbytes == 12
        assert running.stages()["upload"].lanes == 2
    ended = recorder.timeline()
    assert ended.stages()["upload"].nbytes == 12 and ended.end_s > running.end_s
    with pytest.raises(ZeroDivisionError), recorder.span("index"):
        raise ZeroDivisionError
    assert recorder.timeline() == ended and not recorder._running


# ------------------------------------------------------------------------------ several processes


def two_processes() -> Timeline:
    other = Timeline.from_rows(recorded(many(50, 4, 1), process=1).timeline().rows(1))
    return recorded(many(30, 4)).timeline().joined([other])


def test_another_process_is_one_span_per_stage() -> None:
    timeline = two_processes()
    assert timeline.processes() == [0, 1]
    (other,) = [span for span in timeline.spans if span.process == 1]
    rows = many(50, 4, 1)
    assert other.nbytes == sum(nbytes for _, _, nbytes in rows)
    assert other.start_s == pytest.approx(min(row[0] for row in rows), abs=1e-6)
    assert other.end_s == pytest.approx(max(row[1] for row in rows), abs=1e-6)
    assert timeline.stages()["upload"].nbytes == sum(row[2] for row in many(30, 4))


@pytest.mark.parametrize(
    "row",
    [
        None,
        "upload",
        ["upload", 0, 5, 4, 1],
        ["upload", 0, -1, 4, 1],
        ["upload", -1, 0, 4, 1],
        ["upload", 0, 0, 4, -1],
        ["upload", 0, 0, 1 << 60, 1],
        ["upload", 0, 0.5, 4, 1],
        [7, 0, 0, 4, 1],
        ["upload", 0, 0, 4],
    ],
)
def test_rows_of_another_form_are_refused(row: Any) -> None:
    with pytest.raises(ValueError, match="is not a span"):
        Timeline.from_rows([["stage", 0, 0, 1, 1], row])


# ---------------------------------------------------------------------------------- as it is kept


def test_a_stored_timeline_is_small_and_keeps_each_stage() -> None:
    recorder = recorded(many(5000, 16))
    for stage in ("stage", "serialize", "index"):
        recorder.add(stage, 1.25, 7, 2.5)
    timeline = recorder.timeline()
    data = encode_timeline(timeline)
    assert 1000 < len(data) <= MAX_TIMELINE_NBYTES
    found = decode_timeline(b"before" + data)
    assert found is not None and found.process == 0
    for stage, whole in timeline.stages().items():
        stored = found.stages()[stage]
        assert stored.nbytes == whole.nbytes
        assert stored.start_s == pytest.approx(whole.start_s, abs=1e-6)
        assert stored.end_s == pytest.approx(whole.end_s, abs=1e-6)
    assert found.stages()["upload"].lanes > 1


def test_of_a_thousand_processes_the_first_ones_are_stored() -> None:
    own = recorded(many(40, 4)).timeline()
    others = [recorded(many(3, 2, i), process=i).timeline() for i in range(1, 1000)]
    data = encode_timeline(own.joined(others))
    assert len(data) <= MAX_TIMELINE_NBYTES
    found = decode_timeline(data)
    assert found is not None
    assert found.processes() == [*range(len(found.processes()))] and len(found.processes()) > 5
    assert found.stages()["upload"].nbytes == own.stages()["upload"].nbytes


def test_an_empty_timeline_is_not_stored() -> None:
    assert encode_timeline(Timeline()) == b""
    assert decode_timeline(b"") is None
    assert decode_timeline(b"an index without a timeline") is None


def test_a_damaged_timeline_is_none_at_all() -> None:
    data = encode_timeline(two_processes())
    assert decode_timeline(data) is not None
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        assert decode_timeline(bytes(damaged)) is None
    assert decode_timeline(data[5:]) is None
    for text in (b"[]", b"{}", b'{"process":1e999,"spans":[]}', b'{"process":0,"spans":[7]}'):
        resealed = text + struct.pack("<II4s", len(text), crc32c(text), b"ACKT")
        assert decode_timeline(resealed) is None


@pytest.mark.parametrize(
    "text",
    [b"[]", b"{}", b"7", b'{"process":0,"spans":7}', b'{"process":"x","spans":[]}', b"{", b"\xff"],
)
def test_a_sealed_document_of_another_form_is_none_at_all(text: bytes) -> None:
    from asyncckpt.format.crc import crc32c

    tail = len(text).to_bytes(4, "little") + crc32c(text).to_bytes(4, "little") + b"ACKT"
    assert decode_timeline(text + tail) is None


# -------------------------------------------------------------------------- traces and pictures


def test_a_trace_has_what_the_format_requires() -> None:
    timeline = two_processes()
    document = json.loads(json.dumps(trace_document(timeline, "a title")))
    assert document["otherData"] == {"title": "a title"}
    events = document["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M")
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= event.keys()
        assert all(type(event[key]) is int for key in ("pid", "tid"))
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    for event, span in zip(complete, timeline.spans, strict=True):
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=1e-2)
        assert event["dur"] == pytest.approx((span.end_s - span.start_s) * 1e6, abs=1e-2)
        assert event["args"]["nbytes"] == span.nbytes and "/s" in event["args"]["rate"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} == named
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1}
    # Slices of one thread must not overlap: viewers would nest them.
    ends: dict[tuple[int, int], float] = {}
    for event in complete:
        place = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(place, 0.0) - 0.01
        ends[place] = event["ts"] + event["dur"]


@pytest.mark.parametrize("timeline", [two_processes(), recorded(many(999, 9)).timeline()])
def test_a_picture_can_be_read(tmp_path: Path, timeline: Timeline) -> None:
    from matplotlib.image import imread

    draw(timeline, tmp_path / "a.png", "a title", 0.1)
    height, width, _ = imread(tmp_path / "a.png").shape
    assert width > 600 and height > 100
    draw(timeline, str(tmp_path / "a.SVG"))
    assert "<svg" in (tmp_path / "a.SVG").read_text()


def test_a_picture_of_nothing_and_of_many_processes_is_drawn(tmp_path: Path) -> None:
    draw(Timeline(), tmp_path / "nothing.png")
    others = [recorded(many(2, 2, i), process=i).timeline() for i in range(40)]
    draw(Timeline().joined(others), tmp_path / "many.svg")
    assert "24 more processes" in (tmp_path / "many.svg").read_text()


def test_a_picture_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pass a name in \.png or \.svg"):
        draw(two_processes(), tmp_path / "a.jpg")
    assert not list(tmp_path.iterdir())


def test_a_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r'pip install "asyncckpt\[plot\]"'):
        draw(two_processes(), tmp_path / "a.png")


def test_bars_show_the_share_of_the_time_in_which_a_stage_was_busy() -> None:
    recorder = recorded([(0.0, 0.5, 100), (0.25, 0.5, 100), (0.75, 1.0, 100)])
    recorder.add("index", 1.0, 0, 2.0)
    grid = gantt(recorder.timeline(), None)
    bars = {row[0]: row[1] for row in grid.rows}
    assert bars["upload"] == "█" * 12 + " " * 6 + "█" * 6 + " " * 24
    assert bars["index"] == " " * 24 + "█" * 24
    assert [row[-1] for row in grid.rows] == ["400 B/s", ""]
    names = [row[0] for row in gantt(two_processes(), 80).rows]
    assert names == ["upload (0)", "upload (1)"]
