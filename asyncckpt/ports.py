"""The seams of the library: stores, array adapters and coordinators.

A protocol here declares only what the pipeline relies on. Implementations are in `stores/`,
`adapters/` and `coordinators/`; `asyncckpt.testing` holds the conformance suites that every `Store`
and `Coordinator` must pass.
"""

# Rule 1: stores see opaque bytes and relative paths; they know no arrays, chunks or records.
# Rule 2: adapters see arrays and host buffers; they know no files.
# Rule 3: a callee may use a buffer until the awaited call has returned or raised, not after.

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import DtypeMismatchError
from asyncckpt.format.claim import Claim as Claim
from asyncckpt.format.record import RECORD_NAME as RECORD_NAME
from asyncckpt.options import DEFAULT_CHUNK_NBYTES
from asyncckpt.spec import ArraySpec, Box, Partition, Shard
from asyncckpt.tree import NodeAdapter as NodeAdapter

T = TypeVar("T")

Bytes = npt.NDArray[np.uint8]
"""A contiguous one-dimensional buffer of bytes."""

Buffer = bytes | bytearray | memoryview
"""A contiguous buffer of bytes, of any kind."""

MAX_MESSAGE_NBYTES = 64 << 10
"""Largest value of a coordinator's key."""

Removal = Callable[[], Coroutine[Any, Any, None]]
"""Removes the bytes of an unlisted checkpoint; called once."""


