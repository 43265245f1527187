"""Encoding of a B+tree: nodes filled from sorted columns, leaves first, the root last.

Leaf body: height 0 `uint8`; data-file table; entry count; key columns (shared prefix lengths of all
but the first, suffix lengths, suffixes); value lengths; value kinds (0 inline, 1 indirect); data
file and offset of the indirect ones; inline values. Interior body: the same with the length of the
prefix common to each subtree before the suffixes, and for every child its data file, offset,
length, number of keys, tree bytes and indirect value bytes.
"""

# Rule 1: keys in a node omit the common prefix that its parent declares; the root omits nothing.
# Rule 2: all numbers of a node are columns, so that no Python code runs per key.
# Rule 3: every interior node except the last of its height has at least two children, so that
#   heights stay below 64 and fit in their byte.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.format.ocdbt.datafiles import Location, encode_data_files
from asyncckpt.format.ocdbt.keys import KeyColumns, prepare_keys
from asyncckpt.format.ocdbt.manifest import Version
from asyncckpt.format.ocdbt.wire import (
    FRAME_TRAILER,
    I64,
    NODE_MAGIC,
    encode_varint,
    encode_varints,
    frame,
    varint_sizes,
)

MAX_ARITY = 1 << 20
"""Entries per node; the limit of TensorStore."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueColumns:
    """Values of all keys, in key order.

    Attributes:
        buffers: buffers of the inline values.
        file: index into the data files; for inline values -1 minus the index of the buffer.
        offset: first byte in that file or buffer.
        nbytes: length.
    """

    buffers: Sequence[bytes | bytearray]
    file: I64
    offset: I64
    nbytes: I64


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTree:
    """Nodes of a tree, and the version of the database that they form.

    Attributes:
        blocks: consecutive nodes, from the given node offset on.
        version: the first version of a database; its root is None for a tree without keys.
        inline_offset: offset in the node file of every inline value, -1 for indirect ones. Readers
            may read a value there, because nodes are not compressed.
    """

    blocks: list[bytearray]
    version: Version
    inline_offset: I64


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Entries of all nodes of one height, by column: values, or the nodes below.

    Attributes:
        keys: the key of each value, or the first key of each node.
        prefix: length of the prefix that all keys of a node share; of a value, that of its key.
        offset: first byte of the value or node in its file.
        tree_nbytes: bytes of all nodes from the entry down.
        indirect_nbytes: bytes of all values of the entry in data files.
    """

    keys: KeyColumns
    prefix: I64
    offset: I64
    nbytes: I64
    num_keys: I64
    tree_nbytes: I64
    indirect_nbytes: I64

    @property
    def child_columns(self) -> tuple[I64, ...]:
        """Columns of an interior node after its keys and data files, in their order."""
        return self.offset, self.nbytes, self.num_keys, self.tree_nbytes, self.indirect_nbytes


def encode_tree(
    columns: KeyColumns,
    values: ValueColumns,
    *,
    data_files: Sequence[str],
    node_file: str,
    node_offset: int,
    max_decoded_node_nbytes: int,
    commit_time_ns: int = 0,
) -> EncodedTree:
    """Encode the nodes of the tree that maps the keys to the values.

    Node bodies have at most `max_decoded_node_nbytes` bytes, unless they cannot be split: a leaf of
    one entry, or an interior node of two.
    """
    count = len(columns)
    none = np.zeros(count, np.int64)
    if not count:
        return EncodedTree([], Version(1, None, 0, 0, 0, 0, commit_time_ns), none)
    nbytes = values.nbytes
    indirect_nbytes = np.where(values.file < 0, 0, nbytes)
    level = _Level(columns, columns.lengths, values.offset, nbytes, none + 1, none, indirect_nbytes)
    bounds = _split_leaves(level, values.file, data_files, max_decoded_node_nbytes)
    inline_offset = none
    blocks: list[bytearray] = []
    height, offset = 0, node_offset
    while True:
        starts = np.array(bounds[:-1], np.int64)
        is_root = starts.size == 1
        prefixes = np.zeros(1, np.int64) if is_root else _common_prefixes(level, starts)
        for start, stop, prefix in zip(bounds, bounds[1:], prefixes.tolist(), strict=False):
            fields = (
                _encode_children(level, node_file, start, stop)
                if height
                else _encode_values(values, data_files, start, stop)
            )
            blocks.append(_encode_node(level, height, start, stop, prefix, *fields))
        sizes = np.array(list(map(len, blocks[-starts.size :])), np.int64)
        offsets = offset + np.cumsum(sizes) - sizes
        if not height:
            inline_offset = _inline_offsets(values, bounds, offsets + sizes)
        if is_root:
            break
        level = _Level(
            keys=prepare_keys(list(map(level.keys.key, starts.tolist()))),
            prefix=prefixes,
            offset=offsets,
            nbytes=sizes,
            num_keys=np.add.reduceat(level.num_keys, starts),
            tree_nbytes=np.add.reduceat(level.tree_nbytes, starts) + sizes,
            indirect_nbytes=np.add.reduceat(level.indirect_nbytes, starts),
        )
        offset += int(sizes.sum())
        height += 1
        bounds = _split_children(level, node_file, max_decoded_node_nbytes)
    root = Location(node_file, offset, len(blocks[-1]))
    totals = count, sum(map(len, blocks)), int(indirect_nbytes.sum())
    return EncodedTree(blocks, Version(1, root, height, *totals, commit_time_ns), inline_offset)


