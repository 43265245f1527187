"""Restores that read once what several processes want, by threads that play processes.

Collectives of real runtimes are in `tests/processes/test_exchange.py`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import Checkpointer, RestoreOptions, SaveOptions, ShardedArray
from asyncckpt.errors import CorruptCheckpointError, MismatchError, StoreError, UsageError
from asyncckpt.restore.exchange.agreement import RestoreAgreement
from asyncckpt.restore.exchange.exchanger import Exchanger
from asyncckpt.spec import DTYPES
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.stores.local.store import LocalStore
from tests.processes.values import same
from tests.session.meeting_place import ExchangingCoordinator, MeetingPlace
from tests.session.together.job import Job, state

ONCE = RestoreOptions(broadcast=True, silence_s=20)
EACH = RestoreOptions(broadcast=False)
SMALL_CHUNKS = SaveOptions(chunk_nbytes=64 << 10)


class ExchangingJob(Job):
    """A job whose processes have collectives."""

    def __init__(self, path: Path, count: int) -> None:
        super().__init__(path, count)
        self.place = MeetingPlace()

    def coordinator(self, process: int) -> ExchangingCoordinator:
        made = ExchangingCoordinator(
            self.place, self.keys, process_index=process, process_count=self.count
        )
        self._made.append(made)
        return made


class Counted:
    """Bytes read at the store port, of the record, the index and all else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.payload = self.metadata = 0
        self.fail: Callable[[str, int], None] = lambda path, offset: None
        read, read_into = LocalFiles.read, LocalFiles.read_into
        counted = self

        async def counting_read(files: Any, path: str, **options: Any) -> bytes:
            data = await read(files, path, **options)
            counted.metadata += len(data)
            return data

        async def counting(
            files: Any, path: str, offset: int, buffers: Any, **options: Any
        ) -> None:
            counted.fail(path, offset)
            await read_into(files, path, offset, buffers, **options)
            nbytes = sum(buffer.nbytes for buffer in buffers)
            if path == "checkpoint.json" or path.endswith("-index"):
                counted.metadata += nbytes
            else:
                counted.payload += nbytes

        monkeypatch.setattr(LocalFiles, "read", counting_read)
        monkeypatch.setattr(LocalFiles, "read_into", counting)


