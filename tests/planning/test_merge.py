"""Schemas of several processes become one, or an error that names path and processes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import (
    DtypeMismatchError,
    MismatchError,
    ShapeMismatchError,
    TreeMismatchError,
)
from asyncckpt.options import LeafOptions
from asyncckpt.planning.merge import Merged, merge_schemas, own_part
from asyncckpt.planning.schema import Schema, SchemaLeaf
from asyncckpt.spec import ArraySpec, Box, Partition, Shard
from asyncckpt.tree import PerProcess, PerProcessNodes, flatten

SPEC = ArraySpec((10, 6), "float32")
ARRAY = SchemaLeaf("numpy", SPEC)


class Held:
    """Keeps a `SchemaLeaf`, which is a dataclass, from being flattened."""

    def __init__(self, leaf: SchemaLeaf) -> None:
        self.leaf = leaf


def held(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: held(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([held(value) for value in tree])
    return Held(tree)


def schema(tree: Any, **options: Any) -> Schema:
    """A schema of a tree whose leaves are `SchemaLeaf`."""
    flat = flatten(held(tree))
    return Schema(flat.structure, tuple(leaf.leaf for leaf in flat.leaves), options)


def merge(*trees: Any, tree: Literal["union", "same"] = "union") -> Merged:
    return merge_schemas({process: schema(each) for process, each in enumerate(trees)}, tree)


def owners(merged: Merged) -> dict[str, tuple[int, ...]]:
    return {leaf.path: leaf.processes for leaf in merged.leaves}


def test_equal_schemas_are_merged_to_the_same() -> None:
    tree = {"a": ARRAY, "b": [SchemaLeaf("int"), {}]}
    merged = merge(tree, tree, tree)
    assert merged.structure == flatten(held(tree)).structure
    assert owners(merged) == {"a": (0, 1, 2), "b/0": (0, 1, 2)}
    # A set of processes is one object: thousands of leaves have it.
    assert merged.leaves[0].processes is merged.leaves[1].processes


def test_dicts_are_united_in_the_order_of_the_lowest_process() -> None:
    merged = merge(
        {"z": ARRAY, "stages": {"1": ARRAY}},
        {"stages": {"0": ARRAY, "1": ARRAY}, "z": ARRAY, "a": {}},
        {"new": ARRAY},
    )
    assert owners(merged) == {"z": (0, 1), "stages/1": (0, 1), "stages/0": (1,), "new": (2,)}
    assert list(owners(merged)) == ["z", "stages/1", "stages/0", "new"]
    assert merged.structure.node_paths() == ["", "stages", "a"]
    assert merged.leaves[0].processes is merged.leaves[1].processes
    assert [list(merged.ordinals[p]) for p in range(3)] == [[0, 1], [2, 1, 0], [3]]


def test_keys_that_look_alike_stay_apart() -> None:
    merged = merge({1: ARRAY}, {"1": ARRAY})
    assert owners(merged) == {"1": (0,), "%31": (1,)}


Trees = st.recursive(
    st.just(ARRAY), lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.just(ARRAY)), min_size=1, max_size=5))
def test_every_leaf_of_every_process_is_in_the_merged_tree(trees: list[dict[str, Any]]) -> None:
    merged = merge(*trees)
    for path, processes in owners(merged).items():
        assert processes == tuple(p for p, tree in enumerate(trees) if path in tree)
    assert set(owners(merged)) == {key for tree in trees for key in tree}
    for process, tree in enumerate(trees):
        paths = flatten(held(tree)).paths
        assert [merged.leaves[n].path for n in merged.ordinals[process]] == paths


@given(st.lists(Trees, min_size=2, max_size=4))
def test_all_processes_come_to_one_result(trees: list[Any]) -> None:
    def outcome() -> object:
        try:
            return merge(*trees)
        except TreeMismatchError as error:
            return str(error)

    first, second = outcome(), outcome()
    assert first == second


def differences() -> dict[str, tuple[Any, Any, type[MismatchError], str]]:
    rows = SchemaLeaf("jax", SPEC, partition=Partition((5, 6), "rows", (0, 1)))
    return {
        "shape": (
            {"w": ARRAY},
            {"w": dataclasses.replace(ARRAY, spec=ArraySpec((10, 7), "float32"))},
            ShapeMismatchError,
            r"w: \(10, 6\) on process 0, \(10, 7\) on process 1",
        ),
        "dtype": (
            {"w": ARRAY},
            {"w": dataclasses.replace(ARRAY, spec=ArraySpec((10, 6), "int8"))},
            DtypeMismatchError,
            r"w: float32 on process 0, int8 on process 1",
        ),
        "kind": (
            {"w": SchemaLeaf("int")},
            {"w": SchemaLeaf("float")},
            DtypeMismatchError,
            r"w: int on process 0, float on process 1",
        ),
        "scalar": ({"w": SchemaLeaf("int")}, {"w": ARRAY}, DtypeMismatchError, r"int .* numpy"),
        "options": (
            {"w": ARRAY},
            {"w": dataclasses.replace(ARRAY, options=LeafOptions(compression="zstd"))},
            MismatchError,
            r"w: leaf_options=None on process 0, leaf_options=LeafOptions\(.*zstd.* on process 1",
        ),
        "facts": (
            {"w": dataclasses.replace(ARRAY, extra='{"a":1}')},
            {"w": ARRAY},
            MismatchError,
            r'w: {"a":1} on process 0, no facts on process 1',
        ),
        "layout": (
            {"w": rows},
            {"w": dataclasses.replace(rows, partition=Partition((5, 3), "both", (0, 1)))},
            MismatchError,
            r"w: shards of \(5, 6\) on processes 0, 1; shards of \(5, 3\) on processes 0, 1: all",
        ),
        "mesh": (
            {"w": rows, "x": ARRAY},
            {"x": ARRAY},
            MismatchError,
            r"w: the mesh on process 0 includes process 1, whose tree has no such leaf",
        ),
        "divided and whole": ({"w": rows}, {"w": ARRAY}, MismatchError, r"divided over .* whole"),
        "lengths": ([ARRAY], [ARRAY, ARRAY], TreeMismatchError, r"process 1 has an entry 1 here"),
        "containers": (
            {"a": [ARRAY]},
            {"a": (ARRAY,)},
            TreeMismatchError,
            r"a: process 0 has a list here, process 1 has a tuple",
        ),
        "leaf and container": (
            {"a": {"b": ARRAY}},
            {"a": ARRAY},
            TreeMismatchError,
            r"a: process 1 has a leaf here, process 0 has a container",
        ),
        "root": (ARRAY, [ARRAY], TreeMismatchError, r"the tree itself: process 0 has a leaf"),
    }


@pytest.mark.parametrize("name", differences())
def test_differences_name_path_and_processes(name: str) -> None:
    one, other, kind, text = differences()[name]
    with pytest.raises(kind, match=text) as caught:
        merge(one, other)
    assert type(caught.value) is kind
    assert caught.value.stage == "plan" and caught.value.path is not None


def test_other_trees_are_refused_where_they_must_be_the_same() -> None:
    merge({"a": ARRAY, "b": ARRAY}, {"b": ARRAY, "a": ARRAY}, tree="same")
    with pytest.raises(
        TreeMismatchError,
        match=r"m: process 2 has an entry 'v' here, process 0 has none; .*tree=\"union\"",
    ) as caught:
        one = {"m": {"u": ARRAY}}
        merge(one, one, {"m": {"u": ARRAY, "v": ARRAY}}, tree="same")
    assert caught.value.path == "m"


def test_options_that_differ_are_named() -> None:
    schemas = {0: schema([ARRAY], layout="auto"), 4: schema([ARRAY], layout="regular")}
    with pytest.raises(
        MismatchError, match=r"layout='auto' on process 0, .*'regular' on process 4"
    ):
        merge_schemas(schemas, "union")


def test_the_digest_is_that_of_all_schemas_and_their_processes() -> None:
    assert merge([ARRAY], [ARRAY]).digest == merge([ARRAY], [ARRAY]).digest
    assert merge([ARRAY], [ARRAY]).digest != merge([ARRAY]).digest


# ------------------------------------------------------------------------------ parts of arrays


def partial(*boxes: Box) -> SchemaLeaf:
    return SchemaLeaf("numpy", SPEC, boxes=boxes, partial=True)


TOP, BOTTOM, NOTHING = Box((0, 0), (4, 6)), Box((4, 0), (6, 6)), Box((0, 0), (0, 6))


def test_parts_are_put_together_and_equal_ones_are_replicas() -> None:
    merged = merge([partial(TOP)], [partial(BOTTOM, TOP)], [partial(NOTHING)], [partial()])
    (leaf,) = merged.leaves
    assert leaf.processes == (0, 1, 2, 3)
    assert leaf.shards == (Shard(TOP, (0, 1)), Shard(BOTTOM, (1,)))
    assert own_part(leaf, 0, 4) == (leaf.shards, None, None)


@pytest.mark.parametrize(
    ("boxes", "text"),
    [
        ((TOP,), r"nothing holds \[4:10, 0:6\]"),
        ((TOP, Box((3, 0), (7, 6))), r"overlap"),
        ((TOP, Box((4, 0), (7, 6))), r"reaches past it"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(boxes: tuple[Box, ...], text: str) -> None:
    with pytest.raises(MismatchError, match=rf"w: the parts of .* on processes 0, 1 .*{text}"):
        merge({"w": partial(boxes[0])}, {"w": partial(*boxes[1:])})


def test_a_partition_wins_over_an_array_that_looks_whole_to_its_only_process() -> None:
    # On process 1's devices: the others see a global array of which they hold nothing.
    partition = Partition((5, 6), "two devices of process 1", (1,))
    seen = SchemaLeaf("jax", SPEC, partition=partition)
    alone = SchemaLeaf("jax", SPEC, boxes=(Box((0, 0), (5, 6)), Box((5, 0), (5, 6))))
    (leaf,) = merge([seen], [alone], [seen]).leaves
    assert leaf.partition == partition and leaf.shards is None
    assert own_part(leaf, 0, 3, shards=(), partition=partition) == ((), partition, None)
    halves = tuple(map(Shard, alone.boxes or ()))
    mine = own_part(leaf, 1, 3, shards=halves)
    assert mine.shards == tuple(Shard(shard.box, (1,)) for shard in halves)


def columns(first: int, *, pattern: str = "2[0+2] 0") -> SchemaLeaf:
    """Halves on one column of a mesh of two columns: what tensor parallelism leaves whole."""
    mesh = (first, first + 2)
    return SchemaLeaf("torch", SPEC, partition=Partition((5, 6), f"{mesh}", mesh, pattern))


def test_meshes_that_divide_an_array_alike_hold_copies_of_its_shards() -> None:
    (leaf,) = merge([columns(0)], [columns(1)], [columns(0)], [columns(1)]).leaves
    assert leaf.partition == Partition((5, 6), "(0, 2) and (1, 3)")
    assert leaf.partition.processes == (0, 1, 2, 3)
    for process, box, holders in ((0, TOP, (0, 1)), (1, TOP, (0, 1)), (3, BOTTOM, (2, 3))):
        shards = (Shard(box, (process,)),)
        mine = own_part(leaf, process, 4, shards=shards, partition=columns(process % 2).partition)
        assert mine == ((Shard(box, holders),), leaf.partition, None)


@pytest.mark.parametrize(
    "other",
    [columns(1, pattern="2[1,0] 0"), columns(1, pattern=""), columns(2)],
    ids=["turned", "not known", "overlapping"],
)
def test_other_meshes_of_one_path_are_refused(other: SchemaLeaf) -> None:
    text = (
        r"w: shards of \(5, 6\) on processes 0, 2; shards of \(5, 6\), placed differently, on proc"
    )
    with pytest.raises(MismatchError, match=text):
        merge({"w": columns(0)}, {"w": other}, {"w": columns(0)}, {"w": other})


@pytest.mark.parametrize(
    "leaf",
    [
        SchemaLeaf("torch", SPEC, partition=Partition((5, 6), "rows", (0, 1))),
        SchemaLeaf("numpy", SPEC, boxes=(TOP,), partial=True),
    ],
    ids=["mesh", "ShardedArray"],
)
def test_an_array_that_processes_divide_is_no_value_per_process(leaf: SchemaLeaf) -> None:
    schemas: dict[int, Schema] = {}
    for process in range(2):
        tree = {"opt": PerProcess({"m": Held(leaf)})}
        flat = flatten(tree, (PerProcessNodes(process),))
        schemas[process] = Schema(flat.structure, tuple(leaf.leaf for leaf in flat.leaves), {})
    text = "opt/0/m: process 0 holds only a part .* below a PerProcess.* a key per pipeline stage"
    with pytest.raises(MismatchError, match=text):
        merge_schemas(schemas, "union")


def test_a_process_without_a_leaf_holds_nothing_of_it() -> None:
    partition = Partition((5, 6), "rows", (0, 2))
    split, local = SchemaLeaf("jax", SPEC, partition=partition), ARRAY
    merged = merge({"a": split, "b": local}, {}, {"a": split, "b": local})
    divided, whole = merged.leaves
    assert own_part(divided, 1, 3) == ((), partition, None)
    assert own_part(whole, 1, 3) == (None, None, (0, 2))
    assert own_part(merge([ARRAY]).leaves[0], 0, 1) == (None, None, None)


def test_arrays_on_several_devices_of_every_process_are_held_whole_by_all() -> None:
    local = SchemaLeaf("jax", SPEC, boxes=(TOP, BOTTOM))
    (leaf,) = merge([local], [local]).leaves
    assert leaf.shards == (Shard(TOP, (0, 1)), Shard(BOTTOM, (0, 1)))
    with pytest.raises(MismatchError, match=r"in 2 parts on process 0, in 1 parts"):
        merge([local], [ARRAY])


def test_leaves_are_tied_where_all_their_processes_tie_them() -> None:
    tied = dataclasses.replace(ARRAY, tied_to=0)
    both = {"embed": ARRAY, "head": tied}
    assert merge(both, both).leaves[1].tied_to == 0
    # Pipeline stages: the last has its own copy of the embedding.
    apart = merge({"embed": ARRAY}, {"head": ARRAY}, both)
    assert [leaf.tied_to for leaf in apart.leaves] == [None, None]
    later = merge({"b": {"x": ARRAY}, "a": {}}, {"a": {"e": ARRAY}, "b": {"y": tied}})
    assert [(leaf.path, leaf.tied_to) for leaf in later.leaves] == [
        ("b/x", None),
        ("b/y", None),
        ("a/e", None),
    ]
