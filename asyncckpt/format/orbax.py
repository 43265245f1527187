"""Files that Orbax needs to restore an OCDBT database of another writer.

Source: orbax-checkpoint 0.12.8, `metadata/tree.py`, `serialization/type_handlers.py` and
`serialization/jax_array_handlers.py`. All are in the directory of the database:

- ``_METADATA`` lists every leaf, its path and the handler that restores it. Always needed.
- ``_strings.json`` holds the string leaves, if there are any.
- ``_sharding`` gives the device of `jax.Array` leaves that are restored without a target.
- ``array_metadatas/process_0`` lists the arrays that hold typed PRNG keys.

Orbax looks for an array under its path, parts joined by ``.`` without escapes. `conflicts` lists
the leaves that it would not find there, or would confuse with others (`OrbaxLeaf.array_name`).
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from typing import Literal, NamedTuple, get_args

from asyncckpt.format.scalars import JsonValue, is_unicode

METADATA_FILE = "_METADATA"
STRINGS_FILE = "_strings.json"
SHARDING_FILE = "_sharding"
ARRAY_METADATAS = "array_metadatas"
ARRAY_METADATA_FILE = f"{ARRAY_METADATAS}/process_0"

Kind = Literal[
    "np.ndarray", "jax.Array", "scalar", "string", "None", "Dict", "List", "Tuple", "NamedTuple"
]
"""`value_type` of a leaf or empty container."""

KINDS: frozenset[str] = frozenset(get_args(Kind))

EMPTY = frozenset(("None", "Dict", "List", "Tuple", "NamedTuple"))
"""Kinds of empty containers."""

KEY_TYPES = {True: 1, False: 2}
"""`key_type` of a key: 1 for an index of a list or tuple."""

_VALUES = {
    kind: f'"value_type":"{kind}","skip_deserialize":{"true" if kind in EMPTY else "false"}'
    for kind in KINDS
}
_PLAIN_KEYS = re.compile(r"[A-Za-z0-9_.\- ]*")
"""Keys that Python's `repr` and JSON write unchanged."""

OrbaxPath = Sequence[tuple[str, bool]]
"""Keys from the root, and whether each is an index of a list or tuple."""


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """Leaf or empty container of the tree.

    Attributes:
        path: an `OrbaxPath`; fields of namedtuples and dataclasses are dictionary keys.
        kind: ``np.ndarray`` and ``jax.Array`` restore as such or as the target's type, and the
            latter needs `device` without a target; ``scalar`` is a rank-0 array that restores as a
            Python number; ``string`` is in `_strings.json`; the others are empty containers.
        array_name: name of the array in the database; None for strings and empty containers.
        shape: stored shape of a ``jax.Array``; for keys, with their data dimension.
        chunk_shape: chunk shape of a ``jax.Array``.
        device: ``jax.Array`` only: `str` of the device to restore to without a target.
        key_impl: ``jax.Array`` only: implementation of a typed PRNG key, such as ``threefry2x32``.
        text: the value of a ``string`` leaf.
    """

    path: tuple[tuple[str, bool], ...]
    kind: Kind
    array_name: str | None = None
    shape: tuple[int, ...] = ()
    chunk_shape: tuple[int, ...] = ()
    device: str | None = None
    key_impl: str | None = None
    text: str = ""

    @property
    def orbax_name(self) -> str:
        """Name under which Orbax looks for the leaf."""
        return ".".join(map(itemgetter(0), self.path))


class OrbaxArrays(NamedTuple):
    """Array and scalar leaves of one container, stored under the names that Orbax expects.

    Nearly all leaves belong to one: they need no object each.

    Attributes:
        base: path of the container.
        in_sequence: whether the container is a list or tuple.
        keys: key of every leaf in the container.
        kinds: ``np.ndarray`` or ``scalar``, per leaf.
        names: names under which Orbax looks for the leaves.
    """

    base: OrbaxPath
    in_sequence: bool
    keys: Sequence[str]
    kinds: Sequence[Kind]
    names: Sequence[str]


def conflicts(leaves: Sequence[OrbaxLeaf | OrbaxArrays]) -> list[str]:
    """Return the Orbax names of leaves that Orbax would not find or would confuse with others.

    These are arrays stored under other names than Orbax expects, leaves with equal Orbax names,
    strings with equal places in `_strings.json`, and a tree that is a single leaf.
    """
    _, bad = _place_strings(leaves)
    names: list[str] = []
    for leaf in leaves:
        if isinstance(leaf, OrbaxArrays):
            names += leaf.names
            continue
        name = leaf.orbax_name
        if leaf.kind not in EMPTY or not leaf.path:
            names.append(name)
        if not leaf.path or leaf.array_name not in (None, name):
            bad.add(name)
    if len(set(names)) < len(names):
        bad |= {name for name, count in Counter(names).items() if count > 1}
    return [name for name in names if name in bad] if bad else []


