"""Encoding of a B+tree: nodes filled from sorted columns, leaves first, the root last.

Leaf body: height 0 `uint8`; data-file table; entry count; key columns (shared prefix lengths of all
but the first, suffix lengths, suffixes); value lengths; value kinds (0 inline, 1 indirect); data
file and offset of the indirect ones; inline values. Interior body: the same with the length of the
prefix common to each subtree before the suffixes, and for every child its data file, offset,
length, number of keys, tree bytes and indirect value bytes.
"""

# Rule 1: keys in a node omit the common prefix that its parent declares; the root omits nothing.
# Rule 2: all numbers of a node are columns: there is no Python step per key.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncckpt.format.ocdbt.datafiles import Location, encode_data_files
from asyncckpt.format.ocdbt.keys import KeyColumns
from asyncckpt.format.ocdbt.wire import (
    FRAME_HEADER,
    I64,
    NODE_MAGIC,
    encode_varint,
    encode_varints,
    frame_of,
    varint_sizes,
)

MAX_ARITY = 1 << 20
"""Entries per node; the limit of TensorStore."""

MAX_HEIGHT = 255
"""Heights are one byte."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueColumns:
    """Values of all keys, in key order.

    Attributes:
        inline: the value itself; empty if it is in a data file.
        file: index into the data files, -1 for inline values.
        offset: its first byte in that file; ignored for inline values.
        nbytes: its length; ignored for inline values.
    """

    inline: Sequence[bytes | memoryview]
    file: I64
    offset: I64
    nbytes: I64


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTree:
    """Nodes to write, and their description for the manifest.

    Attributes:
        blocks: nodes to be written one after the other, starting at the given node offset.
        root: location of the root, or None for a tree without keys.
        inline_offset: offset in the node file of every inline value, -1 for indirect ones. Nodes
            are not compressed, so that a reader may read the value there.
    """

    blocks: list[bytearray]
    root: Location | None
    root_height: int
    num_keys: int
    tree_nbytes: int
    indirect_value_nbytes: int
    inline_offset: I64


@dataclass(frozen=True, slots=True, eq=False)
class _Children:
    """One level of finished nodes: first key, common prefix, location and statistics of each."""

    key: I64
    prefix: I64
    offset: I64
    nbytes: I64
    num_keys: I64
    tree_nbytes: I64
    indirect_nbytes: I64


def encode_tree(
    columns: KeyColumns,
    values: ValueColumns,
    *,
    data_files: Sequence[str],
    node_file: str,
    node_offset: int,
    max_decoded_node_nbytes: int,
) -> EncodedTree:
    """Encode the nodes of the tree that maps the keys to the values.

    Node bodies are at most `max_decoded_node_nbytes` long, except those that cannot be split: a
    leaf of one entry and an interior node of two.
    """
    count = len(columns)
    if not count:
        return EncodedTree([], None, 0, 0, 0, 0, np.empty(0, np.int64))
    nbytes = values.nbytes.copy()
    indirect = values.file >= 0
    inline = np.flatnonzero(~indirect)
    inlined = map(values.inline.__getitem__, inline.tolist())
    nbytes[inline] = np.fromiter(map(len, inlined), np.int64, inline.size)
    values = replace(values, nbytes=nbytes)
    groups = _split_leaves(columns, values, data_files, max_decoded_node_nbytes)
    blocks: list[bytearray] = []
    inline_offset = np.full(count, -1, np.int64)
    offset = node_offset
    is_root = len(groups) == 2
    prefixes = np.zeros(1, np.int64) if is_root else _common_prefixes(columns, groups)
    for start, stop, prefix in zip(groups, groups[1:], prefixes.tolist(), strict=False):
        head = _encode_leaf(columns, values, data_files, start, stop, prefix)
        rows = start + np.flatnonzero(~indirect[start:stop])
        sizes = nbytes[rows]
        inline_offset[rows] = offset + FRAME_HEADER + len(head) + np.cumsum(sizes) - sizes
        inline_values = [value for value in values.inline[start:stop] if value]
        blocks.append(frame_of(NODE_MAGIC, [head, *inline_values]))
        offset += len(blocks[-1])
    starts = np.array(groups[:-1], np.int64)
    block_nbytes = np.array(list(map(len, blocks)), np.int64)
    level = _Children(
        key=starts,
        prefix=prefixes,
        offset=node_offset + np.cumsum(block_nbytes) - block_nbytes,
        nbytes=block_nbytes,
        num_keys=np.array(groups[1:], np.int64) - starts,
        tree_nbytes=block_nbytes,
        indirect_nbytes=np.add.reduceat(np.where(indirect, nbytes, 0), starts),
    )
    height = 0
    while level.key.size > 1:
        height += 1
        if height > MAX_HEIGHT:
            raise ValueError(f"the tree is higher than {MAX_HEIGHT}")
        level, offset = _encode_level(
            columns, level, height, blocks, node_file, offset, max_decoded_node_nbytes
        )
    return EncodedTree(
        blocks,
        Location(node_file, int(level.offset[0]), int(level.nbytes[0])),
        height,
        count,
        int(level.tree_nbytes[0]),
        int(level.indirect_nbytes[0]),
        inline_offset,
    )


def _split_leaves(
    columns: KeyColumns, values: ValueColumns, data_files: Sequence[str], max_nbytes: int
) -> list[int]:
    count, indirect = len(columns), values.file >= 0
    suffix = columns.lengths - columns.shared
    cost = varint_sizes(columns.shared) + varint_sizes(suffix) + suffix
    cost += varint_sizes(values.nbytes) + 1
    place = varint_sizes(np.maximum(values.file, 0)) + varint_sizes(np.maximum(values.offset, 0))
    cost += np.where(indirect, place, values.nbytes)
    # A node lists the files it uses. Every change to a file among the entries counts as one
    # listing, limited to the cost of all files together.
    path_nbytes = np.array([0, *map(len, map(str.encode, data_files))], np.int64)[
        -len(data_files) :
    ]
    file_cost = path_nbytes + 2 * varint_sizes(path_nbytes) + 1
    rows = np.flatnonzero(indirect)
    files = values.file[rows]
    change = np.ones(rows.size, np.bool_)
    change[1:] = files[1:] != files[:-1]
    runs = np.zeros(count, np.int64)
    runs[rows[change]] = file_cost[files[change]]
    all_files = int(file_cost[np.unique(files)].sum()) if rows.size else 0
    first_file = int(file_cost.max())  # a node may begin within a run
    head = 1 + len(encode_varint(len(data_files))) + len(encode_varint(count))
    first = head + columns.shared + varint_sizes(columns.lengths)
    return _split(cost, runs, first, first_file, all_files, max_nbytes, least=1)


def _split(
    cost: I64,
    runs: I64,
    first: I64,
    first_run: int,
    all_runs: int,
    max_nbytes: int,
    *,
    least: int,
) -> list[int]:
    """Return boundaries of runs of `least` or more entries that fit in `max_nbytes`."""
    count = cost.size
    sums = np.zeros(count + 1, np.int64)
    np.cumsum(cost, out=sums[1:])
    with_runs = np.zeros(count + 1, np.int64)
    np.cumsum(cost + runs, out=with_runs[1:])
    bounds = [0]
    start = 0
    while start < count:
        room = max_nbytes - int(first[start])
        stop = max(
            int(np.searchsorted(sums, sums[start] + room - all_runs, "right")) - 1,
            int(np.searchsorted(with_runs, with_runs[start] + room - first_run, "right")) - 1,
            start + least,
        )
        start = min(stop, count, start + MAX_ARITY)
        bounds.append(start)
    return bounds


def _common_prefixes(columns: KeyColumns, groups: Sequence[int]) -> I64:
    """Return the length of the prefix common to each group; of the key if it is a single one."""
    starts = np.array(groups[:-1], np.int64)
    shared = columns.shared.copy()
    shared[starts] = columns.lengths[starts]
    return np.minimum.reduceat(shared, starts)


def _encode_leaf(
    columns: KeyColumns,
    values: ValueColumns,
    data_files: Sequence[str],
    start: int,
    stop: int,
    prefix: int,
) -> bytes:
    """Return the body of a leaf up to its inline values."""
    rows = slice(start, stop)
    lengths = columns.lengths[rows] - columns.shared[rows]
    lengths[0] = columns.lengths[start] - prefix
    in_file = values.file[rows] >= 0
    used, local = np.unique(values.file[rows][in_file], return_inverse=True)
    suffixes = columns.suffixes[columns.suffix_ends[start + 1] : columns.suffix_ends[stop]]
    return b"".join(
        (
            b"\0",
            encode_data_files(list(map(data_files.__getitem__, used.tolist()))),
            encode_varint(stop - start),
            encode_varints(columns.shared[start + 1 : stop] - prefix),
            encode_varints(lengths),
            columns.key(start)[prefix:],
            suffixes,
            encode_varints(values.nbytes[rows]),
            in_file.astype(np.uint8).tobytes(),
            encode_varints(local.reshape(-1).astype(np.int64)),
            encode_varints(values.offset[rows][in_file]),
        )
    )


def _encode_level(
    columns: KeyColumns,
    children: _Children,
    height: int,
    blocks: list[bytearray],
    node_file: str,
    offset: int,
    max_nbytes: int,
) -> tuple[_Children, int]:
    """Append the interior nodes above `children` to `blocks`; return them and the next offset."""
    lengths = columns.lengths[children.key]
    shared = np.zeros(children.key.size, np.int64)
    # Two keys of a sorted list share as much as all neighbours between them do.
    shared[1:] = np.minimum.reduceat(np.append(columns.shared, 0), children.key + 1)[:-1]
    suffix = lengths - shared
    table = encode_data_files([node_file])
    fields = (
        children.offset,
        children.nbytes,
        children.num_keys,
        children.tree_nbytes,
        children.indirect_nbytes,
    )
    cost = suffix + 1
    for column in (shared, suffix, children.prefix, *fields):
        cost += varint_sizes(column)
    first = 1 + len(table) + len(encode_varint(lengths.size)) + shared + varint_sizes(lengths)
    bounds = _split(cost, np.zeros_like(cost), first, 0, 0, max_nbytes, least=2)
    starts = np.array(bounds[:-1], np.int64)
    is_root = starts.size == 1
    prefixes = np.zeros(1, np.int64)
    if not is_root:
        common = shared.copy()
        common[starts] = children.prefix[starts]
        prefixes = np.minimum.reduceat(np.minimum(common, children.prefix), starts)
    sizes = []
    for start, stop, prefix in zip(bounds, bounds[1:], prefixes.tolist(), strict=False):
        rows = slice(start, stop)
        own = suffix[rows].copy()
        own[0] = lengths[start] - prefix
        keys = list(map(columns.key, children.key[rows].tolist()))
        cuts = [prefix, *shared[start + 1 : stop].tolist()]
        parts = (
            bytes([height]),
            table,
            encode_varint(stop - start),
            encode_varints(shared[start + 1 : stop] - prefix),
            encode_varints(own),
            encode_varints(children.prefix[rows] - prefix),
            *(key[cut:] for key, cut in zip(keys, cuts, strict=True)),
            bytes(stop - start),
            *(encode_varints(column[rows]) for column in fields),
        )
        blocks.append(frame_of(NODE_MAGIC, parts))
        sizes.append(len(blocks[-1]))
    nbytes = np.array(sizes, np.int64)
    above = _Children(
        key=children.key[starts],
        prefix=prefixes,
        offset=offset + np.cumsum(nbytes) - nbytes,
        nbytes=nbytes,
        num_keys=np.add.reduceat(children.num_keys, starts),
        tree_nbytes=np.add.reduceat(children.tree_nbytes, starts) + nbytes,
        indirect_nbytes=np.add.reduceat(children.indirect_nbytes, starts),
    )
    return above, offset + int(nbytes.sum())
