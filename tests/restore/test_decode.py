"""Decoding alone: chunks are checked before they are handed over, and land where they belong."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from asyncckpt import LeafOptions, SaveOptions, blocking
from asyncckpt.checkpoint import payload
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.codecs import INTO_NBYTES, ZSTD
from asyncckpt.planning.overlap import boxes_of_run
from asyncckpt.restore.decode import Check, Decode
from asyncckpt.restore.plan import Destinations, plan_reads
from asyncckpt.spec import DTYPES, Box
from tests.restore.opened import LOCATION, destinations, opened, packed

VALUES = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(5, dtype=np.int16), "c": np.array(7)}
PAYLOADS = [value.tobytes() for value in VALUES.values()]


def planned(
    wanted: Destinations, checkpoint: Any, extents: Any, *, large: bool = False
) -> tuple[Any, Decode]:
    """Plan reads as if every chunk were large, or none."""
    sizes = {"slot_nbytes": 1 if large else 1 << 20, "direct_nbytes": 1 if large else 1 << 20}
    reads = plan_reads(checkpoint, extents, wanted, **sizes)
    return reads.plan, Decode(reads)


def test_small_chunks_of_one_batch_go_to_their_destinations() -> None:
    data, extents = packed(PAYLOADS)
    wide = np.zeros((5, 2), np.int16)
    found = {"a": np.zeros((2, 3)), "b": wide[:, 1], "c": np.zeros((), np.int64)}
    plan, decode = planned(destinations(found), opened(VALUES), extents)
    (batch,) = plan.batches
    decode.small(batch, np.frombuffer(data, np.uint8))
    for key, values in VALUES.items():
        assert np.array_equal(found[key], values)
    assert not wide[:, 0].any()


def test_a_box_gets_its_part_of_a_chunk_that_others_want_too() -> None:
    data, extents = packed(PAYLOADS)
    whole, part = np.zeros((2, 3)), np.zeros((1, 2))
    wanted = destinations({"a": whole})
    wanted.add("a", 0, Box((1, 1), (1, 2)), part)
    plan, decode = planned(wanted, opened(VALUES), extents)
    (batch,) = plan.batches
    decode.small(batch, np.frombuffer(data[: batch.nbytes], np.uint8))
    assert np.array_equal(whole, VALUES["a"]) and part.tolist() == [[4, 5]]


@pytest.mark.parametrize("place", ["payload", "trailer"])
@pytest.mark.parametrize("way", ["small", "direct"])
def test_a_flipped_bit_names_leaf_file_and_offset(way: str, place: str) -> None:
    data, extents = packed(PAYLOADS)
    damaged = bytearray(data)
    damaged[int(extents.offset[1]) + (0 if place == "payload" else 10)] ^= 1
    wanted = destinations({key: np.zeros_like(values) for key, values in VALUES.items()})
    plan, decode = planned(wanted, opened(VALUES), extents, large=way == "direct")
    with pytest.raises(CorruptCheckpointError, match="b: /run/1: the chunk at byte 52 of d/0") as e:
        (batch,) = plan.batches
        assert batch.direct == (way == "direct")
        raw = np.frombuffer(bytes(damaged), np.uint8)
        if way == "small":
            decode.small(batch, raw)
        edges = np.array([extents.offset, extents.offset + extents.nbytes - 4]).T.reshape(-1)
        Check(decode.checks([batch], np.split(raw, edges[1:])))(batch.nbytes)
    assert (e.value.path, e.value.file, e.value.offset) == ("b", "d/0", 52)
    assert (e.value.stage, e.value.location) == ("decode", LOCATION)


def run_of_chunks() -> tuple[Any, Any, list[Any], list[Any], bytes]:
    """Chunks of which two are direct and one between them is not, and buffers to read them into."""
    data, extents = packed(PAYLOADS)
    found: list[Any] = [np.zeros((2, 3)), np.zeros((5, 2), np.int16)[:, 1], np.zeros((), np.int64)]
    wanted = destinations(dict(zip(VALUES, found, strict=True)))
    plan, decode = planned(wanted, opened(VALUES), extents, large=True)
    assert [batch.direct for batch in plan.batches] == [True, False, True]
    buffers = []
    for batch, following in zip(plan.batches, [*plan.batches[1:], None], strict=True):
        values = np.zeros(batch.nbytes, np.uint8)
        if batch.direct:
            values = np.frombuffer(found[batch.parts[0].request], np.uint8)
        end = batch.offset + batch.nbytes if following is None else following.offset
        buffers += [values, np.zeros(end - batch.offset - values.nbytes, np.uint8)]
    end = plan.batches[-1].offset + plan.batches[-1].nbytes
    return plan, decode, found, buffers, data[plan.batches[0].offset : end]


@pytest.mark.parametrize("step", [1, 7, 50, 1000])
def test_what_arrives_bit_by_bit_is_checked_bit_by_bit(step: int) -> None:
    plan, decode, found, buffers, data = run_of_chunks()
    check = Check(decode.checks(plan.batches, buffers))
    places = [(buffer, i) for buffer in buffers for i in range(buffer.nbytes)]
    assert len(places) == len(data)
    for there, ((buffer, i), byte) in enumerate(zip(places, data, strict=True), 1):
        buffer[i] = byte
        if there % step == 0 or there == len(data):
            check(there)
    for values, wanted in zip(found, VALUES.values(), strict=True):
        assert np.array_equal(values, wanted)


@pytest.mark.parametrize("chunk", range(3))
def test_damage_is_told_as_soon_as_its_chunk_has_arrived(chunk: int) -> None:
    plan, decode, _, buffers, data = run_of_chunks()
    batch = plan.batches[chunk]
    begin = batch.offset - plan.batches[0].offset
    raw = bytearray(data)
    raw[begin] ^= 0x80
    check, at = Check(decode.checks(plan.batches, buffers)), 0
    for buffer in buffers:
        buffer[:] = np.frombuffer(raw, np.uint8)[at : at + buffer.nbytes]
        at += buffer.nbytes
    check(begin + batch.nbytes - 1)
    with pytest.raises(CorruptCheckpointError) as caught:
        check(begin + batch.nbytes)
    assert caught.value.path == list(VALUES)[chunk]


def test_a_chunk_that_was_exchanged_for_another_valid_one_is_found() -> None:
    """Its trailer is right; only the index tells."""
    swapped, _ = packed([np.ones((2, 3)).tobytes(), *PAYLOADS[1:]])
    _, extents = packed(PAYLOADS)
    plan, decode = planned(destinations({"a": np.zeros((2, 3))}), opened(VALUES), extents)
    (batch,) = plan.batches
    with pytest.raises(CorruptCheckpointError, match=r"CRC-32C is \w{8}, the chunk index says"):
        decode.small(batch, np.frombuffer(swapped[: batch.nbytes], np.uint8))


def test_pieces_of_a_large_chunk_add_up_to_its_checksum() -> None:
    data, extents = packed(PAYLOADS)
    values = np.zeros((2, 3))
    plan, decode = planned(destinations({"a": values}), opened(VALUES), extents)
    (batch,) = plan.batches
    raw = np.frombuffer(data, np.uint8)
    crc = decode.piece(batch, raw[:16], 0, 0)
    assert values.tolist() == [[0, 1, 0], [0, 0, 0]]
    crc = decode.piece(batch, raw[16:48], 16, crc)
    decode.expect(batch, 0, crc, raw[48:52])
    assert np.array_equal(values, VALUES["a"])
    with pytest.raises(CorruptCheckpointError):
        decode.expect(batch, 0, crc ^ 1, raw[48:52])


def test_small_destinations_need_no_bytes_at_hand() -> None:
    """Strided ones and extension dtypes are filled too, and others only with what is theirs."""
    brain = DTYPES["bfloat16"]
    stored = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(5, brain), "c": np.array(7)}
    data, extents = packed([value.tobytes() for value in stored.values()])
    for order in "CF":
        found = {key: np.zeros_like(value, order=order) for key, value in stored.items()}
        wanted = Destinations()
        for number, (key, values) in enumerate(found.items()):
            wanted.add(key, number, None, values)
        plan, decode = planned(wanted, opened(stored), extents)
        (batch,) = plan.batches
        decode.small(batch, np.frombuffer(data, np.uint8))
        for key, values in stored.items():
            assert np.array_equal(found[key], values)


def compressed(
    values: np.ndarray[Any, Any], chunk_shape: tuple[int, ...], *, foreign: bool
) -> tuple[Any, Any, bytes]:
    """A checkpoint of one array in compressed chunks, their extents and bytes."""
    codec = replace(ZSTD, crc32c=not foreign)
    checkpoint = opened({"a": values}, chunks={"a": chunk_shape}, codec=codec)
    grid = checkpoint.storages[0].grid
    payloads = []
    for number in range(grid.chunk_count):
        box = grid.box(tuple(map(int, np.unravel_index(number, grid.counts))))
        chunk = np.zeros(chunk_shape, values.dtype)
        chunk[Box((0,) * len(box.shape), box.shape).slices()] = values[box.slices()]
        payloads.append(zstandard.ZstdCompressor().compress(chunk.tobytes()))
    data, extents = packed(payloads)
    if foreign:
        extents = replace(extents, crc32c=None, nbytes=extents.nbytes - 4)
    return checkpoint, extents, data


def decode_all(wanted: Destinations, checkpoint: Any, extents: Any, data: bytes, way: str) -> None:
    """Decode all chunks: many from one buffer, or each from two buffers of its own."""
    plan, decode = planned(wanted, checkpoint, extents, large=way == "apart")
    raw = np.frombuffer(data, np.uint8)
    for batch in plan.batches:
        stored = raw[batch.offset : batch.offset + batch.nbytes]
        if way == "apart":
            decode.encoded(batch, [stored[:20], stored[20:]])
        else:
            decode.small(batch, stored)


WAYS = pytest.mark.parametrize(
    ("way", "foreign"),
    [("together", False), ("together", True), ("apart", False), ("apart", True)],
)


@WAYS
def test_large_compressed_chunks_take_no_memory_of_their_own(way: str, foreign: bool) -> None:
    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    checkpoint, extents, data = compressed(values, (512, 1024), foreign=foreign)
    assert checkpoint.storages[0].chunk_nbytes > INTO_NBYTES
    found = np.zeros_like(values)
    tracemalloc.start()
    try:
        decode_all(destinations({"a": found}), checkpoint, extents, data, way)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(found, values)
    # Decoded into new memory, a chunk would take 2 MiB.
    assert peak < 256 << 10


@pytest.mark.parametrize("foreign", (False, True))
def test_chunks_that_are_decoded_into_new_memory_take_it_one_at_a_time(foreign: bool) -> None:
    values = np.zeros((4, 1 << 18), np.float32)
    checkpoint, extents, data = compressed(values, (1, 1 << 18), foreign=foreign)
    wide = np.ones((4, 2 << 18), np.float32)
    tracemalloc.start()
    try:
        decode_all(destinations({"a": wide[:, ::2]}), checkpoint, extents, data, "together")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not wide[:, ::2].any() and wide[:, 1::2].all()
    assert peak < 1536 << 10  # of 1 MiB each


@WAYS
@pytest.mark.parametrize("chunk_shape", [(7, 5), (3, 5), (2, 5), (7, 2), (2, 3), (8, 8)])
def test_decoding_into_destinations_touches_only_what_is_wanted(
    chunk_shape: tuple[int, int], way: str, foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[Decode.__module__], "INTO_NBYTES", 1)
    values = np.arange(35.0).reshape(7, 5)
    checkpoint, extents, data = compressed(values, chunk_shape, foreign=foreign)
    boxes = [
        None,
        Box((2, 0), (4, 5)),
        Box((0, 1), (7, 2)),
        Box((3, 1), (2, 3)),
        Box((2, 0), (2, 5)),
    ]
    for wanted_boxes in (*([box] for box in boxes), boxes):  # one by one, and all at once
        for stride in (1, 2):
            wanted, expected = Destinations(), []
            for box in wanted_boxes:
                part = values if box is None else values[box.slices()]
                wide = np.full((part.shape[0] + 2, part.shape[1] * stride), -1.0)
                inner = wide[1:-1, ::stride]
                wanted.add("a", 0, box, inner)
                filled = wide.copy()
                filled[1:-1, ::stride] = part
                expected.append((wide, filled))
            decode_all(wanted, checkpoint, extents, data, way)
            for wide, filled in expected:
                assert np.array_equal(wide, filled)


@WAYS
@pytest.mark.parametrize("kind", ["cut off", "shorter", "longer", "followed"])
def test_damage_to_a_chunk_decoded_into_its_destination_names_it(
    kind: str, way: str, foreign: bool
) -> None:
    values = np.arange(1 << 18, dtype=np.float32)
    checkpoint, _, data = compressed(values, (1 << 18,), foreign=foreign)
    compress, frame = zstandard.ZstdCompressor().compress, data[:-4]
    damaged = {
        "cut off": frame[:-1],
        "shorter": compress(values[:-1].tobytes()),
        "longer": compress(values.tobytes() + b"x"),
        "followed": frame + b"x",
    }[kind]
    data, extents = packed([damaged])  # so that checksums of the stored bytes agree
    if foreign:
        extents = replace(extents, crc32c=None, nbytes=extents.nbytes - 4)
    wanted = destinations({"a": np.zeros_like(values)})
    with pytest.raises(CorruptCheckpointError, match="a: /run/1: the chunk at byte 0") as caught:
        decode_all(wanted, checkpoint, extents, data, way)
    assert "the zstd frame" in str(caught.value)
    assert (caught.value.path, caught.value.file, caught.value.offset) == ("a", "d/0", 0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex128", "int4", "bool"])
def test_small_chunks_of_one_array_are_placed_whole_and_not_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The checksums between chunks leave their elements at any address."""
    pieces: list[tuple[Any, ...]] = []

    def counted(*arguments: Any) -> Any:
        pieces.append(arguments)
        return boxes_of_run(*arguments)

    monkeypatch.setattr(payload, "boxes_of_run", counted)
    values = np.arange(100 * 7).reshape(100, 7).astype(DTYPES[dtype])
    own = LeafOptions(chunk_shape=(3, 5))
    options = SaveOptions(leaf_options=lambda *_: own)
    blocking.save(tmp_path / "x", {"w": values}, options=options)
    pieces.clear()
    restored = blocking.restore(tmp_path / "x")["w"]
    assert restored.dtype == values.dtype and restored.tobytes() == values.tobytes()
    assert pieces == []


@pytest.mark.filterwarnings("ignore:.*could not be verified")
def test_small_foreign_leaves_are_copied_without_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[int] = []
    scatter = Decode._scatter

    def counted(self: Decode, part: Any, *arguments: Any) -> None:
        placed.append(part.row)
        scatter(self, part, *arguments)

    monkeypatch.setattr(Decode, "_scatter", counted)
    tree = {str(i): np.arange(i + 1.0) for i in range(50)}
    blocking.save(tmp_path / "x", tree)
    blocking.convert(tmp_path / "x", tmp_path / "x.safetensors")
    target = {key: np.zeros((len(values), 2))[:, 0] for key, values in tree.items()}
    restored = blocking.restore(tmp_path / "x.safetensors")
    assert placed == []
    blocking.restore_into(tmp_path / "x.safetensors", target)  # with strides
    assert len(placed) == 49
    for key, values in tree.items():
        assert np.array_equal(restored[key], values) and np.array_equal(target[key], values)