def _place_strings(
    leaves: Iterable[OrbaxLeaf | OrbaxArrays],
) -> tuple[dict[str, JsonValue], set[str]]:
    """Return the content of `_strings.json`, and the names of strings that it cannot hold."""
    document: dict[str, JsonValue] = {}
    refused: set[str] = set()
    for leaf in leaves:
        if isinstance(leaf, OrbaxArrays) or leaf.kind != "string":
            continue
        if re.search("~(?![01])", leaf.orbax_name) or not is_unicode(leaf.text):
            refused.add(leaf.orbax_name)
            continue
        *parents, last = string_keys(leaf.orbax_name)
        at: JsonValue = document
        for key in parents:
            at = at.setdefault(key, {}) if isinstance(at, dict) else None
        if isinstance(at, dict) and last not in at:
            at[last] = leaf.text
        else:
            refused.add(leaf.orbax_name)
    return document, refused


def string_keys(name: str) -> list[str]:
    """Return the keys from the root of `_strings.json` to the string of this name.

    Orbax reads it by the JSON pointer ``/<name>`` without escaping the name: ``/`` descends, ``~1``
    means ``/`` and ``~0`` means ``~``.
    """
    return [part.replace("~1", "/").replace("~0", "~") for part in name.split("/")]


def encode_files(leaves: Sequence[OrbaxLeaf | OrbaxArrays]) -> dict[str, bytes]:
    """Encode all files that Orbax needs in addition to the database, by path in its directory."""
    entries: list[bytes] = []
    sharding: dict[str, str] = {}
    arrays: list[JsonValue] = []
    for leaf in leaves:
        if isinstance(leaf, OrbaxArrays):
            values = map(_VALUES.__getitem__, leaf.kinds)
            entries.append(_entries(leaf.base, leaf.in_sequence, leaf.keys, values))
            continue
        value = _VALUES[leaf.kind]
        if leaf.kind == "jax.Array":
            value += f',"write_shape":{list(leaf.shape)}'
            if leaf.device is not None:
                device = {"sharding_type": "SingleDeviceSharding", "device_str": leaf.device}
                at = base64.urlsafe_b64encode(leaf.orbax_name.encode()).decode()
                sharding[at] = json.dumps(device)
            if leaf.key_impl is not None:
                facts: JsonValue = {
                    "param_name": leaf.orbax_name,
                    "write_shape": list(leaf.shape),
                    "chunk_shape": list(leaf.chunk_shape),
                    "ext_metadata": {"random_key_impl": leaf.key_impl},
                }
                arrays.append({"array_metadata": facts})
        if leaf.path:
            *base, (key, in_sequence) = leaf.path
            entries.append(_entries(base, in_sequence, [key], [value]))
        else:
            entries.append(f'"()":{{"key_metadata":[],"value_metadata":{{{value}}}}}'.encode())
    rest = {
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    tree, last = b",".join(entries), json.dumps(rest)[1:].encode()
    files = {METADATA_FILE: b'{"tree_metadata":{%b},%b' % (tree, last)}
    strings, _ = _place_strings(leaves)
    if strings:
        files[STRINGS_FILE] = json.dumps(strings).encode()
    if sharding:
        files[SHARDING_FILE] = json.dumps(sharding).encode()
    if arrays:
        files[ARRAY_METADATA_FILE] = json.dumps({"array_metadatas": arrays}).encode()
    return files


def _entries(
    base: OrbaxPath, in_sequence: bool, keys: Sequence[str], values: Iterable[str]
) -> bytes:
    """Return the members of `tree_metadata` for the children of one container.

    The name of each is the `repr` of a tuple of strings: ``('a', 'b')``, and ``('a',)`` for one.
    """
    escaped = encode_basestring_ascii
    first = escaped("(" + "".join([f"{key!r}, " for key, _ in base]))[:-1]
    parents = "".join([f'{{"key":{escaped(key)},"key_type":{KEY_TYPES[s]}}},' for key, s in base])
    second = f'{")" if base else ",)"}":{{"key_metadata":[{parents}{{"key":"'
    third = f'","key_type":{KEY_TYPES[in_sequence]}}}],"value_metadata":{{'
    pairs = zip(keys, values, strict=True)
    if _PLAIN_KEYS.fullmatch("".join(keys)):
        members = [f"{first}'{key}'{second}{key}{third}{value}}}}}" for key, value in pairs]
    else:
        members = [
            f"{first}{escaped(repr(key))[1:-1]}{second}{escaped(key)[1:-1]}{third}{value}}}}}"
            for key, value in pairs
        ]
    return ",".join(members).encode()
