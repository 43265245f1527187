"""Errors travel between processes unchanged."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncckpt
from asyncckpt.coordinators.messages import CLASSES, ERROR_NBYTES, decode_error, encode_error
from asyncckpt.errors import (
    AsyncCheckpointError,
    CorruptCheckpointError,
    SaveAbortedError,
    SaveError,
    SaveOutcomeUnknownError,
    ShapeMismatchError,
    StoreError,
)
from asyncckpt.flow.threads import ThreadAbandonedError


def sent(error: BaseException, stage: str | None = None) -> AsyncCheckpointError:
    return decode_error(encode_error(error, process=2, host="node-7", stage=stage))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_arrives_as_its_own_class(name: str) -> None:
    kind = CLASSES[name]
    assert kind is getattr(asyncckpt, name)
    error = kind(
        "params/w: odd", path="params/w", stage="stage", location="/run/1", expected=(2, 3), found=5
    )
    arrived = sent(error, "upload")
    assert type(arrived) is kind
    assert str(arrived) == "process 2 (node-7): params/w: odd"
    assert (arrived.path, arrived.stage, arrived.location) == ("params/w", "stage", "/run/1")
    assert (arrived.expected, arrived.found) == ("(2, 3)", "5")
    assert (arrived.process, arrived.host) == (2, "node-7")


def test_what_only_some_errors_have_arrives_too() -> None:
    store = sent(StoreError("x", retryable=True))
    assert isinstance(store, StoreError)
    assert store.retryable
    save = sent(SaveError("x", visible=True, durable=True))
    assert isinstance(save, SaveError)
    assert (save.visible, save.durable) == (True, True)
    corrupt = sent(CorruptCheckpointError("x", file="d/0", offset=7))
    assert isinstance(corrupt, CorruptCheckpointError)
    assert (corrupt.file, corrupt.offset) == ("d/0", 7)


def test_a_stage_is_added_where_the_error_has_none() -> None:
    assert sent(SaveError("x"), "upload").stage == "upload"
    assert sent(SaveError("x")).stage is None


def test_errors_of_python_become_save_errors() -> None:
    arrived = sent(ValueError("bad value"), "stage")
    assert type(arrived) is SaveError
    assert str(arrived) == "process 2 (node-7): ValueError: bad value"
    assert arrived.stage == "stage"


@pytest.mark.parametrize("error", [ValueError("bad value"), ShapeMismatchError("bad value")])
def test_notes_such_as_the_path_of_a_leaf_arrive_too(error: Exception) -> None:
    error.add_note("leaf_options was called for 'params/w'")
    assert str(sent(error)).endswith("bad value\nleaf_options was called for 'params/w'")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_cancellation_is_an_abort_elsewhere(error: BaseException) -> None:
    assert type(sent(error)) is SaveAbortedError


def test_an_error_of_a_private_class_arrives_as_its_public_base() -> None:
    assert type(sent(ThreadAbandonedError("stuck"))) is SaveError


def test_an_error_that_is_passed_on_keeps_its_process() -> None:
    first = sent(ShapeMismatchError("w: odd"))
    again = decode_error(encode_error(first, process=0, host="node-0"))
    assert str(again) == str(first) == "process 2 (node-7): w: odd"
    assert (again.process, again.host) == (2, "node-7")


@given(
    st.text() | st.just("\0" * 100_000) | st.just("ä" * 100_000),
    st.text() | st.just("\ud800" * 100_000),
)
def test_messages_are_small_whatever_the_texts(text: str, path: str) -> None:
    data = encode_error(
        SaveError(text, path=path, location=path, expected=path, found=text), process=1, host="h"
    )
    assert 0 < len(data) <= ERROR_NBYTES
    arrived = decode_error(data)
    assert str(arrived).startswith("process 1 (h): ")
    assert str(arrived)[:200] == f"process 1 (h): {text}"[:200]


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_value_without_a_text_does_not_hide_the_error() -> None:
    assert str(sent(SaveError("x", found=Broken())).found).startswith("<Broken instance at ")
    assert "Broken" not in str(sent(SaveError("x", found=Broken())))


@given(st.binary() | st.recursive(st.none() | st.text(), st.lists).map(lambda v: json.dumps(v)))
def test_an_unreadable_message_is_still_an_error(data: bytes | str) -> None:
    arrived = decode_error(data if isinstance(data, bytes) else data.encode())
    assert type(arrived) is SaveError
    assert "cannot be read" in str(arrived)


def test_an_unknown_class_becomes_a_save_error() -> None:
    fields = json.loads(encode_error(SaveError("x"), process=1, host="h"))
    for kind in ("OfALaterRelease", "_DamagedFileError", "Exception"):
        arrived = decode_error(json.dumps({**fields, "kind": kind}).encode())
        assert type(arrived) is SaveError
        assert str(arrived) == "process 1 (h): x"


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_can_be_pickled(name: str) -> None:
    """torch.distributed.checkpoint sends the errors of its plug-ins this way."""
    error = CLASSES[name]("text", path="w", stage="stage", location="/x", expected=1, found=(2,))
    error.process, error.host, error.written = 3, "h", ("a",)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CLASSES[name]
    assert str(copy) == "text"
    assert vars(copy) == vars(error)


def test_an_unknown_outcome_is_a_failed_save() -> None:
    assert issubclass(SaveOutcomeUnknownError, SaveError)
    assert asyncckpt.SaveOutcomeUnknownError is SaveOutcomeUnknownError
