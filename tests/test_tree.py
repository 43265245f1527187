from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple
from urllib.parse import unquote

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncckpt import errors
from asyncckpt.tree import (
    MAX_DEPTH,
    Structure,
    array_names,
    escape,
    flatten,
    match_glob,
    names_of_paths,
    process_values,
    shared_leaves,
    unflatten,
    unflatten_like,
    where,
)
from asyncckpt.tree.per_process import MOST_PROCESSES, TYPE_NAME
from asyncckpt.tree.structure import Node


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    apply: Any = dataclasses.field(default=None, metadata={"pytree_node": False})


class Module:
    """Saved as its state dict."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded: list[Any] = []

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)


keys = (
    st.text(max_size=4)
    | st.sampled_from(
        [
            "",
            ".",
            "..",
            "/",
            "%",
            "%2F",
            "a/b",
            "a.b",
            "0",
            "1",
            "-1",
            "\x00",
            "\n",
            "é",
            "🧀",
            "*",
        ]
    )
    | st.integers(-3, 12)
)
leaves = st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(max_size=3)
trees = st.recursive(
    leaves | st.none(),
    lambda t: (
        st.dictionaries(keys, t, max_size=4)
        | st.lists(t, max_size=3)
        | st.lists(t, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


def exactly(tree: Any) -> Any:
    """A form whose equality tells 1 from True and "1", and (1,) from [1], and sees order."""
    if isinstance(tree, dict):
        return ("dict", [((type(k), k), exactly(v)) for k, v in tree.items()])
    if isinstance(tree, (list, tuple)):
        return (type(tree), [exactly(v) for v in tree])
    return (type(tree), tree)


@given(trees)
def test_every_tree_survives_flatten_json_and_unflatten(tree: Any) -> None:
    flat = flatten(tree)
    structure = Structure.from_json(json.loads(json.dumps(flat.structure.to_json())))
    assert structure == flat.structure
    assert exactly(unflatten(structure, flat.leaves)) == exactly(tree)
    assert exactly(unflatten_like(flat, flat.leaves)) == exactly(tree)
    assert structure.paths() == flat.paths


@given(trees)
def test_no_two_leaves_share_a_path_or_an_array(tree: Any) -> None:
    flat = flatten(tree)
    assert len(set(flat.paths)) == len(flat.paths) == len(flat.leaves)
    names = array_names(flat.structure.parts())
    assert names_of_paths(flat.paths) in (None, names)
    assert len(set(names)) == len(names)
    for name in names:
        assert name and "/" not in name and "\x00" not in name and name[0] != "."
        name.encode()
    for path in flat.paths:
        path.encode()
        assert all(part not in ("", ".", "..") for part in path.split("/")) or path == ""


@given(trees, st.randoms())
def test_array_names_depend_only_on_the_set_of_paths(tree: Any, random: Any) -> None:
    parts = flatten(tree).structure.parts()
    named = dict(zip(parts, array_names(parts), strict=True))
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert array_names(shuffled) == [named[p] for p in shuffled]


@given(st.text())
def test_escaped_parts_come_back(part: str) -> None:
    escaped = escape(part)
    assert unquote(escaped, errors="surrogatepass") == part or (escaped, part) == ("%", "")


@given(trees)
def test_every_subtree_can_be_taken_by_its_path(tree: Any) -> None:
    flat = flatten(tree)
    for path in {*flat.structure.node_paths(), *flat.paths}:
        ((found, (structure, ordinals)),) = flat.structure.subtrees([path]).items()
        assert found == path
        below = [p for p in flat.paths if not path or p == path or p.startswith(path + "/")]
        assert [flat.paths[i] for i in ordinals] == below
        assert flatten(unflatten(structure, [flat.leaves[i] for i in ordinals])).structure == (
            structure
        )


def test_a_path_that_does_not_exist_has_no_subtree() -> None:
    assert flatten({"a": 1}).structure.subtrees(["b"]) == {}


def test_paths_are_readable() -> None:
    tree = {"params": {"w": 1, "layers": [2, (3,)]}, 7: Pair(4, State(5, {"a/b": 6}))}
    assert flatten(tree).paths == [
        "params/w",
        "params/layers/0",
        "params/layers/1/0",
        "7/left",
        "7/right/step",
        "7/right/params/a%2Fb",
    ]
    assert flatten({"": {".": 1, "..": 2, "%": 3}}).paths == ["%/%2E", "%/%2E%2E", "%/%25"]


def test_an_int_key_and_the_str_that_reads_like_it_have_different_paths() -> None:
    flat = flatten({1: "int", "1": "str", "2": "plain"})
    assert flat.paths == ["1", "%31", "2"]
    assert unflatten(flat.structure, flat.leaves) == {1: "int", "1": "str", "2": "plain"}
    assert flatten({"1": 0}).paths == ["1"]


@pytest.mark.parametrize("key", [True, 1.5, None, (1, 2), b"x"])
def test_other_keys_are_refused_by_path_and_key(key: Any) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match=r"a/b: key .* keys are str or int") as e:
        flatten({"a": {"b": {"fine": 1, key: 2}}})
    assert e.value.path == "a/b"
    assert repr(key) in str(e.value)


@pytest.mark.parametrize("key", ["\ud800", "a\udc80", "\udfff"])
def test_a_key_that_is_not_valid_unicode_is_refused_at_the_call(key: str) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match=r"a: key .* is not valid Unicode") as e:
        flatten({"a": {"é": 1, 3: 2, key: 3}})
    assert (e.value.path, e.value.found) == ("a", key)
    str(e.value).encode()  # can be logged


def test_str_subclasses_and_huge_ints_are_no_keys() -> None:
    class Name(str):
        pass

    with pytest.raises(errors.UnsupportedLeafError, match="is a Name"):
        flatten({Name("a"): 1})
    with pytest.raises(errors.UnsupportedLeafError, match=r"^b: .* is a Name"):
        flatten({"a": {"k": 1}, "b": {Name("k"): 1}})  # whose keys are equal to those of `a`
    with pytest.raises(errors.UnsupportedLeafError, match="1024 bits"):
        flatten({2**2000: 1})


def test_a_cycle_is_an_error_that_names_the_path() -> None:
    tree: dict[str, Any] = {"a": {"b": []}}
    tree["a"]["b"].append(tree)
    with pytest.raises(errors.UsageError, match=r"a/b/0: this dict contains itself"):
        flatten(tree)


def test_one_container_may_stand_in_two_places() -> None:
    shared = {"x": [1]}
    assert flatten({"a": shared, "b": shared}).paths == ["a/x/0", "b/x/0"]


def nested(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = [tree]
    return tree


def test_depth_is_bounded_whatever_the_stack() -> None:
    flat = flatten(nested(MAX_DEPTH))
    assert unflatten(flat.structure, [0]) == nested(MAX_DEPTH)
    with pytest.raises(errors.UsageError, match=f"more than {MAX_DEPTH} containers"):
        flatten(nested(MAX_DEPTH + 1))
    limit = sys.getrecursionlimit()
    tree = nested(MAX_DEPTH)
    try:
        sys.setrecursionlimit(len(__import__("inspect").stack()) + 60)
        flat = flatten(tree)
        unflatten_like(flat, flat.leaves)
        Structure.from_json(flat.structure.to_json())
    finally:
        sys.setrecursionlimit(limit)


def test_a_tree_that_is_deep_enough_to_be_saved_can_be_read() -> None:
    for inner in (None, [None], [[]]):
        tree = inner
        while True:
            try:
                structure = flatten(tree).structure
            except errors.UsageError:
                break
            assert Structure.from_json(structure.to_json()) == structure
            tree = [tree]


def test_none_is_a_node_without_leaves() -> None:
    flat = flatten({"a": None, "b": 1, "c": [None]})
    assert flat.paths == ["b"]
    assert unflatten(flat.structure, [1]) == {"a": None, "b": 1, "c": [None]}
    assert flatten(None).leaves == []
    assert unflatten(flatten(None).structure, []) is None


def test_typed_containers_come_back_as_dicts_of_their_fields() -> None:
    flat = flatten([Pair(1, 2), State(3, 4)])
    assert unflatten(flat.structure, flat.leaves) == [
        {"left": 1, "right": 2},
        {"step": 3, "params": 4},
    ]
    assert [node.kind for node in flat.structure.nodes] == ["list", "namedtuple", "dataclass"]
    assert flat.structure.nodes[1].type_name.endswith("Pair")


def test_like_gives_typed_containers_and_keeps_static_fields() -> None:
    flat = flatten({"p": Pair(1, 2), "s": State(3, [4], apply=print)})
    new = unflatten_like(flat, [10, 20, 30, 40])
    assert new == {"p": Pair(10, 20), "s": State(30, [40], apply=print)}


def test_like_keeps_subclasses_and_what_they_carry() -> None:
    ordered = OrderedDict(b=1, a=2)
    ordered._metadata = {"version": 2}  # type: ignore[attr-defined]
    default = defaultdict(list, {"x": 3})
    flat = flatten([ordered, default, Counter(k=4)])
    new = unflatten_like(flat, [5, 6, 7, 8])
    assert new == [OrderedDict(b=5, a=6), {"x": 7}, Counter(k=8)]
    assert new[0]._metadata == {"version": 2}
    assert new[1].default_factory is list
    assert ordered == OrderedDict(b=1, a=2)


def test_dataclass_with_an_init_of_its_own_is_rebuilt_without_running_it() -> None:
    ran = []

    @dataclasses.dataclass(init=False)
    class Own:
        x: Any
        y: Any

        def __init__(self, both: Any) -> None:
            ran.append(both)
            self.x = self.y = both

        @functools.cached_property
        def total(self) -> Any:
            return self.x + self.y

    own = Own(1)
    assert own.total == 2
    new = unflatten_like(flatten(own), [3, 4])
    assert (new.x, new.y, new.total) == (3, 4, 7)
    assert ran == [1]
    assert own.total == 2


def test_dataclass_fields_without_init_are_set_afterwards() -> None:
    @dataclasses.dataclass
    class Late:
        x: Any
        n: dataclasses.InitVar[int] = 0
        y: Any = dataclasses.field(init=False)

        def __post_init__(self, n: int) -> None:
            self.y = -self.x

    @dataclasses.dataclass(frozen=True, slots=True)
    class Derived:
        x: Any
        y: Any = dataclasses.field(init=False, default=None)
        kept: Any = dataclasses.field(init=False, default="k", metadata={"static": True})

    new = unflatten_like(flatten(Late(1)), [5, 6])
    assert (new.x, new.y) == (5, 6)
    derived = unflatten_like(flatten(Derived(1)), [5, *flatten(Derived(1)).leaves[1:]])
    assert (derived.x, derived.y, derived.kept) == (5, None, "k")


def test_fields_have_the_restored_values_whatever_post_init_makes_of_them() -> None:
    @dataclasses.dataclass(frozen=True)
    class Scaled:
        x: Any
        unit: Any = dataclasses.field(metadata={"static": True})

        def __post_init__(self) -> None:
            object.__setattr__(self, "x", self.x * 2)
            object.__setattr__(self, "unit", f"scaled {self.unit}")

    old = Scaled(1, "m")
    new = unflatten_like(flatten(old), [5])
    assert (new.x, new.unit) == (5, old.unit)


def test_a_container_that_refuses_its_children_is_named() -> None:
    @dataclasses.dataclass
    class Strict:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")

    with pytest.raises(errors.UsageError, match=r"a: making a Strict .* ValueError: negative"):
        unflatten_like(flatten({"a": Strict(1)}), [-1])


def test_a_field_that_raises_is_named() -> None:
    @dataclasses.dataclass
    class Lazy:
        w: Any = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "w":
                raise KeyError("lazy")
            return object.__getattribute__(self, name)

    with pytest.raises(errors.UnsupportedLeafError, match=r"^m: a field of Lazy .*KeyError"):
        flatten({"m": Lazy()})


def test_a_field_without_value_is_named() -> None:
    @dataclasses.dataclass
    class Unset:
        x: Any = dataclasses.field(init=False)

    with pytest.raises(errors.UnsupportedLeafError, match="a: a field of Unset has no value"):
        flatten({"a": Unset()})


class Sorted(dict[str, Any]):
    """Iterates in another order than its values."""

    def __iter__(self) -> Any:
        return iter(sorted(super().keys()))

    def keys(self) -> Any:
        return list(self)


def test_values_stay_with_their_keys_in_a_dict_that_iterates_in_another_order() -> None:
    flat = flatten({"opt": Sorted(b=2, a=1)})
    assert dict(zip(flat.paths, flat.leaves, strict=True)) == {"opt/a": 1, "opt/b": 2}


def test_only_numbers_of_processes_make_a_value_per_process() -> None:
    """A damaged tree must not make `PerProcess.all` a list of any length."""
    for keys in ((0,), (2, 0), (MOST_PROCESSES - 1,)):
        node = Node("registered", keys, tuple(range(len(keys))), TYPE_NAME)
        assert process_values(Structure((node,), len(keys))) == {"": list(keys)}
    for keys in ((), ("0",), (0, "a"), (-1,), (MOST_PROCESSES,), (True,)):
        node = Node("registered", keys, tuple(range(len(keys))), TYPE_NAME)
        assert process_values(Structure((node,), len(keys))) == {}


def test_a_container_whose_keys_are_not_as_many_as_its_values_is_named() -> None:
    class Row(tuple[int, ...]):
        _fields = ("a", "b", "c")

    class Longer(list[int]):
        def __len__(self) -> int:
            return 5

    for value, expected in ((Row((1, 2)), "this Row has 3"), (Longer([1]), "this Longer has 5")):
        for tree in (value, type(value)([[], {}])):  # type: ignore[list-item]
            with pytest.raises(errors.UnsupportedLeafError, match=rf"^m/sub: {expected}"):
                flatten({"m": {"sub": tree}})
    assert flatten([type("Plain", (tuple,), {"_fields": None})((1, 2))]).paths == ["0/0", "0/1"]


def test_a_proxy_that_refuses_every_attribute_is_a_leaf() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("working outside of its context")

    assert flatten({"a": Proxy()}).paths == ["a"]


def test_stateful_objects_are_flattened_as_their_state_dicts() -> None:
    inner = Module({"lr": 0.1})
    model = Module({"w": 1, "inner": inner})
    flat = flatten({"model": model, "none": Module(None)})
    assert flat.paths == ["model/w", "model/inner/lr"]
    assert [path for path, _, _ in flat.stateful] == ["model", "none"]
    assert flat.stateful[0][1] is model
    assert unflatten(flat.structure, [2, 3]) == {
        "model": {"w": 2, "inner": {"lr": 3}},
        "none": None,
    }
    assert flatten(Module).leaves == [Module], "a class is a leaf, which the adapters refuse"
    assert flatten(Module(5)).paths == [""]


def test_a_failing_state_dict_is_named() -> None:
    class Broken(Module):
        def state_dict(self) -> Any:
            raise RuntimeError("not on this rank")

    with pytest.raises(errors.UsageError, match=r"m: state_dict\(\) of Broken .* not on this rank"):
        flatten({"m": Broken(0)})


class Registry:
    """Knows `Boxed`, and `Partial` by some of its fields."""

    def flatten(self, node: Any) -> Any:
        if type(node) is Boxed:
            return ["a/b", 0], node.items
        if type(node) is Partial:
            return ["x"], [node.x]
        return None

    def unflatten(self, node: Any, children: Any) -> Any:
        if type(node) is Boxed:
            return Boxed(list(children))
        return Partial(children[0], node.fn)


class Boxed:
    def __init__(self, items: list[Any]) -> None:
        self.items = items


@dataclasses.dataclass
class Partial:
    x: Any
    fn: Any


def test_registered_nodes_come_through_their_adapter() -> None:
    flat = flatten({"b": Boxed([1, [2]])}, [Registry()])
    assert flat.paths == ["b/a%2Fb", "b/0/0"]
    assert unflatten(flat.structure, [3, 4]) == {"b": {"a/b": 3, 0: [4]}}
    assert unflatten_like(flat, [3, 4], [Registry()])["b"].items == [3, [4]]
    assert len(flatten({"b": Boxed([1])}).leaves) == 1


def test_an_object_that_occurs_twice_is_made_once() -> None:
    inner = Boxed([1, {"x": 2}])
    model = Boxed([inner, 3])
    flat = flatten({"inner": inner, "model": model, "opt": [model]}, [Registry()])
    assert shared_leaves(flat) == {2: 0, 3: 1, 5: 0, 6: 1, 7: 4}
    new = unflatten_like(flat, [5, 6, 5, 6, 7, 5, 6, 7], [Registry()])
    assert new["model"] is new["opt"][0] is not model
    assert new["inner"] is new["model"].items[0] is not inner
    assert (new["inner"].items, new["model"].items[1]) == ([5, {"x": 6}], 7)
    mutable, watched = Partial(1, print), Watched(1)
    assert shared_leaves(flatten([mutable, mutable])) == {2: 0, 3: 1}
    assert shared_leaves(flatten([watched, watched])) == {1: 0}


@dataclasses.dataclass(init=False)
class Immutable:
    """Refuses assignment by itself, as the modules of Equinox do."""

    x: Any

    def __init__(self, x: Any) -> None:
        object.__setattr__(self, "x", x)

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


@dataclasses.dataclass
class Watched:
    """Assigns in its own way, as the modules of NNX do."""

    x: Any

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@pytest.mark.parametrize(
    "value", [State(1, 2), Pair(1, 2), {"a": 1}, [1, 2], OrderedDict(a=1), Immutable(1)]
)
def test_a_value_that_occurs_twice_is_made_twice(value: Any) -> None:
    flat = flatten([value, value])
    assert not shared_leaves(flat)
    new = unflatten_like(flat, [5, 6, 7, 8][: len(flat.leaves)])
    assert new[0] is not new[1] and new[0] != new[1]


class Delegating:
    """Answers any name, as `nnx.Rngs` does with a stream of random numbers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def test_a_registered_type_is_stateful_only_if_it_defines_a_state_dict() -> None:
    asked: list[str] = []

    class Streams(Boxed):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return print

    class Registry:
        def flatten(self, node: Any) -> Any:
            return ([0], node.items) if isinstance(node, Boxed | Module) else None

    nodes: Any = [Registry()]
    assert flatten({"rngs": Streams([5])}, nodes).paths == ["rngs/0"]
    assert not asked
    assert flatten({"own": Module({"w": 1})}, nodes).paths == ["own/w"]
    # A type that is not registered may delegate, as wrappers of modules do.
    assert flatten({"wrapper": Delegating(Module({"w": 1}))}, nodes).paths == ["wrapper/w"]


