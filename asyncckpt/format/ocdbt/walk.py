"""Decoding of a whole tree, level by level, from nodes that the caller fetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.damage import corrupt
from asyncckpt.format.ocdbt.datafiles import MAX_DATA_FILES, Location
from asyncckpt.format.ocdbt.manifest import Version
from asyncckpt.format.ocdbt.nodes import MAX_KEYS_NBYTES, Child, Value, decode_node
from asyncckpt.format.ocdbt.wire import FRAME_OVERHEAD, MAX_BODY_NBYTES

# Allowances that do not depend on the size of the files.
_FREE_NODES = 1 << 10
_FREE_KEYS = 1 << 17
_FREE_FILES = 1 << 10
_FREE_NBYTES = 16 << 20

_MAX_RATIO = 1 << 10
"""Highest compression ratio beyond `_FREE_NBYTES`, of each node and of all inline values together:
Orbax's documents of equal arrays reach 250."""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds for decoding one tree.

    Attributes:
        max_keys_nbytes: bytes of all keys, including shared prefixes.
        max_nodes_nbytes: stored bytes of all nodes.
        max_files: data files that one node names.
    """

    max_nodes: int = 1 << 20
    max_keys: int = 1 << 24
    max_keys_nbytes: int = MAX_KEYS_NBYTES
    max_nodes_nbytes: int = 1 << 32
    max_files: int = MAX_DATA_FILES

    @classmethod
    def of_files(cls, count: int, nbytes: int) -> TreeLimits:
        """Return the limits of a database of `count` files with `nbytes` in total.

        Nodes do not overlap and take at least 18 bytes. A key with a small value takes 16 or more,
        even in compressed nodes. Keys may take as many bytes as the files: enough even though they
        share prefixes.
        """
        most = cls()
        return cls(
            max_nodes=min(most.max_nodes, _FREE_NODES + nbytes // FRAME_OVERHEAD),
            max_keys=min(most.max_keys, _FREE_KEYS + nbytes // 16),
            max_keys_nbytes=min(most.max_keys_nbytes, _FREE_NBYTES + nbytes),
            max_nodes_nbytes=nbytes,
            max_files=min(most.max_files, _FREE_FILES + count),
        )


class TreeDecoder:
    """Decoder of the nodes of one version.

    While `wanted` is not empty, fetch its ranges and pass their bytes to `feed` in the same order.
    Then `values` has the values of all keys, in the order of the keys. Their paths are `base`
    followed by a path relative to the database.
    """

    def __init__(
        self, version: Version, limits: TreeLimits | None = None, *, base: str = ""
    ) -> None:
        self.values: dict[bytes, Value] = {}
        self._limits = limits or TreeLimits()
        self._base = base
        self._height = version.root_height
        self._level: list[Child] = []
        self._last_key: bytes | None = None
        self._nodes = 0
        self._nbytes = 0
        self._keys_nbytes = 0
        self._values_nbytes = 0
        if version.root is not None:
            self._admit(1, version.root.nbytes, version.root)
            self._level = [Child(version.root, b"", b"", version.num_keys)]

    @property
    def wanted(self) -> list[Location]:
        """Ranges to fetch next: all nodes of one level, in key order."""
        return [node.location for node in self._level]

    def feed(self, blocks: Sequence[bytes]) -> None:
        """Decode the nodes of one level; `wanted` then has those of the next.

        Raises:
            CorruptCheckpointError: a node is damaged or misplaced, or the tree exceeds a limit.
        """
        children: list[Child] = []
        for want, data in zip(self._level, blocks, strict=True):
            children += self._decode(want, data)
        self._height -= 1
        self._level = children

    def _admit(self, count: int, nbytes: int, where: Location) -> None:
        """Count nodes of `nbytes` in total, and raise if they exceed the limits."""
        limits = self._limits
        self._nodes += count
        self._nbytes += nbytes
        if self._nodes > limits.max_nodes:
            raise _fault(where, f"the tree has more than {limits.max_nodes} nodes")
        if self._nbytes > limits.max_nodes_nbytes:
            raise _fault(where, f"the tree has over {limits.max_nodes_nbytes} bytes")

    def _decode(self, want: Child, data: bytes) -> list[Child]:
        """Decode one node: add the values of a leaf, or return the children of an interior node."""
        where = want.location
        if len(data) != where.nbytes:
            raise _fault(where, f"{len(data)} bytes were read instead of {where.nbytes}")
        limits = self._limits
        node = decode_node(
            data,
            file=where.file,
            offset=where.offset,
            expected_height=self._height,
            base_path=where.base_path,
            key_prefix=want.prefix,
            max_nbytes=min(MAX_BODY_NBYTES, _FREE_NBYTES + _MAX_RATIO * len(data)),
            max_keys_nbytes=limits.max_keys_nbytes - self._keys_nbytes,
            max_entries=limits.max_nodes if self._height else limits.max_keys,
            max_files=limits.max_files,
            values_base=self._base,
        )
        if isinstance(node, dict):
            keys, num_keys = list(node), len(node)
        else:
            keys, num_keys = [c.first_key for c in node], sum(c.num_keys for c in node)
        if num_keys != want.num_keys:
            raise _fault(where, f"it has {num_keys} keys, its parent says {want.num_keys}")
        if keys[0] < want.first_key:
            raise _fault(where, "its first key sorts before what its parent says")
        self._keys_nbytes += sum(map(len, keys))
        if not isinstance(node, dict):
            self._admit(len(node), sum(child.location.nbytes for child in node), where)
            return node
        if len(self.values) + len(keys) > limits.max_keys:
            raise _fault(where, f"the tree has more than {limits.max_keys} keys")
        self._values_nbytes += sum(map(len, node.values()))  # a place counts as 3
        if self._values_nbytes > (most := _FREE_NBYTES + _MAX_RATIO * self._nbytes):
            raise _fault(where, f"the values of the tree take over {most} bytes")
        if self._last_key is not None and self._last_key >= keys[0]:
            raise _fault(where, "its keys do not sort after those of the leaf before it")
        self._last_key = keys[-1]
        self.values |= node
        return []


def decode_tree(
    version: Version, fetch: Callable[[Location], bytes], *, limits: TreeLimits | None = None
) -> dict[bytes, Value]:
    """Return the values of a version by key; `fetch` returns the bytes of a node."""
    decoder = TreeDecoder(version, limits)
    while wanted := decoder.wanted:
        decoder.feed([fetch(location) for location in wanted])
    return decoder.values


def _fault(where: Location, reason: str) -> CorruptCheckpointError:
    return corrupt("the B+tree node", reason, file=where.file, offset=where.offset)