@pytest.fixture(params=[2, 4])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> ExchangingJob:
    return ExchangingJob(tmp_path, request.param)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture(params=[64 << 20, 256 << 10])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a batch: all in one, or many batches."""
    monkeypatch.setattr(Exchanger, "batch_nbytes", request.param)
    nbytes: int = request.param
    return nbytes


@functools.cache
def many_leaves() -> dict[str, Any]:
    """Leaves that go into a batch together, and two that are larger; never changed."""
    tree = state() | {f"leaf {n}": np.full(500 + n, n, np.int32) for n in range(200)}
    return tree | {"large": np.arange(400_001, dtype=np.float32)}


def save(job: ExchangingJob, tree: Any, **options: Any) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, tree(process) if callable(tree) else tree, **options)

    assert job.play(part) == [None] * job.count


def restored(job: ExchangingJob, like: Any, options: RestoreOptions, **given: Any) -> list[Any]:
    """Restore on all processes; return reports or errors, after a look at the values."""

    async def part(ckpt: Checkpointer, process: int) -> Any:
        reports: list[Any] = []
        target = like(process) if callable(like) else like
        tree = await ckpt.restore(
            1, like=target, options=options, on_report=reports.append, **given
        )
        check(tree, target)
        return reports[0]

    return job.play(part)


def module(name: str) -> Any:
    """Return a module of the package whose name is also that of a function."""
    return importlib.import_module(f"asyncckpt.restore.{name}")


def zeroed(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: zeroed(value) for key, value in tree.items()}
    return np.zeros_like(tree) if isinstance(tree, np.ndarray) else tree


def check(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            check(found[key], value)
    elif isinstance(wanted, ShardedArray):
        for one, other in zip(found.shards, wanted.shards, strict=True):
            assert same(one[1], other[1])
    else:
        assert same(found, wanted)


def test_replicated_leaves_are_read_once(
    job: ExchangingJob, counted: Counted, batches: int
) -> None:
    tree = many_leaves() | {"larger than a slot": np.arange(1_100_000.0)}
    save(job, tree)
    counted.payload = 0
    each = restored(job, tree, EACH)
    alone, counted.payload = counted.payload / job.count, 0
    once = restored(job, tree, ONCE)
    assert 0.9 * alone <= counted.payload <= 1.002 * alone  # padding, at the ends of pieces twice
    assert [report.read_nbytes for report in each] == [each[0].read_nbytes] * job.count
    read_nbytes = sum(report.read_nbytes for report in once)
    # With padding; the file of the index holds the smallest chunks.
    assert 0 <= read_nbytes - counted.payload < 1000
    (received,) = {report.received_nbytes for report in once}
    assert received < read_nbytes <= 1.002 * received
    assert max(report.read_nbytes for report in once) <= 1.1 * alone / job.count + batches
    assert set(job.place.gathers) == {tuple(range(job.count))}


def halves(process: int, count: int) -> dict[str, Any]:
    """A state of two groups of processes: each process of a group holds one shard of all rows."""
    groups = 2
    shards = count // groups
    data = np.arange(400 * 300, dtype=np.float64).reshape(400, 300)
    rows = 400 // shards
    begin = process % shards * rows
    own = ShardedArray((400, 300), "float64", [((begin, 0), data[begin : begin + rows])])
    return {"sharded": own, "local": np.arange(5000), "step": 3}


@pytest.mark.parametrize("job", [4], indirect=True)
def test_groups_of_replicas_exchange_at_the_same_time(
    job: ExchangingJob, counted: Counted, batches: int
) -> None:
    data = np.arange(400 * 300, dtype=np.float64).reshape(400, 300)
    save(job, {"sharded": data, "local": np.arange(5000), "step": 3}, options=SMALL_CHUNKS)
    counted.payload = 0
    restored(job, lambda process: halves(process, 4), ONCE)
    assert data.nbytes <= counted.payload <= 1.1 * data.nbytes
    assert {(0, 2), (1, 3)} <= set(job.place.gathers)


@pytest.mark.parametrize("job", [4], indirect=True)
def test_what_one_process_wants_alone_is_not_exchanged(
    job: ExchangingJob, counted: Counted
) -> None:
    tree = {f"leaf {n}": np.full(100_000, n, np.float32) for n in range(4)}
    save(job, tree)
    counted.payload = 0
    reports = restored(job, lambda process: {f"leaf {process}": tree[f"leaf {process}"]}, ONCE)
    assert not job.place.gathers
    assert {report.received_nbytes for report in reports} == {0}
    assert 4 * 400_000 <= counted.payload <= 1.1 * 4 * 400_000


@pytest.mark.parametrize("job", [2], indirect=True)
@pytest.mark.parametrize("zstd", [False, True])
def test_some_chunks_are_exchanged_and_some_are_not(
    job: ExchangingJob, counted: Counted, batches: int, zstd: bool
) -> None:
    random = np.random.default_rng(1)
    data = random.integers(0, 1000, (640, 640)).astype(np.int32)
    tree = {"shared": data, "own 0": data + 1, "own 1": data + 2, "s": 1}
    options = replace(SMALL_CHUNKS, compression="zstd" if zstd else None)
    save(job, tree, options=options)

    def like(process: int) -> dict[str, Any]:
        # Rows that overlap: the chunks in the middle are wanted by both, those outside by one.
        begin, end = (0, 400) if process == 0 else (240, 640)
        rows = ShardedArray((640, 640), "int32", [((begin, 0), data[begin:end].copy())])
        return {"shared": rows, f"own {process}": tree[f"own {process}"], "s": 1}

    reports = restored(job, like, ONCE)
    assert not [r for r in reports if isinstance(r, BaseException)], reports
    assert 0 < min(r.received_nbytes for r in reports)
    assert job.place.gathers.keys() == {(0, 1)}


@pytest.mark.parametrize("job", [4], indirect=True)
@pytest.mark.parametrize("without", [0, 3])
def test_a_process_that_wants_no_array_keeps_no_other_waiting(
    job: ExchangingJob, monkeypatch: pytest.MonkeyPatch, without: int
) -> None:
    monkeypatch.setattr(module("exchange.shared_metadata"), "SHARED_NBYTES", 4096)
    tree = many_leaves()
    save(job, tree)

    def like(process: int) -> dict[str, Any]:
        return {"step": 12} if process == without else tree

    reports = restored(job, like, ONCE)
    assert not [r for r in reports if isinstance(r, BaseException)], reports
    received = [report.received_nbytes > 100_000 for report in reports]
    assert received == [process != without for process in range(4)]


def test_large_metadata_are_read_once(
    job: ExchangingJob, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module("exchange.shared_metadata"), "SHARED_NBYTES", 4096)
    tree = {f"leaf {n}": np.full(300, n, np.int32) for n in range(2000)}
    save(job, tree)
    counted.metadata = 0
    restored(job, tree, EACH)
    alone, counted.metadata, counted.payload = counted.metadata / job.count, 0, 0
    reports = restored(job, tree, ONCE)
    assert 100_000 < counted.metadata < 1.05 * alone
    # The reports count payload only, as without an exchange.
    assert sum(report.read_nbytes for report in reports) == counted.payload
    assert all(report.received_nbytes <= counted.payload for report in reports)


def test_the_explanation_lists_the_ranges_of_files_that_each_process_reads(
    job: ExchangingJob, counted: Counted
) -> None:
    tree = many_leaves()
    save(job, tree)
    ranges: Counter[tuple[str, int]] = Counter()
    counted.fail = lambda path, offset: ranges.update([(path, offset)])
    reports = restored(job, tree, replace(ONCE, explain=True))
    for report in reports:
        assert sum(one.nbytes for one in report.reads) == report.read_nbytes
    found = [(one.file, one.offset) for report in reports for one in report.reads]
    assert found and not Counter(found) - ranges
    assert "for all processes that want it" in str(reports[0].reads[0])


def test_targets_in_place_and_atomic_ones(job: ExchangingJob, batches: int) -> None:
    tree = many_leaves()
    save(job, tree)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        for atomic in (False, True):
            target = {
                k: np.zeros_like(v) if isinstance(v, np.ndarray) else v for k, v in tree.items()
            }
            target["params"] = {k: np.zeros_like(v) for k, v in tree["params"].items()}
            await ckpt.restore_into(target, step=1, options=replace(ONCE, atomic=atomic))
            check(target, tree)
        return None

    assert job.play(part) == [None] * job.count


def test_two_batches_are_held(job: ExchangingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 256 << 10
    monkeypatch.setattr(Exchanger, "batch_nbytes", nbytes)
    tree = many_leaves()
    save(job, tree)
    ahead = Counter[int]()
    most = [0]
    read_piece = Exchanger._read_piece

    async def reading(exchanger: Exchanger, stream: Any, *args: Any) -> Any:
        ahead[exchanger.process] += stream.piece_nbytes
        most[0] = max(most[0], ahead[exchanger.process])
        return await read_piece(exchanger, stream, *args)

    def exchanged(process: int, number: int) -> None:
        ahead[process] -= nbytes // job.count

    monkeypatch.setattr(Exchanger, "_read_piece", reading)
    job.place.on_gather = exchanged
    restored(job, tree, ONCE)
    assert sum(job.place.gathers.values()) > 8
    assert nbytes // job.count < most[0] <= nbytes  # the other batch is the one that was exchanged


def test_every_dtype_comes_bit_by_bit(job: ExchangingJob) -> None:
    random = np.random.default_rng(3)
    tree = {
        name: random.integers(0, 256, 4096, np.uint8).view(dtype)
        if name != "bool"
        else np.ones(9, bool)
        for name, dtype in DTYPES.items()
    }
    save(job, tree)
    restored(job, tree, ONCE)


# ------------------------------------------------------------------------------------- failures


def test_a_read_that_fails_on_one_process_is_an_error_on_all(
    job: ExchangingJob, counted: Counted, batches: int
) -> None:
    save(job, many_leaves())
    reads = itertools.count(1)
    failing = job.count if batches > 1 << 20 else 3 * job.count  # in the middle

    def fail(path: str, offset: int) -> None:
        is_payload = path != "checkpoint.json" and not path.endswith("-index")
        if is_payload and next(reads) == failing:
            raise StoreError(f"{path}: the disk has failed")

    counted.fail = fail
    outcomes = restored(job, many_leaves(), ONCE)
    assert {type(outcome) for outcome in outcomes} == {StoreError}
    assert len([o for o in outcomes if "process" in str(o)]) == job.count - 1
    counted.fail = lambda path, offset: None
    assert not [o for o in restored(job, many_leaves(), ONCE) if isinstance(o, BaseException)]


@pytest.mark.parametrize("kind", ["data file", "chunk index"])
def test_a_missing_file_is_damage_on_all_processes(
    job: ExchangingJob, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(module("exchange.shared_metadata"), "SHARED_NBYTES", 4096)
    tree = {f"leaf {n}": np.full(300, n, np.int32) for n in range(2000)}
    save(job, tree)
    for file in (job.root / "1").rglob("d/*"):
        if file.name.endswith("-index") == (kind == "chunk index"):
            file.unlink()
    for outcome in restored(job, tree, ONCE):
        assert isinstance(outcome, CorruptCheckpointError)
        assert "is missing, the checkpoint's metadata lists it" in str(outcome)


def test_a_damaged_chunk_is_named_on_all_processes(job: ExchangingJob, batches: int) -> None:
    tree = many_leaves()
    save(job, tree)
    wanted = np.arange(300_000, 300_004, dtype=np.float32).tobytes()
    (file,) = [f for f in (job.root / "1").rglob("d/*") if wanted in f.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.find(wanted)] ^= 1
    file.write_bytes(data)
    outcomes = restored(job, tree, ONCE)
    for outcome in outcomes:
        assert isinstance(outcome, CorruptCheckpointError)
        assert "large" in str(outcome)
        assert outcome.path == "large"
        assert outcome.file is not None and file.name in outcome.file
        assert "stream" not in str(outcome)


@pytest.mark.parametrize("job", [2], indirect=True)
def test_a_process_that_fails_between_batches_ends_the_restore_of_all(
    job: ExchangingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exchanger, "batch_nbytes", 256 << 10)
    save(job, many_leaves())

    def fail(process: int, number: int) -> None:
        if (process, number) == (1, 3):
            raise MemoryError("no more of it")

    job.place.on_gather = fail
    first, second = restored(job, many_leaves(), ONCE)
    assert "process 1" in str(first) and "no more of it" in str(first)
    assert isinstance(second, MemoryError)


@pytest.mark.parametrize("job", [2], indirect=True)
def test_processes_that_want_other_leaves_agree_on_what_they_share(
    job: ExchangingJob, counted: Counted
) -> None:
    tree = {f"leaf {n}": np.full(100_000, n, np.float32) for n in range(3)}
    save(job, tree)
    counted.payload = 0

    def like(process: int) -> dict[str, Any]:
        return {"leaf 1": tree["leaf 1"], f"leaf {2 * process}": tree[f"leaf {2 * process}"]}

    restored(job, like, ONCE)
    assert 3 * 400_000 <= counted.payload <= 1.1 * 3 * 400_000


@pytest.mark.parametrize("job", [2], indirect=True)
def test_a_target_that_fits_on_one_process_only_fails_before_anything_is_exchanged(
    job: ExchangingJob,
) -> None:
    tree = {"x": np.zeros(10), "y": np.zeros(10)}
    save(job, tree)
    outcomes = restored(job, lambda p: {"x": np.zeros(10 + p), "y": np.zeros(10)}, ONCE)
    assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
    assert not job.place.gathers


@pytest.mark.parametrize("job", [2], indirect=True)
def test_all_processes_pass_the_same_mode(job: ExchangingJob) -> None:
    tree = {"x": np.zeros(10)}
    save(job, tree)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        mode = RestoreOptions(broadcast=bool(process))
        return await ckpt.restore(1, like=tree, options=mode)

    outcomes = job.play(part)
    assert all(isinstance(outcome, UsageError) for outcome in outcomes)
    assert "broadcast=True here, and with broadcast=False on process 0" in str(outcomes[1])


async def test_one_process_has_nobody_to_exchange_with(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "one", {"x": 1})
    with pytest.raises(UsageError, match="works alone exchanges nothing"):
        await asyncckpt.restore(tmp_path / "one", coordinator="single", options=ONCE)


@pytest.mark.parametrize("job", [2], indirect=True)
def test_processes_without_collectives_say_so(tmp_path: Path, job: ExchangingJob) -> None:
    plain = Job(tmp_path / "plain", 2)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, {"x": 1})
        return await ckpt.restore(1, options=ONCE)

    for outcome in plain.play(part):
        assert isinstance(outcome, UsageError)
        assert "the directory coordinator, which has no collectives" in str(outcome)


def test_local_paths_are_read_by_each_process(job: ExchangingJob) -> None:
    tree = many_leaves()
    save(job, tree)
    reports = restored(job, tree, RestoreOptions())
    assert {report.received_nbytes for report in reports} == {0}
    assert not job.place.gathers


@pytest.mark.parametrize("least", [1 << 20, 1 << 30])
def test_object_stores_are_read_once_where_it_is_worth_it(
    job: ExchangingJob, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    tree = many_leaves()
    save(job, tree)
    monkeypatch.setattr(module("exchange.exchanger"), "WORTH_NBYTES", least)
    begin = LocalStore.__init__

    def remote(store: LocalStore, *args: Any, **options: Any) -> None:
        begin(store, *args, **options)
        store.capabilities = replace(store.capabilities, shared_link=True)

    monkeypatch.setattr(LocalStore, "__init__", remote)
    restored(job, tree, RestoreOptions())
    assert bool(job.place.gathers) == (least < 3_000_000)


def test_collectives_are_made_by_the_thread_that_waits(job: ExchangingJob) -> None:
    tree = many_leaves()
    save(job, tree)
    main: list[str] = []

    async def part(ckpt: Checkpointer, process: int) -> Any:
        main.append(threading.current_thread().name)
        await ckpt.restore(1, like=tree, options=ONCE)

    job.play(part)
    assert job.place.callers == set(main)


# --------------------------------------------------------------------------- positive controls


@pytest.mark.parametrize("job", [2], indirect=True)
def test_without_agreement_on_each_batch_a_failure_would_leave_others_waiting(
    job: ExchangingJob, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: the rule that all are ready before any process enters a collective."""

    async def at_once(agreement: RestoreAgreement, batch: int) -> bool:
        return True

    monkeypatch.setattr(Exchanger, "batch_nbytes", 256 << 10)
    save(job, many_leaves())
    entered = threading.Event()
    job.place.on_gather = lambda process, number: entered.set()
    lock = threading.Lock()

    def fail(path: str, offset: int) -> None:
        if not path.endswith("-index") and lock.acquire(blocking=False):
            entered.wait(0.5)
            raise StoreError("the disk has failed")

    counted.fail = fail
    assert all(isinstance(o, StoreError) for o in restored(job, many_leaves(), ONCE))
    assert not entered.is_set()  # no process waits in a collective for the failed one
    lock.release()
    monkeypatch.setattr(RestoreAgreement, "ready", at_once)
    assert all(isinstance(o, StoreError) for o in restored(job, many_leaves(), ONCE))
    assert entered.is_set()