def test_what_a_registered_dataclass_leaves_out_is_static() -> None:
    flat = flatten(Partial(1, print), [Registry()])
    assert flat.paths == ["x"]
    assert unflatten_like(flat, [2], [Registry()]) == Partial(2, print)


@dataclasses.dataclass
class Layer:
    """Has fewer or more children than fields, as dataclasses that are modules of nnx may."""

    w: Any = None
    b: Any = None


class Attributes:
    """Knows `Layer` by its attributes that are not None."""

    def flatten(self, node: Any) -> Any:
        if type(node) is not Layer:
            return None
        held = {name: value for name, value in vars(node).items() if value is not None}
        return list(held), list(held.values())

    def unflatten(self, node: Any, children: Any) -> Any:
        made = Layer()
        vars(made).update(zip(self.flatten(node)[0], children, strict=True))
        return made


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_every_instance_of_a_registered_dataclass_keeps_its_own_children(
    order: tuple[int, ...],
) -> None:
    more = Layer(4)
    more.extra = [5]  # type: ignore[attr-defined]
    layers = [Layer(), Layer(1), Layer(2, 3), more]
    flat = flatten({str(number): layers[number] for number in order}, [Attributes()])
    found = dict(zip(flat.paths, flat.leaves, strict=True))
    assert found == {"1/w": 1, "2/w": 2, "2/b": 3, "3/w": 4, "3/extra/0": 5}
    again = unflatten_like(flat, [-leaf for leaf in flat.leaves], [Attributes()])
    assert [vars(again[str(number)]) for number in range(4)] == [
        {"w": None, "b": None},
        {"w": -1, "b": None},
        {"w": -2, "b": -3},
        {"w": -4, "b": None, "extra": [-5]},
    ]


