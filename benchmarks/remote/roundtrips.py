"""Number of successive round trips of a commit, read from the log of the service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

DATA = ("put_object", "put_part", "complete_upload")
"""Kinds of requests that bring data."""


class Commit(NamedTuple):
    """Requests that followed the last acknowledged byte of data.

    Attributes:
        to_record: requests that waited for one another until the record stood, itself included.
        to_end: the same until the last request of the save, fixed names included.
        record_s: seconds from the last acknowledgement to that of the record, on the service's
            clock.
        end_s: the same to the last one.
    """

    to_record: int
    to_end: int
    record_s: float
    end_s: float


def commit(log: Iterable[Mapping[str, Any]], *, record: str, data: str) -> Commit | None:
    """Find the commit of one save in its log; None where it wrote no record or no data.

    Args:
        log: entries of the log of requests, as dictionaries.
        record: how the key of the record ends.
        data: what the keys of data have in them, and no others.
    """
    done = [entry for entry in log if entry["ended_s"] and 200 <= entry["status"] < 300]
    payload = [e for e in done if e["kind"] in DATA and data in e["key"]]
    records = [e for e in done if e["kind"] == "put_object" and e["key"].endswith(record)]
    if not payload or not records:
        return None
    sent = max(entry["ended_s"] for entry in payload)
    after = [entry for entry in done if entry["began_s"] >= sent]
    stood = records[-1]["ended_s"]
    end = max((entry["ended_s"] for entry in after), default=stood)
    until = [entry for entry in after if entry["ended_s"] <= stood]
    return Commit(chain(until), chain(after), stood - sent, end - sent)


def chain(entries: Iterable[Mapping[str, Any]]) -> int:
    """Return the longest chain of requests, each begun after the one before had ended."""
    count, free = 0, float("-inf")
    for entry in sorted(entries, key=lambda entry: entry["ended_s"]):
        if entry["began_s"] >= free:
            count, free = count + 1, entry["ended_s"]
    return count
