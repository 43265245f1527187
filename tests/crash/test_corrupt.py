"""Damage is noticed: `verify` says so, and `restore` raises or returns what was saved."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import RestoreOptions, SaveOptions, blocking
from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.format import record as record_format
from asyncckpt.format.chunks import ChunkIndex, decode_chunk_index
from asyncckpt.format.record import decode_record
from asyncckpt.restore import decode
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.verify import verify as verification
from tests.crash.scenarios import same

RECORD = "checkpoint.json"
MANIFEST = "default/manifest.ocdbt"
EXPECTED_ERRORS = (CorruptCheckpointError, CheckpointNotFoundError, UnsupportedFormatError)
# A restore that hangs ends with an error that is not expected.
DEADLINE = RestoreOptions(deadline_s=30.0)

OLD, NEW = 1, 2
OPTIONS = {
    None: SaveOptions(chunk_nbytes=4096, host_memory_nbytes=64 << 20),
    "zstd": SaveOptions(chunk_nbytes=4096, host_memory_nbytes=64 << 20, compression="zstd"),
}


def small(version: int, *, rows: int = 8) -> dict[str, Any]:
    """A tree whose every byte can be damaged in a minute; `w` has `rows` KiB and two chunks."""
    random = np.random.default_rng(version)
    return {
        "w": random.standard_normal((rows, 256)).astype(np.float32),
        "m": random.standard_normal((20, 20)).astype(np.float32),
        "v": random.standard_normal((20, 20)).astype(np.float32),
        "scale": random.standard_normal(5).astype(np.float32),  # inline
        "shift": random.standard_normal(5).astype(np.float32),
        "version": version,
        "name": f"run {version}",
    }


@dataclass(slots=True)
class Patient:
    """A root whose newest step is damaged and healed again, and its `Checkpointer`.

    Attributes:
        ckpt: reads the root; all its reads are new.
        step: directory of the newest step.
        saved: what was saved in it.
        files: content of its files by relative path.
    """

    ckpt: blocking.Checkpointer
    step: Path
    saved: Any
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        paths = sorted(path for path in self.step.rglob("*") if path.is_file())
        self.files = {str(p.relative_to(self.step)): p.read_bytes() for p in paths}

    @property
    def data(self) -> str:
        """Path of the data file."""
        return next(p for p in self.files if p.startswith("default/d/") and p.endswith("-0"))

    @property
    def index_file(self) -> str:
        """Path of the file with B+tree nodes and chunk index."""
        return next(path for path in self.files if path.endswith("-index"))

    def index(self) -> ChunkIndex:
        """The chunk index."""
        place = decode_record(self.files[RECORD], location="").chunk_index
        data = self.files[self.index_file][place.offset :][: place.nbytes]
        return decode_chunk_index(data, file="")

    @contextlib.contextmanager
    def damaged(self, files: dict[str, bytes | None]) -> Iterator[None]:
        """Files have other contents, or are gone with None, inside the block."""
        for path, data in files.items():
            if data is None:
                (self.step / path).unlink()
            else:
                self._write(path, data)
        try:
            yield
        finally:
            for path in files:
                self._write(path, self.files[path])

    def _write(self, path: str, data: bytes) -> None:
        # In place: making and removing files thousands of times takes longer than the checks.
        with open(self.step / path, "r+b" if (self.step / path).exists() else "wb") as file:
            file.write(data)
            file.truncate()

    @contextlib.contextmanager
    def flipped(self, path: str, offset: int, bit: int) -> Iterator[None]:
        """One bit of a file is another one inside the block."""
        whole = self.files[path][offset]
        fd = os.open(self.step / path, os.O_WRONLY)
        try:
            os.pwrite(fd, bytes([whole ^ (1 << bit)]), offset)
            yield
            os.pwrite(fd, bytes([whole]), offset)
        finally:
            os.close(fd)

    def read_by_restore(self, path: str) -> set[int]:
        """Offsets of the bytes of a file that listing and restoring the step read.

        Other bytes of the file cannot change what these return.
        """
        offsets: set[int] = set()
        read, read_into = LocalFiles.read, LocalFiles.read_into

        async def whole(files: LocalFiles, name: str, **options: Any) -> bytes:
            if name == path:
                offsets.update(range(len(self.files[path])))
            return await read(files, name, **options)

        async def part(
            files: LocalFiles, name: str, offset: int, buffers: Any, **options: Any
        ) -> None:
            if name == path:
                offsets.update(range(offset, offset + sum(buffer.nbytes for buffer in buffers)))
            await read_into(files, name, offset, buffers, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(LocalFiles, "read", whole)
            patched.setattr(LocalFiles, "read_into", part)
            assert self.ckpt.latest_step() == NEW
            assert same(self.ckpt.restore(NEW), self.saved)
        return offsets

    def unverified(self, what: str) -> list[str]:
        """How this damage went unnoticed by `verify`."""
        try:
            report = self.ckpt.verify(NEW)
        except EXPECTED_ERRORS as error:
            return self._anonymous(what, error)
        except Exception as error:
            return [f"{what}: verify raised {error!r}"]
        return [f"{what}: verify found nothing"] if report.ok or not str(report) else []

    def complaints(self, what: str, *, record: bool = False) -> list[str]:
        """How this damage went unnoticed. `record`: the commit record is no longer valid."""
        wrong = []
        latest = self.ckpt.latest_step()
        if latest != (OLD if record else NEW):
            wrong.append(f"{what}: the latest step is {latest}")
        wrong += self.unverified(what)
        try:
            tree = self.ckpt.restore(NEW)
        except EXPECTED_ERRORS as error:
            wrong += self._anonymous(what, error)
        except Exception as error:
            wrong.append(f"{what}: restore raised {error!r}")
        else:
            if record or not same(tree, self.saved):
                wrong.append(f"{what}: restore returned other values without a word")
        return wrong

    def _anonymous(self, what: str, error: Exception) -> list[str]:
        return [] if str(self.step) in str(error) else [f"{what}: no location in {error!r}"]

    def healed(self) -> bool:
        """Whether nothing of the damage was left."""
        return self.ckpt.verify(NEW).ok and same(self.ckpt.restore(NEW), self.saved)


def make_patient(root: Path, compression: Any = None) -> Iterator[Patient]:
    with blocking.Checkpointer(
        root, save_options=OPTIONS[compression], restore_options=DEADLINE
    ) as ckpt:
        ckpt.save(OLD, small(OLD))
        ckpt.save(NEW, small(NEW))
        patient = Patient(ckpt, root / str(NEW), small(NEW))
        yield patient
        assert patient.healed()
        assert same(ckpt.restore(OLD), small(OLD))


@pytest.fixture
def patient(scratch: Path) -> Iterator[Patient]:
    yield from make_patient(scratch)


@pytest.fixture
def compressed(scratch: Path) -> Iterator[Patient]:
    yield from make_patient(scratch, "zstd")


def flip(patient: Patient, path: str, offsets: Iterable[int], bits: Iterable[int]) -> int:
    """Flip these bits (the next one for each byte) one by one; returns how many there were.

    `verify` sees each of them, and a restore those in bytes that it reads.
    """
    bits = list(bits)
    record = path == RECORD
    read = set(all_bytes(patient, path)) if record else patient.read_by_restore(path)
    wrong: list[str] = []
    visited = 0
    for offset in offsets:
        for bit in bits if len(bits) > 1 else [(bits[0] + offset) % 8]:
            with patient.flipped(path, offset, bit):
                what = f"bit {bit} of byte {offset} of {path}"
                if offset in read:
                    wrong += patient.complaints(what, record=record)
                else:
                    wrong += patient.unverified(what)
            visited += 1
    assert wrong == []
    print(f"{path}: {visited} bits flipped")
    return visited


def all_bytes(patient: Patient, path: str) -> range:
    return range(len(patient.files[path]))


def test_a_flipped_bit_in_any_byte_of_the_record_is_noticed(patient: Patient) -> None:
    assert flip(patient, RECORD, all_bytes(patient, RECORD), [0]) >= 1500


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_noticed(patient: Patient) -> None:
    assert flip(patient, MANIFEST, all_bytes(patient, MANIFEST), [0]) >= 90


def test_a_flipped_bit_in_any_byte_of_nodes_and_chunk_index_is_noticed(patient: Patient) -> None:
    path = patient.index_file
    # The values that are kept inline. The record has a copy of a chunk index as small as this.
    assert 40 <= len(patient.read_by_restore(path)) < 1000
    assert flip(patient, path, all_bytes(patient, path), [0]) >= 1000


def test_a_flipped_bit_in_every_16th_byte_of_the_data_is_noticed(patient: Patient) -> None:
    path = patient.data
    assert len(patient.read_by_restore(path)) > 10_000
    assert flip(patient, path, all_bytes(patient, path)[::16], [0]) >= 700


def test_a_flipped_bit_in_files_that_restore_does_not_read_is_noticed(patient: Patient) -> None:
    others = set(patient.files) - {RECORD, MANIFEST, patient.index_file, patient.data}
    assert others, "the tree of these tests is one that Orbax restores"
    for path in sorted(others):
        assert flip(patient, path, all_bytes(patient, path)[::16], [0]) >= 2


def test_a_flipped_bit_in_compressed_chunks_is_noticed(compressed: Patient) -> None:
    path = compressed.data
    assert flip(compressed, path, all_bytes(compressed, path)[::32], [0]) >= 300


def damages(patient: Patient, path: str, stride: int) -> Iterator[tuple[str, bytes]]:
    """Contents of a file that are not what was saved."""
    data = patient.files[path]
    for length in (*range(0, len(data), stride), len(data) - 1):
        yield f"{path} cut to {length} bytes", data[:length]
    for start in range(0, len(data), stride):
        stop = min(start + stride, len(data))
        zeroed = data[:start] + bytes(stop - start) + data[stop:]
        if zeroed != data:
            yield f"bytes {start} to {stop} of {path} are zero", zeroed
    yield f"{path} is zero", bytes(len(data))
    for more in (b"\0", b"\n", data[-1:], bytes(4096), data):
        yield f"{len(more)} bytes follow {path}", data + more
    yield f"{path} begins one byte late", b"\0" + data


def damage_each_file(patient: Patient, stride_of: Callable[[int], int]) -> int:
    wrong, visited = [], 0
    for path, data in patient.files.items():
        for what, other in damages(patient, path, stride_of(len(data))):
            with patient.damaged({path: other}):
                wrong += patient.complaints(what, record=path == RECORD)
            visited += 1
    assert wrong == []
    print(f"{visited} files cut, zeroed or extended")
    return visited


def test_a_file_that_is_cut_zeroed_or_extended_is_noticed(patient: Patient) -> None:
    assert damage_each_file(patient, lambda nbytes: -(-nbytes // 12)) >= 150


def test_a_missing_file_is_noticed(patient: Patient) -> None:
    for path in patient.files:
        with patient.damaged({path: None}):
            assert patient.complaints(f"{path} is gone", record=path == RECORD) == []
    shutil.rmtree(patient.step / "default")
    assert patient.complaints("the database is gone") == []
    for path, data in patient.files.items():
        (patient.step / path).parent.mkdir(parents=True, exist_ok=True)
        (patient.step / path).write_bytes(data)


def test_something_else_in_the_place_of_a_file_is_noticed(patient: Patient, tmp_path: Path) -> None:
    for path, data in patient.files.items():
        place, other = patient.step / path, tmp_path / "other"
        other.write_bytes(data)
        makers: dict[str, Callable[[], None]] = {
            "a directory": place.mkdir,
            "a pipe": lambda place=place: os.mkfifo(place),
            "a link to the same bytes": lambda place=place, other=other: place.symlink_to(other),
            "a link to nothing": lambda place=place: place.symlink_to("nothing"),
        }
        for what, make in makers.items():
            place.unlink()
            make()
            assert patient.complaints(f"{path} is {what}", record=path == RECORD) == []
            place.rmdir() if what == "a directory" else place.unlink()
            place.write_bytes(data)


def test_two_files_that_were_exchanged_are_noticed(patient: Patient) -> None:
    visited = 0
    for one, two in combinations(patient.files, 2):
        with patient.damaged({one: patient.files[two], two: patient.files[one]}):
            found = patient.complaints(f"{one} and {two} exchanged", record=RECORD in (one, two))
            assert found == []
        visited += 1
    assert visited >= 10


def test_files_of_an_older_step_are_noticed(patient: Patient) -> None:
    """Contents that were valid once, of the same sizes and for the same tree."""
    old = patient.step.parent / str(OLD)
    visited = 0
    for path, data in patient.files.items():
        name = Path(path).name
        (stale,) = [p for p in old.rglob("*") if p.is_file() and _role(p.name) == _role(name)]
        if stale.read_bytes() == data:
            continue  # what Orbax needs is the same for both steps
        with patient.damaged({path: stale.read_bytes()}):
            if path == RECORD:
                # It is valid, and nothing that it lists is there.
                assert not patient.ckpt.verify(NEW).ok
                with pytest.raises(CorruptCheckpointError):
                    patient.ckpt.restore(NEW)
            else:
                assert patient.complaints(f"{path} is that of step {OLD}") == []
        visited += 1
    assert visited >= 4


def _role(name: str) -> str:
    """The name without the id of the save."""
    return name.rsplit("-", 1)[-1]


def extents(patient: Patient) -> dict[tuple[int, int], list[int]]:
    """Offsets of chunks by file and length: those of one entry can be exchanged."""
    found: dict[tuple[int, int], list[int]] = {}
    index = patient.index()
    rows = zip(index.file.tolist(), index.offset.tolist(), index.nbytes.tolist(), strict=True)
    for file, offset, nbytes in rows:
        found.setdefault((file, nbytes), []).append(offset)
    return found


def exchange(patient: Patient) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """Every pair of chunks of one length has changed places, with their own checksums behind."""
    files = decode_record(patient.files[RECORD], location="").files
    for (file, nbytes), offsets in extents(patient).items():
        path = files[file].path
        data = patient.files[path]
        for one, two in combinations(offsets, 2):
            other = bytearray(data)
            other[one : one + nbytes], other[two : two + nbytes] = (
                data[two : two + nbytes],
                data[one : one + nbytes],
            )
            if other != data:
                yield f"{nbytes} bytes at {one} and {two} of {path} exchanged", {path: bytes(other)}


def test_chunks_that_were_exchanged_are_noticed(patient: Patient) -> None:
    visited = refused = 0
    for what, files in exchange(patient):
        with patient.damaged(files):
            assert patient.complaints(what) == []
            try:
                patient.ckpt.restore(NEW)
            except CorruptCheckpointError:
                refused += 1
        visited += 1
    # Two chunks of one array, two arrays of one shape, two inline values. Restoring needs none of
    # the arrays that hold scalars for other readers.
    assert refused >= 3
    print(f"{visited} pairs of chunks exchanged")


def test_a_chunk_of_an_older_step_is_noticed(patient: Patient) -> None:
    (old,) = (patient.step.parent / str(OLD)).rglob("d/*-0")
    stale, data = old.read_bytes(), patient.files[patient.data]
    visited = 0
    for (file, nbytes), offsets in extents(patient).items():
        path = decode_record(patient.files[RECORD], location="").files[file].path
        for at in offsets if path == patient.data else []:
            mixed = data[:at] + stale[at : at + nbytes] + data[at + nbytes :]
            with patient.damaged({path: mixed}):
                assert patient.complaints(f"the chunk at {at} is that of step {OLD}") == []
                with pytest.raises(CorruptCheckpointError):
                    patient.ckpt.restore(NEW)
            visited += 1
    assert visited >= 4


def test_damaged_padding_is_found_by_verify(scratch: Path) -> None:
    """Bytes that belong to no chunk; restoring does not need them."""
    rows = 2200  # two chunks above 1 MiB, which begin at a page each
    options = SaveOptions(chunk_nbytes=1100 << 10)
    with blocking.Checkpointer(scratch, save_options=options, restore_options=DEADLINE) as ckpt:
        ckpt.save(NEW, small(NEW, rows=rows))
        patient = Patient(ckpt, scratch / str(NEW), small(NEW, rows=rows))
        used = bytearray(len(patient.files[patient.data]))
        files = decode_record(patient.files[RECORD], location="").files
        for (file, nbytes), offsets in extents(patient).items():
            for at in offsets if files[file].path == patient.data else []:
                used[at : at + nbytes] = b"\1" * nbytes
        padding = [at for at, byte in enumerate(used) if not byte]
        assert len(padding) > 100
        flip(patient, patient.data, padding[:: len(padding) // 10], [0])


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_flipped_bit_in_large_chunks_is_noticed(scratch: Path, compression: Any) -> None:
    """Chunks that are read straight into their target, and chunks beyond a staging buffer."""
    rows = 20 << 10  # 20 MiB in two chunks
    options = SaveOptions(chunk_nbytes=10 << 20, compression=compression)
    saved = small(NEW, rows=rows)
    wrong: list[str] = []
    with blocking.Checkpointer(scratch, save_options=options, restore_options=DEADLINE) as ckpt:
        ckpt.save(NEW, saved)
        patient = Patient(ckpt, scratch / str(NEW), saved)
        path = patient.data
        for offset in all_bytes(patient, path)[:: len(patient.files[path]) // 10]:
            with patient.flipped(path, offset, 3):
                what = f"byte {offset} of {path}"
                wrong += patient.complaints(what)
                for order in ("C", "F"):
                    target = {**saved, "w": np.zeros_like(saved["w"], order=order)}
                    try:
                        ckpt.restore_into(target, step=NEW)
                    except CorruptCheckpointError as error:
                        wrong += patient._anonymous(what, error)
                        continue
                    if not same(target, saved):
                        wrong.append(f"{what}: restored into other values without a word")
        assert patient.healed()
    assert wrong == []


def test_a_damaged_step_does_not_hide_the_one_before(patient: Patient) -> None:
    with patient.flipped(RECORD, 40, 3):
        assert patient.ckpt.steps() == [OLD]
        assert patient.ckpt.latest_step() == OLD
        assert same(patient.ckpt.restore(), small(OLD))


# ------------------------------------------------------------------------------ positive controls


def unnoticed(patient: Patient, path: str, stride: int) -> list[str]:
    """Complaints about one bit in every so many bytes."""
    wrong = []
    for offset in all_bytes(patient, path)[::stride]:
        with patient.flipped(path, offset, offset % 7):
            wrong += patient.complaints(f"byte {offset} of {path}", record=path == RECORD)
    return wrong


def test_a_restore_that_checks_nothing_is_noticed(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "trailer_matches", lambda *_: True)
    monkeypatch.setattr(decode.Decode, "expect", lambda *_: None)
    assert any("without a word" in text for text in unnoticed(patient, patient.data, 512))


def test_a_restore_that_trusts_the_checksums_behind_the_chunks_is_noticed(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They travel with the chunks, so that exchanged ones have the right ones."""

    def against_trailer(self: Any, batch: Any, row: int, crc: int, trailer: Any) -> None:
        if int.from_bytes(trailer.tobytes(), "little") != crc:
            raise CorruptCheckpointError(str(patient.step))

    monkeypatch.setattr(decode, "trailer_matches", lambda *_: True)
    monkeypatch.setattr(decode.Decode, "expect", against_trailer)
    wrong = []
    for what, files in exchange(patient):
        with patient.damaged(files):
            wrong += patient.complaints(what)
    assert any("without a word" in text for text in wrong)