def test_a_tree_may_be_one_leaf() -> None:
    flat = flatten(5)
    assert (flat.paths, flat.leaves) == ([""], [5])
    assert unflatten(Structure.from_json(flat.structure.to_json()), [6]) == 6
    assert unflatten_like(flat, [6]) == 6
    assert array_names(flat.structure.parts()) == ["root"]


def test_errors_show_both_ends_of_a_very_long_path() -> None:
    path = "a" * 399 + "/" + "b" * 399
    assert where(path) == f"{'a' * 200}…{'b' * 200}"
    assert where("a" * 400) == "a" * 400


def test_array_names_are_those_of_orbax_where_they_can_be() -> None:
    tree = {"params": {"dense.0": {"kernel": 1}, "layers": [2, 3]}, 0: 4}
    assert array_names(flatten(tree).structure.parts()) == [
        "params.dense.0.kernel",
        "params.layers.0",
        "params.layers.1",
        "0",
    ]
    assert names_of_paths(flatten(tree).paths) == array_names(flatten(tree).structure.parts())


def test_colliding_and_unsafe_array_names_are_escaped() -> None:
    tree = {"a.b": 1, "a": {"b": 2}, 0: 3, "0": 4, "x/y": 5, ".hid": 6, "": 7}
    assert array_names(flatten(tree).structure.parts()) == [
        "a%2Eb",
        "a.b",
        "0",
        "%30",
        "x%2Fy",
        "%2Ehid",
        "%",
    ]
    long = flatten({"k" * 3000 + "a": 1, "k" * 3000 + "b": 2, "é" * 3000: 3}).structure.parts()
    names = array_names(long)
    assert all(names_of_paths([*paths, "a"]) is None for paths in (["%"], [".b"], [""], ["a"]))
    assert names_of_paths(["k" * 300]) is None
    assert len(set(names)) == 3
    assert all(len(name.encode()) <= 1024 for name in names)


