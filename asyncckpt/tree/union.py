"""Merging of the trees of several processes into one."""

# Rule 1: only dicts may differ in their keys; every other container is equal in all processes
#   that have it. The keys of the lowest process come first, in its order, then the keys that it
#   lacks, in the order of the next process that has them.
# Rule 2: children are matched by keys, not by paths: the path of a key depends on its siblings,
#   which may differ in the merged tree.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncckpt.errors import TreeMismatchError
from asyncckpt.tree.names import Key, escape_keys, where
from asyncckpt.tree.per_process import TYPE_NAME as PER_PROCESS
from asyncckpt.tree.structure import KEYED, Node, Structure

Place = tuple[int, int]
"""A tree, and the ordinal of a leaf or the index of a node in it."""


@dataclass(frozen=True, slots=True)
class MergedTree:
    """The tree of all processes.

    Attributes:
        leaves: per original tree, the ordinals of its leaves in the merged one.
        keys_differ: whether the keys of some dict differ between trees.
    """

    structure: Structure
    leaves: tuple[Sequence[int], ...]
    keys_differ: bool = False


def merge_trees(
    trees: Sequence[Structure], processes: Sequence[Sequence[int]], *, same: bool
) -> MergedTree:
    """Return the tree with the leaves of all these trees.

    The trees are distinct, and that of the lowest process comes first. `processes` are the
    processes that have each tree, for errors. With `same`, the keys of dicts must be equal too.

    Raises:
        TreeMismatchError: containers differ; names the path and two processes.
    """
    if len(trees) == 1:
        return MergedTree(trees[0], (range(trees[0].leaf_count),))
    return _Merger(trees, processes, same).run()


class _Merger:
    def __init__(
        self, trees: Sequence[Structure], processes: Sequence[Sequence[int]], same: bool
    ) -> None:
        self._trees = trees
        self._processes = processes
        self._same = same
        self._leaves = [[0] * tree.leaf_count for tree in trees]
        self._leaf_count = 0
        self._nodes: list[Node | None] = []
        self._keys_differ = False

    def run(self) -> MergedTree:
        roots = [(number, 0) for number in range(len(self._trees))]
        self._merge("", roots, [not tree.nodes for tree in self._trees])
        nodes = [node for node in self._nodes if node is not None]
        structure = Structure(tuple(nodes), self._leaf_count)
        return MergedTree(structure, tuple(self._leaves), self._keys_differ)

    def _merge(self, path: str, places: Sequence[Place], leaf: Sequence[bool]) -> int:
        """Merge the trees below a path; return the result as in `Node.children`.

        `leaf` says which places are leaves. Recurses to the tree's depth.
        """
        if not any(leaf):
            return -self._node(path, places)
        if not all(leaf):
            one, other = leaf.index(True), leaf.index(False)
            raise self._differ(path, places[one][0], "a leaf", places[other][0], "a container")
        for tree, ordinal in places:
            self._leaves[tree][ordinal] = self._leaf_count
        self._leaf_count += 1
        return self._leaf_count - 1

    def _node(self, path: str, places: Sequence[Place]) -> int:
        nodes = [(tree, self._trees[tree].nodes[index]) for tree, index in places]
        number = len(self._nodes)
        self._nodes.append(None)  # in preorder, before its children
        (lead, first), *others = nodes
        for tree, node in others:
            if node.kind != first.kind:
                raise self._differ(path, lead, f"a {first.kind}", tree, f"a {node.kind}")
        below: dict[Key, list[Place]] = {}  # children as in `Node.children`
        for tree, node in nodes:
            keys: Sequence[Key] = node.keys if node.kind in KEYED else range(len(node.children))
            for key, child in zip(keys, node.children, strict=True):
                below.setdefault(key, []).append((tree, child))
        if first.type_name != PER_PROCESS:
            if self._same or first.kind != "dict":
                self._check_keys(path, nodes, below)
            self._keys_differ |= any(len(found) < len(nodes) for found in below.values())
        keys = tuple(below)
        parts: Sequence[object] = keys
        if first.kind in KEYED:
            parts = escape_keys(keys, set(map(type, keys)))
        children: list[int] = []
        for part, found in zip(parts, below.values(), strict=True):
            inner = path if first.kind == "stateful" else f"{path}/{part}" if path else str(part)
            places = [(tree, abs(child)) for tree, child in found]
            children.append(self._merge(inner, places, [child >= 0 for _, child in found]))
        self._nodes[number] = Node(
            first.kind, keys if first.kind in KEYED else (), tuple(children), first.type_name
        )
        return number

    def _check_keys(
        self, path: str, nodes: Sequence[tuple[int, Node]], below: Mapping[Key, Sequence[Place]]
    ) -> None:
        for key, places in below.items():
            if len(places) == len(nodes):
                continue
            having = {tree for tree, _ in places}
            lacking = next(tree for tree, _ in nodes if tree not in having)
            raise self._differ(path, places[0][0], f"an entry {key!r}", lacking, "none")

    def _differ(
        self, path: str, one: int, found: str, other: int, instead: str
    ) -> TreeMismatchError:
        first, second = self._processes[one][0], self._processes[other][0]
        advice = (
            'save the same tree from all processes, or pass SaveOptions(tree="union")'
            if self._same
            else "only dicts may differ in their keys: build the others alike in all processes"
        )
        return TreeMismatchError(
            f"{where(path)}: process {first} has {found} here, process {second} has {instead}; "
            f"{advice}",
            path=path,
            stage="plan",
            expected=found,
            found=instead,
        )