# --------------------------------------------------------------------------------------- stores


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCapabilities:
    """Abilities and requirements of a store.

    Attributes:
        client_copies: copies of a buffer that the client makes while sending it.
        positional_writes: writes to a data file may have any size; otherwise each is a window.
        read_copies: copies of the bytes that the client makes before they are in the buffers.
        read_nbytes: most memory of these copies per request, if the client passes bytes on as they
            arrive; None if it receives all of them first.
        read_gap_nbytes: largest gap between wanted ranges that is read too, because a separate read
            would take as long.
        reads: reads in flight by default.
        shared_link: processes share the link to the store, so bytes that several of them want
            should be read once.
        proves_dead: `sweep` can distinguish leftovers of dead attempts from live attempts.
    """

    client_copies: int = 0
    positional_writes: bool = True
    read_copies: int = 0
    read_nbytes: int | None = None
    read_gap_nbytes: int = 64 << 10
    reads: int = 6
    shared_link: bool = False
    proves_dead: bool = True

    def copied_nbytes(self, nbytes: int) -> int:
        """Return the memory that the client needs to read `nbytes` in one request."""
        copied = nbytes * self.read_copies
        return copied if self.read_nbytes is None else min(copied, self.read_nbytes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that a save of one state uses.

    Attributes:
        data_file_nbytes: size at which a data file is sealed, in bytes.
        window_nbytes: bytes that are staged, checksummed and written at once: a multiple of the
            page size, and the part size of files on object stores.
        concurrency: most writes in flight.
        chunk_nbytes: upper limit of the target chunk size, so that a chunk lies in one window; None
            for no limit.
        chunk_limit_nbytes: largest chunk that can be stored; None for no limit.
        even_streams: number of concurrent whole-file writes that should end at the same time, for
            which data files may shrink to half their size; None if that gains nothing.
        notes: requested options that could not be met, for the report.
    """

    data_file_nbytes: int
    window_nbytes: int
    concurrency: int
    chunk_nbytes: int | None = None
    chunk_limit_nbytes: int | None = None
    even_streams: int | None = None
    notes: tuple[str, ...] = ()


class DataFile(Protocol):
    """One open data file of a save attempt.

    Attributes:
        path: path of the file, final once it is sealed: a store that sends a part again may use
            another name.
    """

    path: str

    async def write(self, offset: int, data: Bytes | bytearray) -> bool:
        """Write all of `data` at `offset` (not yet durable).

        Parts may be written concurrently and in any order.

        Returns:
            Whether the memory of `data` may be reused at once. False if a request was abandoned
            and sent again: the memory must then not be reused while any view of it is alive.

        Cancellation: raises once the store no longer reads `data`. Without
        `capabilities.positional_writes`, the memory must not be reused while any view of it is
        alive.

        Raises:
            StoreError: names the file and offset; the attempt cannot be continued.
        """

    async def seal(self, nbytes: int) -> None:
        """Make the file exactly `nbytes` long and durable, and close it."""


class AttemptFiles(Protocol):
    """The files of an attempt, invisible until it is published."""

    location: str

    async def create(self, path: str, *, nbytes: int, window_nbytes: int) -> DataFile:
        """Open a new data file for writing.

        Args:
            path: relative path.
            nbytes: expected size; exact without `capabilities.positional_writes`.
            window_nbytes: without `capabilities.positional_writes`, the length and alignment of
                every write; the last may be shorter.
        """

    async def put(self, path: str, *blocks: Buffer, in_record: bool = False) -> None:
        """Write a whole file durably, given consecutive blocks of its content.

        `path` may contain directories. With `in_record`, the record will contain the content too,
        so a store that writes the file after the record need not keep it elsewhere until then.
        """

    async def pass_on(self, path: str, data: bytes | memoryview) -> None:
        """Write a file for the attempt's other processes, not as a part of the checkpoint.

        It need not be durable and is removed when the attempt is published or aborted. `path` is
        one path part that no other process of the attempt uses.
        """

    async def taken(self, path: str, *, max_nbytes: int) -> bytes | None:
        """Return what a process of the attempt has passed on at `path`, or None if nothing yet.

        Raises:
            CorruptCheckpointError: it is larger than `max_nbytes`.
        """

    async def abort(self) -> None:
        """Remove everything of the attempt; ignore files that are already gone."""


class Attempt(AttemptFiles, Protocol):
    """One attempt to publish one checkpoint. It ends with exactly one of `publish` and `abort`."""

    def source(self, path: str) -> str | None:
        """Return where `put` stores the content of `path` until the record is written.

        None if at `path` itself. Otherwise the file gets its name after the record is written, and
        the record must list it (`CommitRecord.fixed`).
        """

    async def publish(self, record: bytes) -> None:
        """Make the checkpoint visible and durable; write `record`, its commit record, last.

        Files that only other programs read may follow in the background (`Store.settled`).

        Cancellation: until the step that makes the checkpoint visible begins, removes everything
        and raises; from then on the outcome is awaited, and returned or raised instead.

        Raises:
            CheckpointExistsError: the name is taken and the attempt was begun without `overwrite`;
                the other checkpoint is untouched.
            FencedError: the claim was taken over; `visible` says whether the checkpoint is part of
                the run nevertheless.
            SaveError: `visible` and `durable` state the outcome. If it is unknown, the files are
                kept.
        """


class JoinedAttempt(AttemptFiles, Protocol):
    """A share of an attempt that another process has begun. It ends with `leave` or `abort`."""

    async def settle(self) -> None:
        """Make the names of all own files durable; all were sealed or put."""

    async def leave(self) -> None:
        """End the share of an attempt that process 0 has published or may still publish.

        Own files stay. If process 0 aborts or dies, stores that can prove it remove them;
        elsewhere gc does.
        """

    async def abort(self) -> None:
        """Remove all own files, ignoring those already gone, because process 0 will not publish.

        The attempt's last live process removes the rest.
        """


class ScatteredFile(DataFile, Protocol):
    """A data file of a store with `capabilities.positional_writes`."""

    async def write_runs(self, offsets: Sequence[int], runs: Sequence[Bytes]) -> None:
        """Write many short runs, each at its own offset (not yet durable).

        Every `write` to the same pages must have returned. Cancellation, errors: as `write`.
        """


class Export(AttemptFiles, Protocol):
    """An attempt that ends in plain files of another format, without a commit record.

    It ends with exactly one of `publish_files` and `abort`.
    """

    async def publish_files(self, path: str = "") -> None:
        """Publish the file `path` of the attempt, or with ``""`` the whole attempt, durably.

        A failure leaves nothing of the attempt. Cancellation, errors: as `Attempt.publish`.
        """


class Entry(NamedTuple):
    """A directory entry: a regular file with its size, or a directory; never a link."""

    name: str
    nbytes: int
    is_directory: bool


class Reading(NamedTuple):
    """Hints on how to read a range of a file.

    Attributes:
        received: called once all bytes have arrived but are not yet in the buffers, so the link is
            free for another read. Stores that cannot tell never call it.
        ahead_nbytes: approximate bytes in flight for a store whose client copies reads; None for no
            limit.
        check: called with the number of bytes read so far, finally all of them, in a thread that
            blocks to read, while the bytes are in its core's cache. Its errors are raised. Stores
            without such a thread ignore it; the caller checks the rest.
        shared: other processes of this host may read the same bytes at the same time, so the store
            should read them through the page cache.
        fresh: the buffers may be untouched memory of the pipeline, about whose pages the store may
            advise the system.
    """

    received: Callable[[], None] | None = None
    ahead_nbytes: int | None = None
    check: Callable[[int], None] | None = None
    shared: bool = False
    fresh: bool = False


ORDINARY = Reading()
"""Reads without hints."""

FRESH = Reading(fresh=True)
"""Reads into possibly untouched memory, without other hints."""


class CheckpointFiles(Protocol):
    """Read access to the files of one checkpoint."""

    location: str
    capabilities: StoreCapabilities

    async def read_into(
        self, path: str, offset: int, buffers: Sequence[Bytes], *, how: Reading = ORDINARY
    ) -> None:
        """Fill consecutive buffers from the file, starting at byte `offset`.

        Cancellation: waits until nothing writes to the buffers, then raises.

        Raises:
            CheckpointNotFoundError: the file does not exist.
            CorruptCheckpointError: the file ends before the last buffer is full.
            StoreError: reading failed.
        """

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """Return the whole content of a small file.

        Raises:
            CheckpointNotFoundError: the file does not exist.
            CorruptCheckpointError: it is larger than `max_nbytes`, not a regular file, or reached
                through a symbolic link.
        """

    async def entries(self, path: str = "", *, max_entries: int) -> list[Entry]:
        """List a directory of the checkpoint, one level, by name.

        A regular file at `path` is the only entry, named ``""``; `read` and `read_into` take the
        path ``""`` for a checkpoint that is itself one file.

        Raises:
            CheckpointNotFoundError: there is nothing at `path`.
            CorruptCheckpointError: more than `max_entries`, or `path` is a symbolic link.
        """

    def reads(self, wanted: int | None) -> int:
        """Return how many reads to keep in flight now; `wanted` is the user's option."""

    async def changed(self) -> Literal["deleted", "replaced"] | None:
        """Return whether the checkpoint was deleted or replaced since; None if neither.

        Raises:
            StoreError: the store cannot tell.
        """

    async def close(self) -> None:
        """Close file descriptors. Idempotent."""


class Store(Protocol):
    """A directory or prefix that holds checkpoints by name.

    Step numbers are names in canonical decimal (`0|[1-9][0-9]{0,18}`); one-shot checkpoints have
    any other single path part. All methods may be called concurrently, on the engine's loop only.
    """

    url: str

    @property
    def capabilities(self) -> StoreCapabilities:
        """Abilities and requirements, as far as known."""

    def sizes(
        self,
        nbytes: int,
        *,
        budget_nbytes: int,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        data_file_nbytes: int | None = None,
        concurrency: int | None = None,
    ) -> Sizes:
        """Return the best sizes for saving a state of `nbytes`.

        Args:
            nbytes: size of the state.
            budget_nbytes: staging memory, including the client's copies.
            chunk_nbytes: target size of chunks.
            data_file_nbytes: size of data files that the caller requests.
            concurrency: writes in flight that the caller requests.
        """

    async def begin(
        self,
        name: str,
        save_id: str,
        *,
        epoch: int = 0,
        overwrite: bool = False,
        private: bool = False,
        shared: bool = False,
    ) -> Attempt:
        """Open an attempt to publish `name`, with its own place for files.

        Args:
            name: one path part.
            save_id: unique identity of the attempt, stored in its record and contained in the paths
                of its data files: 32 lower-case hex digits.
            epoch: claim under which it writes, 0 for none.
            overwrite: replace a checkpoint of this name atomically at `publish`.
            private: create files 0600 and directories 0700 instead of following the umask.
            shared: let other processes `join` it.

        Raises:
            FencedError: the claim is already known to be taken over.
        """

    async def join(
        self, name: str, save_id: str, *, process: int, timeout_s: float, private: bool = False
    ) -> JoinedAttempt:
        """Join an attempt that another process has begun or is about to begin.

        Nothing is written before the attempt's mark was read through the store, which detects
        processes that do not share the root. `process` is the number of this process, above zero
        and unique in the attempt, `timeout_s` limits the wait for it; the others are as in `begin`.

        Raises:
            CheckpointNotFoundError: no such attempt appeared within `timeout_s`.
        """

    async def settled(self) -> None:
        """Wait until published checkpoints are complete for other programs too.

        Failures are logged; a later save, `sweep` or `collect` writes the missing files.

        Cancellation: only stops the waiting.
        """

    async def names(self) -> list[str]:
        """Return the names of all entries that may be checkpoints, valid or not, in no order.

        They may include names of unpublished attempts, and include that of the commit record if the
        root is itself a checkpoint.
        """

    def files(self, name: str) -> CheckpointFiles:
        """Return read access to one checkpoint; nothing is opened yet."""

    async def unlist(self, name: str, *, epoch: int = 0, seal: bytes = b"") -> Removal:
        """Make the checkpoint invisible, durably; return a call that removes its bytes.

        If the process ends before that call, the bytes are a leftover.

        Args:
            name: name of the checkpoint.
            epoch: claim under which it is deleted, 0 for none.
            seal: last bytes of the record of the checkpoint that the caller means.

        Raises:
            CheckpointNotFoundError: there is none whose record ends with `seal`.
            FencedError: the claim was taken over.
        """

    async def claim(self) -> Claim | None:
        """Take over the right to write below this root.

        On return the claim is durable. Checkpoints already published under lower claims stay. Later
        ones do not count: publishing, replacing and deleting under a lower claim raise
        `FencedError`. Epoch 0 is below no claim.

        Returns:
            The claim, with the highest epoch so far; None if the store has no claims, because two
            processes could make the same one.

        Raises:
            FencedError: another process made a claim at the same time and was faster.
            StoreError: the claim could not be made; earlier claims are unchanged, or the next claim
                completes it.
        """

    async def claims(self) -> Sequence[Claim]:
        """Return the readable claims, ascending."""

    async def check_claim(self, epoch: int) -> None:
        """Raise `FencedError` if a higher claim was made."""

    async def sweep(self) -> Sequence[str]:
        """Remove leftovers that are proven dead; return their names. Finish interrupted commits."""

    async def collect(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """Remove leftovers of any process; return their names. With `dry_run`, only return them.

        `older_than_s` is the minimum number of seconds since the last write to a leftover.
        """

    async def close(self) -> None:
        """Close connections and descriptors. Idempotent."""


class NotingStore(Protocol):
    """A store that keeps the last error of each process for the job that continues the run."""

    async def keep_note(self, process: int, note: bytes | None) -> None:
        """Keep a note of a process, replacing its last one.

        With None, remove the note kept through this object, if any.
        """

    async def take_notes(self) -> Sequence[bytes]:
        """Remove and return the notes of all processes and earlier jobs, in no order."""


def keeps_notes(store: object) -> TypeGuard[NotingStore]:
    """Return whether a store is a `NotingStore`, or a wrapper that passes its methods on."""
    return all(hasattr(store, name) for name in ("keep_note", "take_notes"))


@runtime_checkable
class ExportingStore(Protocol):
    """A store to which files of other formats can be written."""

    async def begin_export(
        self, name: str, save_id: str, *, overwrite: bool = False, private: bool = False
    ) -> Export:
        """Open an attempt for files of another format; see `Store.begin`.

        A file whose path is `name` must be the only file, and is published as `name` itself.
        """


# ------------------------------------------------------------------------------------- adapters


class Run(NamedTuple):
    """A run of bytes of one shard in device memory, and the host memory to copy it to.

    Attributes:
        source: the leaf.
        shard: index in `source.shards`; 0 for the whole array of a leaf without shards.
        start: first byte, in the C order of the shard.
        out: destination, as long as the run.
    """

    source: Source
    shard: int
    start: int
    out: Bytes


@dataclass(slots=True, eq=False)
class Source:
    """One array leaf, opened for saving.

    Attributes:
        spec: global shape and dtype as stored.
        leaf: the caller's object; kept alive until staging has ended.
        view: the values in host memory, in the NumPy dtype of `spec.dtype`, with any strides and
            not copied; None if they must be fetched (device memory, lazy conjugates).
        identity: leaves with equal identity share all bytes and are stored once; None for never.
        framework: `numpy`, `jax` or `torch`, as in `leaves=`.
        extra: facts stored with the leaf as JSON (PRNG implementation, requires_grad, …).
        shards: the distinct boxes that this process can read, each once regardless of replicas;
            None for a single box that covers the array.
        views: the values of each shard in host memory, as `view`, or None if they must be fetched;
            empty without `shards`.
        captured: state that the adapter captured in the caller's thread to read the leaf later.
        partition: how the processes divide the array, if several share it; `shards` are then those
            of this process only, with all their holders, possibly none.
        partial: this process knows only its own `shards`; the others report theirs.
        adapter: the adapter that fetches values without a view; None if all have one.
        begin_runs: begins to copy runs of bytes of shards that are contiguous in device memory, of
            this and other leaves with an equal `begin_runs`, and returns a call that waits for all,
            which must be made. None if only `fetch` reads them.
        offload: copies this and other leaves with an equal `offload` from devices to host memory of
            the framework's own, sets their views, and drops all references to device memory.
            Blocking. None if the framework has no such memory, or the leaf is not on a device.
        pending: returns whether this leaf is still being computed, without waiting. None if it was
            ready when it was opened.
    """

    spec: ArraySpec
    leaf: Any
    view: npt.NDArray[Any] | None
    identity: Hashable | None = None
    framework: str = "numpy"
    extra: Mapping[str, Any] | None = None
    shards: tuple[Shard, ...] | None = None
    views: tuple[npt.NDArray[Any] | None, ...] = ()
    captured: Any = None
    partition: Partition | None = None
    partial: bool = False
    adapter: ArrayAdapter | None = None
    begin_runs: Callable[[Sequence[Run]], Callable[[], None]] | None = None
    offload: Callable[[Sequence[Source]], None] | None = None
    pending: Callable[[Source], bool] | None = None


PlaceAll = Callable[[Sequence[Any], Sequence[npt.NDArray[Any]]], Sequence[Any]]
"""Makes the leaves of `Target`s, given one array for each."""


@dataclass(slots=True, eq=False)
class Target:
    """Destination of one array leaf of a restore.

    Attributes:
        spec: wanted shape and dtype.
        leaf: the caller's `like` leaf or the array to fill.
        boxes: the wanted distinct parts of the array, possibly with gaps; None for all of it.
        buffers: host memory to fill in place, one for each box, or one for all of the array: in the
            NumPy dtype of `spec.dtype`, with any strides, none overlapping another. Empty if the
            pipeline allocates and `place` makes the leaf.
        identity: targets with equal identity are the same memory; None if it is in `buffers`,
            unknown or immutable.
        extra: facts that the saved leaf must match (PRNG implementation).
        path: path of the leaf, for the errors of `place`.
        fill: `place` copies into the leaf's own memory, which cannot be in `buffers` (on a device,
            or in another byte order), or this process has no element to fill.
        captured: state captured by the adapter in the caller's thread to write the leaf later.
        place_all: makes this and other leaves with an equal `place_all` at once, given one array
            for each, with the spec's shape and dtype. Blocking. None if only `place` makes it.
    """

    spec: ArraySpec
    leaf: Any
    boxes: tuple[Box, ...] | None = None
    buffers: tuple[npt.NDArray[Any], ...] = ()
    identity: Hashable | None = None
    extra: Mapping[str, Any] | None = None
    path: str = ""
    fill: bool = False
    captured: Any = None
    place_all: PlaceAll | None = None


class ArrayAdapter(Protocol):
    """Everything the pipeline needs to know about one framework's arrays.

    `source` and `target` run in the caller's thread and are cheap; `fetch` and `place` run in
    worker threads, as `source` may for leaves that it `opens_anywhere`. So the former capture
    thread-local framework state (x64 mode, grad mode, CUDA device and stream), and the latter
    replay it.
    """

    def owns(self, kind: type) -> bool:
        """Return whether the adapter handles leaves of this type (arrays, or abstract ones)."""

    def source(self, path: str, leaf: Any) -> Source:
        """Open the leaf for saving.

        Raises:
            UnsupportedLeafError: names the path, the problem, and a cast that helps.
        """

    def fetch(self, source: Source, shard: int, box: Box, out: npt.NDArray[Any]) -> None:
        """Copy a part of one shard (as in `Run`) to host memory. Blocking.

        `box` is not empty and relative to the shard; `out` has its shape and the spec's dtype.
        """

    def target(self, path: str, leaf: Any, *, in_place: bool) -> Target:
        """Describe what to restore for this leaf; with `in_place`, into its memory if mutable.

        Raises:
            UnsupportedLeafError: names the path.
            DtypeMismatchError: JAX, as configured, would truncate a 64-bit leaf.
        """

    def place(self, target: Target, parts: Sequence[npt.NDArray[Any]]) -> Any:
        """Return the finished leaf for `target`. Blocking.

        `parts` are the values of its `boxes`, or one array of all values, in the spec's dtype. The
        leaf owns them from now on: they never return to a pool.
        """


@runtime_checkable
class FrameworkAdapter(ArrayAdapter, Protocol):
    """The adapter of a framework in which leaves can be restored without a target.

    Attributes:
        name: name of the framework, as in `leaves=`.
    """

    name: str

    def opens_anywhere(self, leaf: Any) -> bool:
        """Return whether `source` needs nothing of the caller's thread for this leaf. Fast."""

    def refuses(self, path: str, dtype: str) -> DtypeMismatchError | None:
        """Return the error if `leaf` cannot hold this zarr dtype unchanged, naming the path."""

    def leaf(self, path: str, values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
        """Return the leaf for `leaves=` this framework, on the default device.

        Raises:
            DtypeMismatchError: the framework cannot hold the dtype unchanged; names the path.
        """


# ------------------------------------------------------------------------------------ processes


class Coordinator(Protocol):
    """The processes that save and restore together, and a place for their messages.

    Keys are parts joined by ``/``, of letters, digits, ``.``, ``_`` and ``-``. Values have 1 byte
    to `MAX_MESSAGE_NBYTES`. All methods may be called concurrently, on the engine's loop only.
    None uses a collective or a connection of the trainer.

    Cancellation: every method returns at once. A call that the service does not answer continues
    in its own abandoned thread and may still take effect later.

    Raises:
        StoreError: the service cannot be reached, or refused the call.

    Attributes:
        name: name in messages: ``jax``, ``torch`` or ``directory``.
        process_index: number of this process.
        process_count: number of processes.
    """

    name: str
    process_index: int
    process_count: int

    async def put(self, key: str, value: bytes) -> None:
        """Set `key`, replacing any value."""

    async def put_once(self, key: str, value: bytes) -> bytes:
        """Set `key` if it is unset; return its value."""

    async def look(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if it is unset, without waiting."""

    async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        """Return the value of `key` once it is set, or None after `timeout_s`."""

    async def list(self, prefix: str) -> Mapping[str, bytes]:
        """Return all values whose keys begin with ``prefix/``, by the rest of their keys."""

    async def delete(self, prefix: str) -> None:
        """Delete the key `prefix` and all keys that begin with ``prefix/``, if any."""

    async def close(self) -> None:
        """End connections and threads. Idempotent; the service and its keys live on."""


class Exchange(Protocol):
    """Collectives by which processes exchange bytes that each has read a part of.

    Attributes:
        binding: a collective cannot be cancelled: if a member does not take part, the others wait
            forever.
    """

    binding: bool

    async def gather(self, members: tuple[int, ...], piece: Bytes) -> Bytes:
        """Return the concatenated pieces of all members; valid until the next call.

        All members have agreed to call it, with pieces of one size. Different sets of members may
        do so at the same time.

        Args:
            members: ascending numbers of the processes, including this one.
            piece: the bytes of this process, unchanged until the call has ended.

        Cancellation: returns at once, unless `binding`; no further exchange is possible.

        Raises:
            ResourceError: the device has too little memory.
            StoreError: another member did not take part or has died.
        """

    async def close(self) -> None:
        """End connections. Idempotent."""


class CallIn(Protocol):
    """Runner of calls in another thread."""

    async def __call__(self, function: Callable[[], T], /) -> T:
        """Call the function there and return its result."""


@runtime_checkable
class ExchangingCoordinator(Coordinator, Protocol):
    """A coordinator whose runtime has collectives."""

    def exchange(
        self, name: str, *, in_caller: CallIn, in_worker: CallIn, timeout_s: float
    ) -> Exchange:
        """Return the collectives of one restore, not yet connected.

        Args:
            name: key prefix of this restore alone, equal in all processes.
            in_caller: runs calls in the program's thread that waits for the restore, for
                collectives that must not be launched from two threads.
            in_worker: runs calls in a thread that may block.
            timeout_s: how long a collective waits for its members.
        """