def test_a_verification_of_leaves_alone_is_noticed(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = verification._Verify._damage

    def of_leaves(self: Any, leaf: str | None, *place: Any) -> None:
        if leaf is not None:
            damage(self, leaf, *place)

    monkeypatch.setattr(verification._Verify, "_damage", of_leaves)
    assert any("found nothing" in text for text in unnoticed(patient, MANIFEST, 16))


def test_a_record_whose_checksum_is_not_checked_is_noticed(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(view: memoryview) -> int:
        try:
            return int(bytes(view.obj)[-11:-3], 16)  # type: ignore[call-overload]
        except ValueError:
            return 0

    monkeypatch.setattr(record_format, "crc32c", stored)
    assert unnoticed(patient, RECORD, 16) != []


# ------------------------------------------------------------------------------------------- long


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_bit_of_every_byte_is_noticed(scratch: Path, compression: Any) -> None:
    patients = make_patient(scratch, compression)
    patient = next(patients)
    visited = 0
    for path in patient.files:
        bits = [0, 3, 7] if path == patient.data else range(8)
        visited += flip(patient, path, all_bytes(patient, path), bits)
    assert visited >= 40_000
    next(patients, None)


@pytest.mark.long
def test_any_cut_or_zeroed_run_is_noticed(patient: Patient) -> None:
    assert damage_each_file(patient, lambda nbytes: 7) >= 4000
