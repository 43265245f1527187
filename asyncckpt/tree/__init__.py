"""Trees of containers: flattening to leaves with paths, and rebuilding.

Only the rules of this module determine how plain containers are flattened, so that a tree has the
same paths with and without JAX:

* ``dict`` and its subclasses in insertion order, keys exactly ``str`` or ``int``; ``list`` and
  ``tuple`` with their subclasses; namedtuples; ``None`` (a node without leaves);
* dataclasses by their fields. Fields marked ``pytree_node=False`` or ``static=True`` in their
  metadata (flax, equinox, JAX), and those that the class's registration with JAX leaves out, are
  configuration: they are not saved, and come from `like` on restore;
* objects with `state_dict` and `load_state_dict` as their state dict; if a `NodeAdapter` knows the
  type, it must define `state_dict` itself;
* every other type that a `NodeAdapter` knows, by that adapter's keys.

Everything else is a leaf. A path joins its parts with ``/``. An int (dict key or index) is written
in decimal. In a str, control characters, ``/``, ``%`` and lone surrogates (which only foreign
checkpoints have: `flatten` refuses them) are percent-escaped; the empty str is ``%``, ``.`` and
``..`` are ``%2E`` and ``%2E%2E``. If a dict has an int and an equal-looking str as keys, the first
character of the str is escaped (``{1: …, "1": …}`` has paths ``1`` and ``%31``), so that no two
leaves share a path. The path of a tree that is a single leaf is empty.
"""

from __future__ import annotations

from asyncckpt.options import MAX_DEPTH
from asyncckpt.tree.flatten import Flat, flatten
from asyncckpt.tree.names import Key, array_names, escape, match_glob, names_of_paths, where
from asyncckpt.tree.per_process import PerProcess, PerProcessNodes, per_process_paths
from asyncckpt.tree.structure import Kind, Node, Structure
from asyncckpt.tree.types import NodeAdapter, is_frozen, signature
from asyncckpt.tree.unflatten import shared_leaves, unflatten, unflatten_like
from asyncckpt.tree.union import merge_trees

__all__ = [
    "MAX_DEPTH",
    "Flat",
    "Key",
    "Kind",
    "Node",
    "NodeAdapter",
    "PerProcess",
    "PerProcessNodes",
    "Structure",
    "array_names",
    "escape",
    "flatten",
    "is_frozen",
    "match_glob",
    "merge_trees",
    "names_of_paths",
    "per_process_paths",
    "shared_leaves",
    "signature",
    "unflatten",
    "unflatten_like",
    "where",
]
