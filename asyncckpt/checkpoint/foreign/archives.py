"""Archives of `torch.save` in the files of a DCP checkpoint.

For tensors only the head is read, which gives the place and order of the elements; other values
are read whole and decoded.
"""

# Rule: damage to an archive is recorded as the fault of its entry, not raised: other entries may be
#   intact.

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncckpt.checkpoint.foreign.listing import Listing, Range, batches, located
from asyncckpt.checkpoint.foreign.raw import Run
from asyncckpt.errors import AsyncCheckpointError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.damage import corrupt, unsupported
from asyncckpt.format.foreign.foreign_tree import structure_of
from asyncckpt.format.foreign.torch.dcp import Entry, Item, layout_of
from asyncckpt.format.foreign.torch.torch_pickle import DTYPES, SavedTensor, load_tree
from asyncckpt.format.foreign.torch.torch_zip import (
    HEAD_NBYTES,
    LONG_HEAD_NBYTES,
    Archive,
    ShortHeadError,
)
from asyncckpt.format.foreign.torch.unpickle import ALLOWANCE_RATIO, Allowance
from asyncckpt.options import MIB
from asyncckpt.spec import ITEMSIZES, array_spec

MAX_VALUE_NBYTES = 256 * MIB
"""Longest archive of a value other than a tensor, which is read when a checkpoint is opened."""

GAP_NBYTES = 16 << 10
"""Largest gap between two heads that one read covers."""

MAX_HEADS = 4096
"""Distinct heads that are cached."""

HEAD_OBJECTS_NBYTES = 1 * MIB
"""Memory for the temporary objects of one head."""


class _Want(NamedTuple):
    """First bytes, or all, of the archive of shard `shard` of entry `number`."""

    range: Range
    number: int
    shard: int


