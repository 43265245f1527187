"""The documents of Orbax, and trees grown of them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.foreign.foreign_tree import (
    EMPTY_NAMEDTUPLE,
    nest,
    structure_of,
)
from asyncckpt.format.foreign.orbax_read import (
    StepMetadata,
    TreeEntry,
    decode_array_metadatas,
    decode_checkpoint_metadata,
    decode_metadata,
    find_string,
    numbers,
    parse_document,
)
from asyncckpt.tree import unflatten


def metadata(*entries: Any, **more: Any) -> bytes:
    tree = {str(number): entry for number, entry in enumerate(entries)}
    return json.dumps({"tree_metadata": tree, **more}).encode()


def entry(*path: str | int, kind: str = "np.ndarray", skip: object = False) -> dict[str, Any]:
    keys = [{"key": str(key), "key_type": 1 if type(key) is int else 2} for key in path]
    return {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": skip}}


def test_entries_have_paths_and_kinds() -> None:
    found = decode_metadata(
        metadata(
            entry("a", 0, "b.c"),
            entry("j", kind="jax.Array"),
            entry("d", kind="Dict", skip=True),
            entry("old", skip=True),
            entry("x", kind="my.Handler"),
            use_zarr3=True,
            custom_metadata=[1],
        ),
        file="_METADATA",
    )
    assert found.entries == (
        TreeEntry(("a", 0, "b.c"), "np.ndarray", False),
        TreeEntry(("j",), "jax.Array", False),
        TreeEntry(("d",), "Dict", False),
        TreeEntry(("old",), "np.ndarray", True),
        TreeEntry(("x",), "my.Handler", False),
    )
    assert [e.name for e in found.entries] == ["a.0.b.c", "j", "d", "old", "x"]
    assert (found.use_ocdbt, found.use_zarr3, found.complete) == (None, True, False)
    assert found.custom == [1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        metadata(tree_metadata=[]),
        metadata(use_ocdbt="yes"),
        metadata({}),
        metadata([]),
        metadata({**entry("a"), "key_metadata": [{"key": "a"}]}),
        metadata({**entry("a"), "key_metadata": [{"key": "a", "key_type": 3}]}),
        metadata({**entry("a"), "key_metadata": [{"key": 1, "key_type": 2}]}),
        metadata({**entry("a"), "key_metadata": 5}),
        metadata({**entry("a"), "value_metadata": {"value_type": 5}}),
        metadata(entry("a", skip="no")),
    ],
)
def test_malformed_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"m.*: the Orbax metadata is damaged"):
        decode_metadata(data, file="m")


def test_every_truncation_of_metadata_is_refused() -> None:
    data = metadata(entry("a"), entry("b", 0), custom_metadata={"x": "y"})
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode_metadata(data[:length], file="m")


def test_a_document_is_refused_before_it_is_parsed_where_it_is_mostly_brackets() -> None:
    data = b"[" + b"{}," * 400_000 + b"{}]"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="it has 800002 values"):
            parse_document(data, "the document", file="m")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(parse_document(b"[" + b"1," * 9999 + b"1]", "the document", file="m")) == 10_000


@pytest.mark.parametrize("data", [b"[" * 300 + b"]" * 300, b"[" * 100_000, b'{"a":' * 300 + b"1"])
def test_a_deep_document_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="the document is damaged"):
        parse_document(data, "the document", file="m")


@pytest.mark.parametrize(
    ("document", "name", "found"),
    [
        ({"a.b": "x"}, "a.b", "x"),
        ({"a": {"b": "x"}}, "a/b", "x"),
        ({"a/b": "x"}, "a~1b", "x"),
        ({"~": "x"}, "~0", "x"),
        ({"": "x"}, "", "x"),
        ({"a": 5}, "a", None),
        ({"a": "x"}, "a/b", None),
        ([], "a", None),
    ],
)
def test_strings_are_found_by_json_pointers(document: Any, name: str, found: str | None) -> None:
    assert find_string(document, name) == found


def array_metadata(name: object, extra: object) -> dict[str, Any]:
    return {"array_metadata": {"param_name": name, "ext_metadata": extra}}


def test_implementations_of_keys_are_found() -> None:
    rows = [array_metadata("a", None), array_metadata("k", {"random_key_impl": "threefry2x32"})]
    data = json.dumps({"array_metadatas": rows}).encode()
    assert decode_array_metadatas(data, file="m") == {"k": "threefry2x32"}
    assert decode_array_metadatas(b"not read at all", file="m") == {}


@pytest.mark.parametrize(
    "row",
    [
        {},
        [],
        array_metadata(5, {"random_key_impl": "rbg"}),
        array_metadata("k", {"random_key_impl": 5}),
        array_metadata("k", {"random_key_impl": "a/b"}),
        array_metadata("k", {"random_key_impl": "x" * 65}),
        array_metadata("k", ["random_key_impl"]),
    ],
)
def test_malformed_array_metadata_is_refused(row: object) -> None:
    data = json.dumps({"array_metadatas": [row, "random_key_impl"]}).encode()
    with pytest.raises(CorruptCheckpointError, match=r"m.*: the array metadata is damaged"):
        decode_array_metadatas(data, file="m")


def test_a_step_has_handlers_metrics_and_a_time() -> None:
    document = {
        "item_handlers": {"a": "x.PyTreeHandler", "b": None},
        "metrics": {"loss": 0.5, "n": 3, "note": "x", "flag": True, "huge": 10**400},
        "custom_metadata": {"k": [1]},
        "commit_timestamp_nsecs": 17,
    }
    found = decode_checkpoint_metadata(json.dumps(document).encode(), file="m")
    expected = StepMetadata({"a": "x.PyTreeHandler"}, {"loss": 0.5, "n": 3.0}, {"k": [1]}, 17)
    assert found == expected
    assert decode_checkpoint_metadata(b"{}", file="m") == StepMetadata()
    for time in (-1, 1 << 63):  # unknown, rather than one that no calendar has
        document = {"commit_timestamp_nsecs": time}
        data = json.dumps(document).encode()
        assert decode_checkpoint_metadata(data, file="m") == StepMetadata()
    assert decode_checkpoint_metadata(b'{"item_handlers": "h"}', file="m").handlers == {"": "h"}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"item_handlers": 5},
        {"metrics": []},
        {"custom_metadata": 5},
        {"commit_timestamp_nsecs": "now"},
        {"commit_timestamp_nsecs": True},
    ],
)
def test_malformed_steps_are_refused(document: object) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"m.*: the checkpoint metadata is damaged"):
        decode_checkpoint_metadata(json.dumps(document).encode(), file="m")


def test_only_numbers_are_metrics() -> None:
    assert numbers({"a": 1, "b": 0.5, "c": "x", "d": False, "e": None}) == {"a": 1.0, "b": 0.5}
    assert numbers([1]) == {}


# ------------------------------------------------------------------------------------------- trees


def grown(*paths: tuple[str | int, ...]) -> Any:
    return nest(paths, ["/".join(map(str, path)) for path in paths], strict=True)


def test_a_tree_grows_leaf_by_leaf_in_any_order() -> None:
    structure, leaves = structure_of(grown(("b", 1, "x"), ("a",), ("b", 0)))
    assert unflatten(structure, leaves) == {"b": ["b/0", {"x": "b/1/x"}], "a": "a"}
    assert structure.paths() == ["b/0", "b/1/x", "a"]


def test_the_root_may_be_a_list() -> None:
    assert grown((1,), (0, "a")) == [{"a": "0/a"}, "1"]
    assert nest([(0,)], ["torch nests state dicts"]) == {0: "torch nests state dicts"}


def test_a_leaf_may_be_the_tree() -> None:
    assert grown(()) == ""
    structure, leaves = structure_of("leaf")
    assert unflatten(structure, leaves) == "leaf"


def test_a_tree_without_leaves_is_a_dict() -> None:
    assert nest([], []) == nest([], [], strict=True) == {}


def test_the_structure_is_one_that_a_record_could_hold() -> None:
    root = grown(("a", "b", 0, "c"), ("a", "d"), ("e", 0), ("e", 1))
    root |= {"f": None, "g": (), "h": EMPTY_NAMEDTUPLE, "i": [{}, (1,)]}
    structure, leaves = structure_of(root)
    assert type(structure).from_json(structure.to_json()) == structure
    assert [node.kind for node in structure.nodes[-6:]] == [
        "none", "tuple", "namedtuple", "list", "dict", "tuple",
    ]  # fmt: skip
    assert len(leaves) == 5


@pytest.mark.parametrize(
    ("paths", "reason"),
    [
        ([("a",), ("a",)], "there twice"),
        ([("a",), ("a", "b")], "both a leaf and a container"),
        ([("a", "b"), ("a",)], "both a leaf and a container"),
        ([("a", "b"), ("a", 0)], r"the path \['a'\].* \['b', 0\] .*are not all from 0"),
        ([("a", 1)], "are not all from 0"),
        ([("a",) * 257], "256 containers deep"),
        ([("a",), ()], "it is empty, but there are other leaves"),
    ],
)
def test_trees_that_cannot_be_are_refused(paths: list[tuple[str | int, ...]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        grown(*paths)


def test_values_may_be_trees() -> None:
    value = {"a": [1, 2.5, None, {"b": True}], "c": {}, "d": [], "e": "ö", "f": (b"", ())}
    structure, leaves = structure_of(nest([("x",), ("y", 0)], [value, {}]))
    assert leaves == [1, 2.5, True, "ö", b""]
    assert unflatten(structure, leaves) == {"x": value, "y": [{}]}


def test_a_value_that_is_too_deep_for_a_tree_is_refused() -> None:
    value: Any = 1
    for _ in range(300):
        value = [value]
    with pytest.raises(ValueError, match="containers deep"):
        structure_of(value)
