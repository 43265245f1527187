"""The files for Orbax, as text; tests/interop has Orbax read them."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.format.orbax import (
    OrbaxArrays,
    OrbaxLeaf,
    conflicts,
    encode_files,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
paths = st.lists(st.tuples(text, st.booleans()), min_size=1, max_size=4).map(tuple)


@given(st.lists(paths, unique_by=lambda path: tuple(key for key, _ in path), max_size=6))
def test_metadata_names_every_path_as_a_tuple_of_strings(
    all_paths: list[tuple[tuple[str, bool], ...]],
) -> None:
    leaves = [OrbaxLeaf(path, "np.ndarray", "x") for path in all_paths]
    document = json.loads(encode_files(leaves)["_METADATA"])
    assert document["use_ocdbt"] and document["use_zarr3"]
    for path in all_paths:
        entry = document["tree_metadata"][str(tuple(key for key, _ in path))]
        keys = [(item["key"], item["key_type"] == 1) for item in entry["key_metadata"]]
        assert keys == list(path)
        assert entry["value_metadata"] == {"value_type": "np.ndarray", "skip_deserialize": False}


@given(
    st.lists(st.tuples(text, st.booleans()), max_size=3),
    st.booleans(),
    st.lists(st.one_of(text, st.from_regex(r"[a-z0-9_ .-]*", fullmatch=True)), unique=True),
)
def test_leaves_of_one_container_are_written_as_one_by_one(
    base: list[tuple[str, bool]], in_sequence: bool, keys: list[str]
) -> None:
    kinds = ["np.ndarray" if len(key) % 2 else "scalar" for key in keys]
    one_by_one = []
    for key, kind in zip(keys, kinds, strict=True):
        made = OrbaxLeaf((*base, (key, in_sequence)), kind)  # type: ignore[arg-type]
        one_by_one.append(made)
    names = [made.orbax_name for made in one_by_one]
    group = OrbaxArrays(base, in_sequence, keys, kinds, names)  # type: ignore[arg-type]
    assert encode_files([group]) == encode_files(one_by_one)


def test_a_string_with_the_name_of_a_grouped_array_is_a_conflict() -> None:
    names = ["a.b", "a.c"]
    group = OrbaxArrays((("a", False),), False, ["b", "c"], ["np.ndarray", "scalar"], names)
    assert conflicts([group, leaf("a.c", "string", text="x")]) == ["a.c", "a.c"]
    assert conflicts([group, leaf("a.d", "string", text="x")]) == []


def leaf(name: str, kind: str, **more: object) -> OrbaxLeaf:
    return OrbaxLeaf(((name, False),), kind, **more)  # type: ignore[arg-type]


def test_files_that_nothing_needs_are_not_made() -> None:
    assert list(encode_files([leaf("w", "np.ndarray", array_name="w"), leaf("n", "None")])) == [
        "_METADATA"
    ]
    assert list(encode_files([leaf("w", "jax.Array", array_name="w")])) == ["_METADATA"]


@pytest.mark.parametrize("kind", ["None", "Dict", "List", "Tuple", "NamedTuple"])
def test_empty_containers_are_not_deserialized(kind: str) -> None:
    document = json.loads(encode_files([leaf("x", kind)])["_METADATA"])
    value = document["tree_metadata"]["('x',)"]["value_metadata"]
    assert value == {"value_type": kind, "skip_deserialize": True}


def test_strings_stand_where_a_json_pointer_of_their_name_leads() -> None:
    leaves = [
        leaf("a", "string", text="1"),
        leaf("b/c", "string", text="2"),
        leaf("b/d", "string", text="3"),
        leaf("e~1f", "string", text="4"),
        leaf("g~0", "string", text="5"),
    ]
    assert json.loads(encode_files(leaves)["_strings.json"]) == {
        "a": "1",
        "b": {"c": "2", "d": "3"},
        "e/f": "4",
        "g~": "5",
    }
    assert conflicts(leaves) == []


@pytest.mark.parametrize("name", ["~", "~2", "a~", "~~01", "~~10"])
def test_strings_whose_names_are_no_json_pointers_are_conflicts(name: str) -> None:
    assert conflicts([leaf(name, "string", text="x")]) == [name]


def test_a_hundred_thousand_leaves_take_a_fraction_of_a_second() -> None:
    leaves = [
        OrbaxLeaf(
            (("params", False), (f"layer_{i}", False), ("0", True)),
            "np.ndarray",
            f"params.layer_{i}.0",
        )
        for i in range(100_000)
    ]
    begin = time.process_time()
    assert conflicts(leaves) == []
    data = encode_files(leaves)["_METADATA"]
    assert time.process_time() - begin < 2.0  # measured 0.4 s
    assert len(json.loads(data)["tree_metadata"]) == 100_000
