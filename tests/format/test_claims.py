"""Claims and lists: what is written is read, and damage is noticed."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.format.claim import (
    CLAIM_NBYTES,
    Claim,
    decode_claim,
    decode_inherited,
    encode_claim,
    encode_inherited,
)

CLAIM = Claim(7, "0123456789abcdef" * 2, "node-3", 4711, 1_700_000_000_000_000_000)
SAVE_IDS = ["f" * 32, "0" * 32]


def test_a_claim_is_one_line_of_json_that_ends_with_its_checksum() -> None:
    data = encode_claim(CLAIM)
    assert data.startswith(b'{"format":"asyncckpt-claim","version":1,"epoch":7,"token":"0123')
    assert data.endswith(b'"}\n') and len(data) < CLAIM_NBYTES
    assert decode_claim(data) == CLAIM


def test_a_list_is_sorted() -> None:
    data = encode_inherited(7, SAVE_IDS)
    assert data.startswith(b'{"format":"asyncckpt-inherited","version":1,"epoch":7,"save_ids":["0')
    assert decode_inherited(data, location="") == frozenset(SAVE_IDS)
    assert decode_inherited(encode_inherited(1, []), location="") == frozenset()


@given(st.data())
def test_a_changed_or_cut_document_is_none(data: st.DataObject) -> None:
    for whole, decode in (
        (encode_claim(CLAIM), decode_claim),
        (encode_inherited(7, SAVE_IDS), partial(decode_inherited, location="")),
    ):
        at = data.draw(st.integers(0, len(whole) - 1))
        bit = 1 << data.draw(st.integers(0, 7))
        changed = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        assert decode(changed) is None
        assert decode(whole[:at]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        encode_inherited(7, SAVE_IDS),
        encode_claim(Claim(7, "short", "node-3", 1, 1)),
        encode_claim(Claim(-1, CLAIM.token, "node-3", 1, 1)),
        encode_claim(Claim(7, CLAIM.token, "a\nb", 1, 1)),
    ],
)
def test_what_is_no_claim_is_none(data: bytes) -> None:
    assert decode_claim(data) is None


def test_a_claim_is_no_list() -> None:
    assert decode_inherited(encode_claim(CLAIM), location="") is None