class Archives:
    """Decoded archives of a checkpoint.

    Attributes:
        values: decoded values, by number of the entry.
        runs: places of shards, by numbers of the entry and of the shard in it.
        inner_runs: places of the tensors in values, by `id`.
        faults: the reason why an entry cannot be read, by its number.
    """

    def __init__(self, listing: Listing, entries: Sequence[Entry], allowance: Allowance) -> None:
        self.values: dict[int, object] = {}
        self.runs: dict[tuple[int, int], Run] = {}
        self.inner_runs: dict[int, Run] = {}
        self.faults: dict[int, AsyncCheckpointError] = {}
        self._listing = listing
        self._file_numbers = {path: number for number, path in enumerate(listing.nbytes_of)}
        self._entries = entries
        self._allowance = allowance
        self._heads: dict[bytes, tuple[SavedTensor, int]] = {}
        self._head_sizes: list[int] = []

    async def read(self) -> None:
        """Find the value, the runs or the fault of every entry.

        Raises:
            StoreError: reading failed.
        """
        # In file order, so that adjacent archives are in one batch.
        for batch in batches(sorted(self._wants()), lambda want: want.range[2]):
            heads = await self._listing.read([want.range for want in batch], GAP_NBYTES)
            for want, head in zip(batch, heads, strict=True):
                try:
                    self._take(want, head)
                except ShortHeadError:
                    path, offset, _ = want.range
                    item = self._entries[want.number].items[want.shard]
                    longer = (path, offset, min(item.nbytes, LONG_HEAD_NBYTES))
                    self._take(want, *await self._listing.read([longer]))

    def _wants(self) -> Iterator[_Want]:
        """Yield the range to read of every archive that is not at fault."""
        for number, entry in enumerate(self._entries):
            for shard, item in enumerate(entry.items):
                with self._recording(number):
                    _check(entry, item, self._listing.nbytes_of[item.file])
                    nbytes = item.nbytes if entry.shape is None else min(item.nbytes, HEAD_NBYTES)
                    yield _Want((item.file, item.offset, nbytes), number, shard)

    def _take(self, want: _Want, data: bytes) -> None:
        entry = self._entries[want.number]
        item = entry.items[want.shard]
        with self._recording(want.number):
            what = f"the archive of {entry.key[:200]!r}"
            archive = Archive(data, item.nbytes, what, item.file, item.offset)
            if entry.shape is None:
                self._allowance.left += ALLOWANCE_RATIO * len(data)
                self.values[want.number] = self._value(archive, entry)
            else:
                self.runs[want.number, want.shard] = self._run(archive, entry, want.shard)

    def _run(self, archive: Archive, entry: Entry, shard: int) -> Run:
        """Return the place of a shard's elements, from the head of its archive.

        Raises:
            ShortHeadError: the head is longer than the bytes read.
        """
        tensor, payload = self._head(archive)
        box, file = entry.boxes[shard], self._file_numbers[entry.items[shard].file]
        spec = array_spec(box.shape, entry.dtype)
        layout = layout_of(archive, tensor, spec.shape, entry.dtype)
        start = payload + tensor.offset * spec.itemsize
        if start + spec.nbytes > archive.nbytes:
            raise archive.corrupt(
                f"{spec} from byte {start} on does not fit into its {archive.nbytes} bytes"
            )
        return Run(box.offset, box.shape, file, archive.base + start, layout)

    def _value(self, archive: Archive, entry: Entry) -> object:
        """Return the value of an archive, and find the runs of the tensors in it."""
        pickle = archive.pickle()
        value, storages, nbytes = load_tree(pickle, self._allowance, len(entry.path))
        tensors = [leaf for leaf in structure_of(value)[1] if isinstance(leaf, SavedTensor)]
        sizes = {key: storage.nbytes for key, storage in storages.items()}
        starts = archive.payloads(nbytes, sizes) if tensors else {}
        file = self._file_numbers[entry.items[0].file]
        for tensor in tensors:
            shape, layout, start = tensor.shape, None, 0
            if 0 not in shape:
                layout = layout_of(archive, tensor, shape, tensor.dtype)
                start = starts[tensor.storage.key] + tensor.offset * ITEMSIZES[tensor.dtype]
            run = Run((0,) * len(shape), shape, file, archive.base + start, layout)
            self.inner_runs[id(tensor)] = run
        return value

    def _head(self, archive: Archive) -> tuple[SavedTensor, int]:
        """Return the tensor and the start of its payload. Similar tensors have equal heads."""
        for size in self._head_sizes:
            known = self._heads.get(archive.data[:size])
            if known is not None:
                return known
        tensor, payload = archive.tensor(Allowance(HEAD_OBJECTS_NBYTES))
        if len(self._heads) < MAX_HEADS:
            self._heads[archive.data[:payload]] = tensor, payload
            if payload not in self._head_sizes:
                self._head_sizes.append(payload)
        return tensor, payload

    @contextlib.contextmanager
    def _recording(self, number: int) -> Iterator[None]:
        """Record an error of parsers as the fault of an entry."""
        try:
            with located(self._listing.files):
                yield
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            # A copy: the error's traceback would keep half-decoded objects alive. It is dropped,
            # because with Python 3.13, its frames lead back to the error.
            self.faults[number] = copy.copy(error)
            error.__traceback__ = None


def _check(entry: Entry, item: Item, size: int) -> None:
    """Check that the archive is within its file of `size` bytes and can be restored."""
    end = item.offset + item.nbytes
    where = f"{entry.key[:200]!r}"
    if end > size:
        reason = f"it is truncated: the archive of {where} ends at byte {end}, the file at {size}"
        raise corrupt("the file", reason, file=item.file, offset=size, expected=end, found=size)
    found = ""
    if entry.shape is None and item.nbytes > MAX_VALUE_NBYTES:
        found = f"a value of {item.nbytes} bytes that is not a tensor"
    elif entry.shape is not None and entry.dtype not in DTYPES:
        found = f"a tensor of the dtype {entry.dtype}"
    if found:
        raise unsupported(
            f"{where} is {found}, which is not restored; save it as a tensor of another dtype, or "
            "leave it out with include=",
            file=item.file,
            offset=item.offset,
            expected=DTYPES,
            found=found,
        )