def _split_leaves(
    level: _Level, file: I64, data_files: Sequence[str], max_nbytes: int
) -> list[int]:
    """Return the boundaries of leaves; `file` is the data file of each value."""
    count, indirect = len(level.keys), file >= 0
    cost = varint_sizes(level.nbytes) + 1
    place = varint_sizes(np.maximum(file, 0)) + varint_sizes(np.maximum(level.offset, 0))
    cost += np.where(indirect, place, level.nbytes)
    # A node lists the files that it uses. Every change of file among the entries counts as a
    # listing, up to the cost of all files together.
    path_nbytes = np.array([len(path.encode()) for path in data_files], np.int64)
    file_cost = path_nbytes + 2 * varint_sizes(path_nbytes) + 1
    rows = np.flatnonzero(indirect)
    files = file[rows]
    change = np.ones(rows.size, np.bool_)
    change[1:] = files[1:] != files[:-1]
    runs = np.zeros(count, np.int64)
    runs[rows[change]] = file_cost[files[change]]
    all_files = int(file_cost[np.unique(files)].sum()) if rows.size else 0
    first_file = int(file_cost.max(initial=0))  # a node may begin within a run
    head_nbytes = 1 + len(encode_varint(len(data_files))) + len(encode_varint(count))
    return _split(level.keys, cost, head_nbytes, max_nbytes, runs, first_file, all_files, least=1)


def _split_children(level: _Level, node_file: str, max_nbytes: int) -> list[int]:
    """Return the boundaries of interior nodes."""
    cost = 1 + sum(map(varint_sizes, level.child_columns), start=varint_sizes(level.prefix))
    head_nbytes = 1 + len(encode_data_files([node_file])) + len(encode_varint(len(level.keys)))
    return _split(level.keys, cost, head_nbytes, max_nbytes, least=2)


def _split(
    keys: KeyColumns,
    cost: I64,
    head_nbytes: int,
    max_nbytes: int,
    runs: I64 | int = 0,
    first_run: int = 0,
    all_runs: int = 0,
    *,
    least: int,
) -> list[int]:
    """Return boundaries of nodes of `least` or more entries that fit in `max_nbytes`.

    `cost` has the bytes of each entry without its key, `head_nbytes` those of a node without
    entries. `runs` has the bytes of a file's listing where data files change; `first_run`
    is the most that one file's listing takes, `all_runs` what those of all files take together.
    """
    suffix = keys.lengths - keys.shared
    cost = cost + varint_sizes(keys.shared) + varint_sizes(suffix) + suffix
    first = head_nbytes + keys.shared + varint_sizes(keys.lengths)
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


def _common_prefixes(level: _Level, starts: I64) -> I64:
    """Return the length of the prefix common to each group of entries."""
    shared = level.keys.shared.copy()
    shared[starts] = level.prefix[starts]
    return np.minimum.reduceat(np.minimum(shared, level.prefix), starts)


def _encode_values(
    values: ValueColumns, data_files: Sequence[str], start: int, stop: int
) -> tuple[bytes, list[bytes | bytearray]]:
    """Return the data-file table of a leaf, and its columns after the keys."""
    file, offset, nbytes = (c[start:stop] for c in (values.file, values.offset, values.nbytes))
    in_file = file >= 0
    used, local = np.unique(file[in_file], return_inverse=True)
    # Copies of one node's values: unlike views, the garbage collector does not track them.
    inline = ~in_file
    starts, ends = offset[inline], offset[inline] + nbytes[inline]
    places = zip((-1 - file[inline]).tolist(), starts.tolist(), ends.tolist(), strict=True)
    return encode_data_files(list(map(data_files.__getitem__, used.tolist()))), [
        encode_varints(nbytes),
        in_file.astype(np.uint8).tobytes(),
        encode_varints(local.reshape(-1).astype(np.int64)),
        encode_varints(offset[in_file]),
        *[values.buffers[buffer][start:end] for buffer, start, end in places],
    ]


def _encode_children(
    level: _Level, node_file: str, start: int, stop: int
) -> tuple[bytes, list[bytes | bytearray]]:
    """Return the data-file table of an interior node, and its columns after the keys."""
    columns = [encode_varints(column[start:stop]) for column in level.child_columns]
    return encode_data_files([node_file]), [bytes(stop - start), *columns]


def _encode_node(
    level: _Level,
    height: int,
    start: int,
    stop: int,
    prefix: int,
    table: bytes,
    fields: Sequence[bytes | bytearray],
) -> bytearray:
    """Encode the node of some entries, whose keys it stores without their common prefix."""
    keys = level.keys
    lengths = keys.lengths[start:stop] - keys.shared[start:stop]
    lengths[0] = keys.lengths[start] - prefix
    return frame(
        NODE_MAGIC,
        bytes([height]),
        table,
        encode_varint(stop - start),
        encode_varints(keys.shared[start + 1 : stop] - prefix),
        encode_varints(lengths),
        encode_varints(level.prefix[start:stop] - prefix) if height else b"",
        keys.key(start)[prefix:],
        keys.suffixes[keys.suffix_ends[start + 1] : keys.suffix_ends[stop]],
        *fields,
    )


def _inline_offsets(values: ValueColumns, bounds: Sequence[int], ends: I64) -> I64:
    """Return the offset of every inline value in leaves that end at `ends`; -1 for indirect ones.

    Inline values are the last in a leaf, followed only by its checksum.
    """
    sizes = np.where(values.file < 0, values.nbytes, 0)
    stops = np.cumsum(sizes)
    shift = ends - FRAME_TRAILER - stops[np.array(bounds[1:]) - 1]
    offsets = np.repeat(shift, np.diff(bounds)) + stops - sizes
    return np.where(values.file < 0, offsets, -1)