PATHS = ["params/w", "params/layers/0/w", "params/layers/1/b", "opt/mu/w", "step", "a*b"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("step", ["step"]),
        ("params", PATHS[:3]),
        ("params/", PATHS[:3]),
        ("params/layers", PATHS[1:3]),
        ("*/w", ["params/w"]),
        ("**/w", ["params/w", "params/layers/0/w", "opt/mu/w"]),
        ("params/**/w", ["params/w", "params/layers/0/w"]),
        ("params/layers/*/b", ["params/layers/1/b"]),
        ("p*", PATHS[:3]),
        ("**", PATHS),
        ("a%2Ab", ["a*b"]),
        ("par", []),
        ("params/w/x", []),
        ("ste.", []),
    ],
)
def test_a_pattern_selects_what_it_matches_and_everything_below(
    pattern: str, expected: list[str]
) -> None:
    found, unmatched = match_glob(PATHS, [pattern])
    assert [PATHS[i] for i in sorted(found)] == expected
    assert unmatched == ([] if expected else [pattern])


def backtracking(pattern: str) -> re.Pattern[str]:
    """The plain translation of a pattern, whose time is exponential in the number of asterisks."""
    regex = ""
    for token in re.split(r"((?:^|(?<=/))\*\*/|\*\*+|\*)", pattern.removesuffix("/")):
        plain = {"**/": "(?:.*/)?", "*": "[^/]*"}.get(token)
        regex += plain or (".*" if token[:2] == "**" else re.escape(token.replace("%2A", "*")))
    return re.compile(f"{regex}(?:/.*)?", re.DOTALL)


