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

from asyncckpt.options import MAX_DEPTH as MAX_DEPTH
from asyncckpt.tree.flatten import Flat as Flat
from asyncckpt.tree.flatten import flatten as flatten
from asyncckpt.tree.names import Key as Key
from asyncckpt.tree.names import array_names as array_names
from asyncckpt.tree.names import escape as escape
from asyncckpt.tree.names import match_glob as match_glob
from asyncckpt.tree.names import names_of_paths as names_of_paths
from asyncckpt.tree.names import where as where
from asyncckpt.tree.per_process import PerProcess as PerProcess
from asyncckpt.tree.per_process import PerProcessNodes as PerProcessNodes
from asyncckpt.tree.per_process import process_values as process_values
from asyncckpt.tree.structure import Kind as Kind
from asyncckpt.tree.structure import Node as Node
from asyncckpt.tree.structure import Structure as Structure
from asyncckpt.tree.types import NodeAdapter as NodeAdapter
from asyncckpt.tree.types import is_frozen as is_frozen
from asyncckpt.tree.types import signature as signature
from asyncckpt.tree.unflatten import shared_leaves as shared_leaves
from asyncckpt.tree.unflatten import unflatten as unflatten
from asyncckpt.tree.unflatten import unflatten_like as unflatten_like
from asyncckpt.tree.union import merge_trees as merge_trees
