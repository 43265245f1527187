"""Schemas: their digests, and the bytes in which they travel."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.options import LeafOptions
from asyncckpt.planning.schema import (
    Schema,
    SchemaLeaf,
    decode_schema,
    encode_schema,
    schema_digest,
)
from asyncckpt.spec import ArraySpec, Box, Partition
from asyncckpt.tree import flatten

TREE = {"params": {"w": 1, "b": 2, "tied": 3}, "state": [4, (5,)], "step": 6}

LEAVES = (
    SchemaLeaf("numpy", ArraySpec((8, 4), "float32"), LeafOptions(chunk_shape=(2, 4))),
    SchemaLeaf("jax", ArraySpec((4,), "bfloat16"), extra='{"prng_impl":"fry"}'),
    SchemaLeaf("numpy", ArraySpec((8, 4), "float32"), tied_to=0),
    SchemaLeaf(
        "torch",
        ArraySpec((10, 6), "int8"),
        partition=Partition((4, (1, 3)), "mesh 3 x 3", (0, 2, 5)),
    ),
    SchemaLeaf(
        "numpy", ArraySpec((10,), "bool"), boxes=(Box((0,), (3,)), Box((7,), (3,))), partial=True
    ),
    SchemaLeaf("int"),
)

SCHEMA = Schema(flatten(TREE).structure, LEAVES, {"layout": "auto", "chunk_nbytes": 1 << 24})


def with_leaf(number: int, **changes: Any) -> Schema:
    leaves = list(LEAVES)
    leaves[number] = dataclasses.replace(leaves[number], **changes)
    return dataclasses.replace(SCHEMA, leaves=tuple(leaves))


CHANGES = {
    "kind": with_leaf(5, kind="float"),
    "shape": with_leaf(0, spec=ArraySpec((4, 8), "float32")),
    "dtype": with_leaf(0, spec=ArraySpec((8, 4), "int32")),
    "options": with_leaf(0, options=LeafOptions(chunk_shape=(4, 4))),
    "no options": with_leaf(0, options=None),
    "default options": with_leaf(0, options=LeafOptions()),
    "a chunk of a scalar": with_leaf(0, options=LeafOptions(chunk_shape=())),
    "extra": with_leaf(1, extra=""),
    "tied_to": with_leaf(2, tied_to=None),
    "cuts": with_leaf(3, partition=Partition((4, (1, 4)), "mesh 3 x 3", (0, 2, 5))),
    "holders": with_leaf(3, partition=Partition((4, (1, 3)), "mesh 3 x 2", (0, 2, 5))),
    "boxes": with_leaf(4, boxes=(Box((0,), (3,)),)),
    "partial": with_leaf(4, partial=False),
    "save options": dataclasses.replace(SCHEMA, options={"layout": "regular"}),
    "keys": dataclasses.replace(
        SCHEMA, structure=flatten({**TREE, "step": 6, "state": [4, [5]]}).structure
    ),
    "order": dataclasses.replace(SCHEMA, leaves=LEAVES[:4] + LEAVES[:3:-1]),
}


def test_the_digest_changes_with_everything_that_processes_share() -> None:
    digests = {name: schema_digest(schema) for name, schema in CHANGES.items()}
    digests["unchanged"] = schema_digest(SCHEMA)
    assert len(set(digests.values())) == len(digests)


def test_a_schema_arrives_as_it_was_sent() -> None:
    for schema in (SCHEMA, *CHANGES.values()):
        sent = decode_schema(encode_schema(schema), file="entry")
        assert sent == schema
        # What partitions do not compare.
        assert [leaf.partition and leaf.partition.processes for leaf in sent.leaves] == [
            leaf.partition and leaf.partition.processes for leaf in schema.leaves
        ]
        assert schema_digest(sent) == schema_digest(schema)


SCRIPT = """
from tests.planning.test_schema import SCHEMA, schema_digest
print(schema_digest(SCHEMA))
"""


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {schema_digest(SCHEMA)}


def test_a_tied_leaf_costs_a_few_bytes() -> None:
    """Also one that thousands of processes hold, as all copies of sharded parameters are."""
    partition = Partition((64,), "mesh 4096", tuple(range(4096)))
    leaf = SchemaLeaf("jax", ArraySpec((4096, 64), "float32"), partition=partition)
    tied = [dataclasses.replace(leaf, tied_to=number) for number in range(500)]
    schema = Schema(flatten([0] * 1000).structure, (*[leaf] * 500, *tied))
    data = encode_schema(schema)
    assert decode_schema(data, file="x") == schema
    once = encode_schema(Schema(flatten([0]).structure, (leaf,)))
    assert len(data) < len(once) + 40 * 1000


DOCUMENT = json.loads(encode_schema(SCHEMA))


def with_kind(number: int, **changes: Any) -> dict[str, Any]:
    """The document with another description of the leaves of one kind."""
    kinds = list(DOCUMENT["kinds"])
    kinds[number] = {**kinds[number], **changes}
    return {**DOCUMENT, "kinds": kinds}


LEAF_OPTIONS = DOCUMENT["kinds"][0]["options"]

WRONG = {
    "no object": [],
    "another version": {**DOCUMENT, "version": 1},
    "no version": {key: value for key, value in DOCUMENT.items() if key != "version"},
    "no tree": {key: value for key, value in DOCUMENT.items() if key != "tree"},
    "fewer leaves than the tree": {**DOCUMENT, "leaves": DOCUMENT["leaves"][:-1]},
    "a tie forward": {**DOCUMENT, "tied": [[0, 3]]},
    "a tie to itself": {**DOCUMENT, "tied": [[0, 0]]},
    "a negative tie": {**DOCUMENT, "tied": [[2, -1]]},
    "a tie of no leaf": {**DOCUMENT, "tied": [[6, 0]]},
    "half a tie": {**DOCUMENT, "tied": [[2]]},
    "a tied kind": with_kind(1, tied_to=0),
    "a number of no kind": {**DOCUMENT, "kinds": DOCUMENT["kinds"][:-1]},
    "a negative number": {**DOCUMENT, "leaves": [-2, *DOCUMENT["leaves"][1:]]},
    "a kind that is no text": with_kind(0, kind=3),
    "a kind without a field": {**DOCUMENT, "kinds": [{"kind": "int"}] * 9},
    "a dtype": with_kind(0, spec={"shape": [1], "dtype": "float7"}),
    "a negative length": with_kind(0, spec={"shape": [-1], "dtype": "int8"}),
    "a huge length": with_kind(0, spec={"shape": [1 << 70], "dtype": "int8"}),
    "an unknown option": with_kind(0, options={**LEAF_OPTIONS, "color": 1}),
    "an option's value": with_kind(0, options={**LEAF_OPTIONS, "chunk_nbytes": -5}),
    "a chunk shape": with_kind(0, options={**LEAF_OPTIONS, "chunk_shape": "long"}),
    "cuts": with_kind(3, partition={**DOCUMENT["kinds"][3]["partition"], "cuts": [1.5]}),
    "a box": with_kind(4, boxes=[[1]]),
    "no boolean": with_kind(4, partial=1),
    "no options": {**DOCUMENT, "options": 3},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_schema_is_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"entry-3: not a schema") as caught:
        decode_schema(json.dumps(WRONG[name]).encode(), file="entry-3")
    assert caught.value.file == "entry-3"


@given(st.binary(max_size=200))
def test_bytes_are_refused_and_never_crash(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_schema(data, file="x")


@given(st.data())
def test_a_changed_byte_gives_a_schema_or_an_error(data: st.DataObject) -> None:
    sent = bytearray(encode_schema(SCHEMA))
    sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(32, 126))
    try:
        decode_schema(bytes(sent), file="x")
    except CorruptCheckpointError:
        pass


def test_deep_and_dense_documents_are_refused() -> None:
    for data in (b"[" * 100_000, b'{"a":' * 50_000, b"[],[]," * 100_000):
        with pytest.raises(CorruptCheckpointError, match=r"x: not a schema"):
            decode_schema(data, file="x")