@given(
    st.lists(st.lists(st.sampled_from("aab/*"), max_size=9).map("".join), max_size=20),
    st.lists(
        st.lists(st.sampled_from(["a", "b", "/", "*", "**", "**/", "/**/", "%2A"]), max_size=9).map(
            "".join
        ),
        max_size=5,
    ),
)
def test_patterns_select_what_their_plain_translation_matches(
    paths: list[str], patterns: list[str]
) -> None:
    expected = {
        pattern: {i for i, path in enumerate(paths) if backtracking(pattern).fullmatch(path)}
        for pattern in patterns
    }
    found, unmatched = match_glob(paths, patterns)
    assert found == set().union(*expected.values())
    assert unmatched == [pattern for pattern in patterns if not expected[pattern]]


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("a" * 1000, "*a" * 30 + "*b"),
        ("/".join("a" * 1000), "**/a/" * 30 + "**/b"),
        ("a/" * 1000, "**a" * 30 + "**b"),
    ],
    ids=["within a part", "across parts", "anywhere"],
)
def test_many_asterisks_take_no_exponential_time(path: str, pattern: str) -> None:
    """It would take longer than the universe exists."""
    assert match_glob([path], [pattern]) == (set(), [pattern])
    assert match_glob([path[:-1] + "b"], [pattern])[0] == {0}


