"""Listings and contents, against the simplest model there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.simulator.state import Content, Digests, State, StoredObject

NAMES = st.text("ab/-", min_size=1, max_size=6)


def listed(
    keys: set[str], prefix: str, delimiter: str, start: str, end: str
) -> tuple[list[str], list[str]]:
    found, prefixes = [], set()
    for key in sorted(keys):
        if key.startswith(prefix) and start <= key and (not end or key < end):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                found.append(key)
    return found, sorted(prefixes)


@given(
    st.sets(NAMES, max_size=20),
    st.sets(NAMES, max_size=5),
    st.text("ab/-", max_size=3),
    st.sampled_from(["", "/"]),
    st.text("ab/", max_size=2),
    st.text("ab/", max_size=2),
    st.integers(1, 5),
)
def test_pages_hold_every_key_and_prefix_once_and_in_order(
    keys: set[str],
    deleted: set[str],
    prefix: str,
    delimiter: str,
    start: str,
    end: str,
    limit: int,
) -> None:
    state = State()
    state.create_bucket("bucket")
    for key in keys:
        state.put("bucket", StoredObject(key, Content(b"x"), Digests("e")))
    for key in deleted:
        state.delete("bucket", key)
    found: list[str] = []
    prefixes: list[str] = []
    after = ""
    while True:
        page = state.list(
            "bucket",
            prefix=prefix,
            delimiter=delimiter,
            after=after,
            start=start,
            end=end,
            limit=limit,
        )
        found += [item.key for item in page.objects]
        prefixes += page.prefixes
        assert len(page.objects) + len(page.prefixes) <= limit
        if page.next is None:
            break
        assert len(page.objects) + len(page.prefixes) == limit
        after = page.next
    assert (found, prefixes) == listed(keys - deleted, prefix, delimiter, start, end)


@given(st.lists(st.binary(max_size=8), max_size=5), st.integers(0, 45), st.integers(0, 45))
def test_slices_of_contents_are_those_of_their_bytes(
    pieces: list[bytes], start: int, stop: int
) -> None:
    content = Content.joined([Content(piece) for piece in pieces])
    whole = b"".join(pieces)
    assert content.nbytes == len(whole)
    assert content.tobytes() == whole
    assert b"".join(content.slices(start, stop)) == whole[start:stop]


@given(st.lists(st.binary(max_size=4), max_size=4), st.integers(-20, 20))
def test_a_flip_changes_one_bit(pieces: list[bytes], offset: int) -> None:
    content = Content(*(bytearray(piece) for piece in pieces))
    whole = bytearray(b"".join(pieces))
    content.flip(offset)
    if whole:
        whole[offset % len(whole)] ^= 1
    assert content.tobytes() == whole
