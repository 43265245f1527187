"""Which stored paths are safe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.format.damage import path_fault


@pytest.mark.parametrize(
    "path", ["d/data", "a", "ocdbt.process_0/d/x", "é/…", ".hidden", "a b", "..."]
)
def test_plain_relative_paths_are_safe(path: str) -> None:
    assert path_fault(path) is None


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is absolute"),
        ("..", "has a part '..'"),
        ("a/../b", "has a part '..'"),
        ("./a", "has a part '.'"),
        ("a//b", "has an empty part"),
        ("a/", "has an empty part"),
        ("a\\b", "has a backslash"),
        ("a\0", "has a control character"),
        ("a\x7f", "has a control character"),
        ("a\n", "has a control character"),
        ("\ud800", "is not valid Unicode"),
        ("a" * 4097, "is longer than 4096 bytes"),
    ],
)
def test_unsafe_paths_say_why(path: str, reason: str) -> None:
    assert path_fault(path) == reason


@given(st.text())
def test_a_safe_path_stays_below_its_directory(path: str) -> None:
    if path_fault(path) is None:
        assert not {"", ".", ".."} & set(path.split("/"))
        assert path.encode()