def test_patterns_add_up_and_one_may_be_given_bare() -> None:
    assert match_glob(PATHS, ["step", "nothing", "opt"]) == ({3, 4}, ["nothing"])
    assert match_glob(PATHS, ["step"]) == ({4}, [])
    assert match_glob([""], ["**"]) == ({0}, [])


def test_from_json_refuses_what_to_json_does_not_write() -> None:
    good = flatten({"a": [1, {2: 3}], "b": Module({"c": None})}).structure.to_json()
    Structure.from_json(good)

    def broken(**changes: Any) -> dict[str, Any]:
        return {**json.loads(json.dumps(good)), **changes}

    def node(**changes: Any) -> dict[str, Any]:
        return broken(nodes=[{"kind": "dict", "keys": ["a"], "children": [0], **changes}], leaves=1)

    bad: list[Any] = [
        None,
        [],
        {},
        broken(leaves=3),
        broken(leaves=-1),
        broken(leaves=True),
        broken(extra=1),
        broken(nodes={}),
        broken(nodes=[]),
        broken(nodes=[1]),
        node(kind="set"),
        node(kind=["dict"]),
        node(keys=[True]),
        node(keys=[1.0]),
        node(keys=["a", "b"]),
        node(keys=[2**2000]),
        node(keys=["a", "a"], children=[0, 1]),
        node(children=[1]),
        node(children=[-1]),
        node(children=[0.0]),
        node(children="0"),
        node(type=5),
        node(kind="none", keys=[]),
        node(kind="stateful", keys=[], children=[]),
        node(kind="list"),
        node(unknown=1),
        broken(nodes=[{"kind": "list", "children": [-1, -1]}, {"kind": "none"}], leaves=0),
        broken(nodes=[{"kind": "list"}, {"kind": "none"}], leaves=0),
        broken(
            nodes=[{"kind": "list", "children": [-i]} for i in range(1, MAX_DEPTH + 1)]
            + [{"kind": "list"}],
            leaves=0,
        ),
    ]
    for obj in bad:
        with pytest.raises(ValueError, match="tree structure"):
            Structure.from_json(obj)
    with pytest.raises(ValueError, match="2 leaves for a tree of 1"):
        unflatten(flatten([1]).structure, [1, 2])
