"""What a DCP checkpoint says of itself: its metadata, its archives, the layout of its tensors."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from asyncckpt.checkpoint.foreign.dcp import check_tiling
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.codecs import ChunkError
from asyncckpt.format.foreign.foreign_tree import nest
from asyncckpt.format.foreign.torch.dcp import Entry, Item, decode_entries, layout_of
from asyncckpt.format.foreign.torch.plain_values import load_value
from asyncckpt.format.foreign.torch.strided import Layout, codec_of, dense_axes
from asyncckpt.format.foreign.torch.torch_pickle import (
    DTYPES,
    SavedStorage,
    SavedTensor,
    metadata_names,
)
from asyncckpt.format.foreign.torch.torch_zip import LONG_HEAD_NBYTES, Archive, ShortHeadError
from asyncckpt.format.foreign.torch.unpickle import (
    ALLOWANCE_RATIO,
    Allowance,
    PickleSource,
    Unpickler,
)
from asyncckpt.options import MIB
from asyncckpt.spec import DTYPES as ZARR_DTYPES
from asyncckpt.spec import Box

PLENTY = 1 << 30

# ---------------------------------------------------------------------------------- .metadata


def entries_of(metadata: object, protocol: int | None = None) -> list[Entry]:
    source = PickleSource(pickle.dumps(metadata, protocol), "the metadata", ".metadata")
    value = Unpickler(source, metadata_names(), Allowance(PLENTY)).run()
    entries = decode_entries(value, file=".metadata")
    check_tiling(entries)
    return entries


def tensor(
    size: tuple[int, ...],
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]],
    dtype: torch.dtype = torch.float32,
) -> dcp.TensorStorageMetadata:
    return dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=dtype),
        torch.Size(size),
        [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in chunks],
    )


def sample(**changes: Any) -> dcp.Metadata:
    """The metadata of a tensor in two shards and of a number."""
    fields: dict[str, Any] = {
        "state_dict_metadata": {
            "model.w": tensor((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))]),
            "lr": dcp.BytesStorageMetadata(),
        },
        "planner_data": {"lr": ("lr",), "model.w": ("model", "w")},
        "storage_data": {
            dcp.MetadataIndex("model.w", (0, 0), 0): _StorageInfo("__0_0.distcp", 0, 100),
            dcp.MetadataIndex("model.w", (3, 0), 1): _StorageInfo("__1_0.distcp", 7, 200),
            dcp.MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 100, 50),
        },
        "storage_meta": dcp.StorageMeta(Path("/somewhere"), "save"),
        "version": "1.0.0",
    }
    return dcp.Metadata(**{**fields, **changes})


@pytest.mark.parametrize("protocol", range(2, 6))
def test_entries_are_in_the_order_of_the_state_dict(protocol: int) -> None:
    assert entries_of(sample(), protocol) == [
        Entry("lr", ("lr",), None, "", (), (Item("__0_0.distcp", 100, 50),)),
        Entry(
            "model.w",
            ("model", "w"),
            (4, 2),
            "float32",
            (Box((0, 0), (3, 2)), Box((3, 0), (1, 2))),
            (Item("__0_0.distcp", 0, 100), Item("__1_0.distcp", 7, 200)),
        ),
    ]


def test_keys_without_a_path_stand_at_the_top() -> None:
    for planner_data in (None, {}, {"lr": ("lr",)}):
        found = entries_of(sample(planner_data=planner_data))
        assert {entry.path for entry in found} == {("model.w",), ("lr",)}


def test_metadata_of_torch_before_it_had_versions_is_read() -> None:
    assert len(entries_of(sample(version=None, storage_meta=None))) == 2


def test_shards_without_elements_need_no_place() -> None:
    described = {"e": tensor((0, 3), [((0, 0), (0, 3))]), "s": tensor((), [((), ())])}
    described["t"] = tensor((2,), [((0,), (1,)), ((1,), (1,)), ((2,), (0,)), ((2,), (0,))])
    places = {
        dcp.MetadataIndex(key, offset, 0): _StorageInfo("f", at, 10)
        for at, (key, offset) in zip(
            (0, 10, 20), [("s", ()), ("t", (0,)), ("t", (1,))], strict=True
        )
    }
    found = entries_of(sample(state_dict_metadata=described, storage_data=places, planner_data={}))
    assert [len(entry.boxes) for entry in found] == [0, 1, 2]


@pytest.mark.parametrize("version", ["2.0.0", "0.9", "10.1", "", 1, ("1",)])
def test_versions_from_the_future_are_refused(version: object) -> None:
    with pytest.raises(UnsupportedFormatError, match="this release reads version 1") as caught:
        entries_of(sample(version=version))
    assert caught.value.file == ".metadata"


def places(**changes: Any) -> dict[Any, Any]:
    found = sample().storage_data
    first = next(iter(found))
    info = {"relative_path": "__0_0.distcp", "offset": 0, "length": 100, **changes}
    return {**found, first: _StorageInfo(**info)}


def described(*chunks: tuple[tuple[int, ...], tuple[int, ...]], size: Any = (4, 2)) -> Any:
    return {"model.w": tensor(size, list(chunks))}


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "another value": (lambda: {"a": 1}, "it is a dict"),
    "no keys": (lambda: sample(state_dict_metadata=None), "state_dict_metadata is not a dict"),
    "a key": (lambda: sample(state_dict_metadata={1: None}), "state_dict_metadata is not a dict"),
    "an entry": (lambda: sample(state_dict_metadata={"a": 1}), "'a' is a int"),
    "no places": (lambda: sample(storage_data=None), "storage_data is not a dict"),
    "a place": (
        lambda: sample(storage_data={dcp.MetadataIndex("lr"): 5}),
        "storage_data of 'lr' is a int",
    ),
    "an index": (lambda: sample(storage_data={dcp.MetadataIndex(5): 5}), "has no name"),  # type: ignore[arg-type]
    "a missing place": (lambda: sample(storage_data={}), "does not locate a shard of 'lr'"),
    "a path": (lambda: sample(planner_data={"lr": "lr"}), "planner_data of 'lr' is not a path"),
    "an empty path": (
        lambda: sample(planner_data={"lr": ()}),
        "planner_data of 'lr' is not a path",
    ),
    "a deep path": (lambda: sample(planner_data={"lr": ("a",) * 300}), "too deep"),
    "an index below 0": (lambda: sample(planner_data={"lr": ("a", -1)}), "an index out of range"),
    "paths": (lambda: sample(planner_data=[1]), "planner_data is not a dict"),
    "a parent": (lambda: sample(storage_data=places(relative_path="../x")), "has a part '..'"),
    "a root": (lambda: sample(storage_data=places(relative_path="/x")), "is absolute"),
    "a number as file": (lambda: sample(storage_data=places(relative_path=5)), "has no file"),
    "an offset below 0": (lambda: sample(storage_data=places(offset=-1)), "bytes -1 to 99"),
    "no length": (lambda: sample(storage_data=places(length=0)), "bytes 0 to 0"),
    "a huge offset": (lambda: sample(storage_data=places(offset=1 << 63)), "is bytes"),
    "shared bytes": (
        lambda: sample(storage_data=places(length=101)),
        "share bytes of __0_0.distcp",
    ),
    "one shard many times": (
        lambda: sample(state_dict_metadata=described(*[((0, 0), (3, 2))] * 1000)),
        r"two shards of 'model.w' are at \[0, 0\]",
    ),
    "a gap": (
        lambda: sample(state_dict_metadata=described(((0, 0), (3, 2)))),
        "do not tile it: they hold 6 of its 8 elements",
    ),
    "another rank": (
        lambda: sample(state_dict_metadata=described(((0,), (4,)))),
        "is not of rank 2",
    ),
    "an absurd rank": (
        lambda: sample(state_dict_metadata=described(size=(1,) * 33)),
        "at most 32 integers",
    ),
    "an absurd size": (
        lambda: sample(state_dict_metadata=described(size=(1 << 40, 1 << 40))),
        "which no tensor has",
    ),
}


def test_a_list_of_shards_of_many_tensors_is_looked_at_once() -> None:
    """Otherwise the time would grow with the square of the pickle."""
    shared = tensor((2,), [((0,), (1,)), ((1,), (1,))])
    keys = ("a", "b")
    places = {
        dcp.MetadataIndex(key, (offset,), 0): _StorageInfo(key, 10 * offset, 10)
        for key in keys
        for offset in range(2)
    }
    described = dict.fromkeys(keys, shared)
    first, second = entries_of(
        sample(state_dict_metadata=described, storage_data=places, planner_data={})
    )
    assert first.boxes is second.boxes
    assert [item.file for item in (*first.items, *second.items)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("what", BAD)
def test_malformed_metadata_says_what_is_wrong(what: str) -> None:
    make, reason = BAD[what]
    with pytest.raises(CorruptCheckpointError, match=reason) as caught:
        entries_of(make())
    assert caught.value.file == ".metadata"


@pytest.mark.parametrize(
    "field", ["state_dict_metadata", "planner_data", "storage_data", "version"]
)
def test_fields_of_any_other_type_are_errors_of_ours(field: str) -> None:
    deep: Any = ()
    for _ in range(3000):
        deep = (deep,)
    values = (5, "a", [1], (1,), {"a": deep}, {"lr": deep}, {"a": {"b": 1}}, deep, 1.5, True)
    for value in values:
        # pickle itself recurses: deep values are put in as opcodes.
        raw = pickle.dumps(sample(**{field: "MARK"}), 2)
        data = raw.replace(_program("MARK"), _program(value))
        assert data != raw
        source = PickleSource(data, "the metadata", ".metadata")
        try:
            found = Unpickler(source, metadata_names(), Allowance(PLENTY)).run()
            decode_entries(found, file=".metadata")
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            assert error.file == ".metadata"


def _program(value: object) -> bytes:
    """The opcodes that make a value, without memo."""
    if isinstance(value, tuple):
        depth = 0
        while value and isinstance(value, tuple) and isinstance(value[0], tuple):
            value, depth = value[0], depth + 1
        inner = b"(" + b"".join(map(_program, value)) + b"t"
        return inner + b"\x85" * depth
    if isinstance(value, dict):
        return b"}(" + b"".join(_program(k) + _program(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_program, value)) + b"e"
    if isinstance(value, bool):
        return b"\x88"
    if isinstance(value, int):
        return b"K" + bytes([value])
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    assert isinstance(value, str)
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def test_tensors_that_are_not_dense_are_refused() -> None:
    sparse = tensor((2,), [((0,), (2,))])
    sparse.properties.layout = torch.sparse_coo
    places = {dcp.MetadataIndex("s", (0,), 0): _StorageInfo("f", 0, 10)}
    with pytest.raises(UnsupportedFormatError, match=r"'s' has the layout 'torch.sparse_coo'"):
        entries_of(dcp.Metadata({"s": sparse}, None, places))


def test_extensions_are_refused() -> None:
    changed = places(transform_descriptors=["stream.zstd/1"])
    with pytest.raises(UnsupportedFormatError, match=r"through the extension 'stream\.zstd/1'"):
        entries_of(sample(storage_data=changed))


def test_names_of_other_classes_are_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"the global '.*Allowance'"):
        entries_of(sample(storage_meta=Allowance))


def test_large_metadata_stay_within_their_memory() -> None:
    keys = [f"model.layers.{n}.attention.weight" for n in range(200)]
    offsets = [torch.Size((512 * n, 0)) for n in range(8)]
    metadata = dcp.Metadata(
        {
            key: dcp.TensorStorageMetadata(
                dcp.TensorProperties(),
                torch.Size((4096, 4096)),
                [dcp.ChunkStorageMetadata(o, torch.Size((512, 4096))) for o in offsets],
            )
            for key in keys
        },
        {key: ("model", key[6:]) for key in keys},
        {
            dcp.MetadataIndex(key, offset, n): _StorageInfo(f"__{n}_0.distcp", 4711 * at, 4711)
            for at, key in enumerate(keys)
            for n, offset in enumerate(offsets)
        },
    )
    data = pickle.dumps(metadata)
    allowance = Allowance(ALLOWANCE_RATIO * len(data) + 64 * 1024)
    value = Unpickler(PickleSource(data, "it", "f"), metadata_names(), allowance).run()
    assert len(decode_entries(value, file="f")) == 200


# ------------------------------------------------------------------------------------- shards


def tiling_fault(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """What `check_tiling` says of the shards of one tensor."""
    entry = Entry("a", ("a",), shape, "float32", tuple(boxes), ())
    try:
        check_tiling([entry])
    except CorruptCheckpointError as error:
        return str(error).partition("do not tile it: ")[2].partition(";")[0]
    return None


@given(st.data())
def test_cuts_of_an_array_tile_it_and_nothing_else_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(boxes) - 1))
        axis = data.draw(st.integers(0, len(shape) - 1))
        box = boxes.pop(at)
        cut = data.draw(st.integers(0, box.shape[axis]))
        for start, stop in ((0, cut), (cut, box.shape[axis])):
            offset, size = list(box.offset), list(box.shape)
            offset[axis] += start
            size[axis] = stop - start
            if stop > start:
                boxes.append(Box(tuple(offset), tuple(size)))
    boxes = data.draw(st.permutations(boxes))
    assert tiling_fault(shape, boxes) is None
    moved = data.draw(st.integers(0, len(boxes) - 1))
    axis = data.draw(st.integers(0, len(shape) - 1))
    shift = data.draw(st.sampled_from([-2, -1, 1, 2]))
    offset = list(boxes[moved].offset)
    offset[axis] += shift
    assume(offset[axis] >= 0)
    changed = [*boxes[:moved], Box(tuple(offset), boxes[moved].shape), *boxes[moved + 1 :]]
    counts = np.zeros([n + 8 for n in shape], int)
    for box in changed:
        counts[box.slices()] += 1
    right = counts[tuple(slice(n) for n in shape)].min() == 1 and counts.max() == 1
    assert (tiling_fault(shape, changed) is None) == (right and counts.sum() == int(np.prod(shape)))


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([((0, 0), (3, 2))], "they hold 6 of its 8 elements"),
        ([((0, 0), (3, 2)), ((2, 0), (2, 2))], "[0:3, 0:2] and [2:4, 0:2] overlap"),
        ([((0, 0), (4, 2)), ((0, 0), (4, 2))], "[0:4, 0:2] and [0:4, 0:2] overlap"),
        ([((0, 0), (4, 2)), ((4, 0), (1, 2))], "[4:5, 0:2] reaches past it"),
    ],
)
def test_shards_that_do_not_tile_are_named(boxes: list[Any], fault: str) -> None:
    assert tiling_fault((4, 2), [Box(offset, shape) for offset, shape in boxes]) == fault


def test_a_pinwheel_tiles_though_no_cut_parts_it() -> None:
    boxes = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    pinwheel = [Box(offset, shape) for offset, shape in boxes]
    assert tiling_fault((3, 3), pinwheel) is None
    pinwheel[-1] = Box((0, 0), (1, 1))
    assert tiling_fault((3, 3), pinwheel) == "[0:1, 0:2] and [0:1, 0:1] overlap"


def test_many_shards_are_checked_in_little_time_and_tangles_are_refused() -> None:
    rows = [Box((n, 0), (1, 4)) for n in range(20_000)]
    assert tiling_fault((20_000, 4), rows) is None
    crossing = [Box((0, n), (4000, 1)) for n in range(0, 4000, 2)]
    crossing += [Box((n, 0), (1, 4000)) for n in range(0, 4000, 2)]
    assert (tiling_fault((4000, 4000), crossing) or "").endswith(" overlap")
    # Cut in half along one axis after the other: a row per corner would be 21 million rows.
    halves = [Box((0,) * n + (1,) + (0,) * (19 - n), (1,) * (n + 1) + (2,) * (19 - n))
              for n in range(20)]  # fmt: skip
    whole = [*halves, Box((0,) * 20, (1,) * 20)]
    assert tiling_fault((2,) * 20, whole) == "21 of them are too irregular to be checked"


# ---------------------------------------------------------------------------- the nested tree


def test_integers_are_indices_where_they_count_from_zero() -> None:
    paths = [("a", 0), ("a", 1, "x"), ("b", 1), ("b", 0), ("c", 0), ("c", 2), ("d", "0"), ("e",)]
    assert nest(paths, list("pqrstuvw")) == {
        "a": ["p", {"x": "q"}],
        "b": ["s", "r"],
        "c": {0: "t", 2: "u"},
        "d": {"0": "v"},
        "e": "w",
    }


@pytest.mark.parametrize(
    "paths",
    [[("a",), ("a",)], [("a",), ("a", "b")], [("a", "b"), ("a",)], [("a", 0), ("a", 0, "b")]],
)
@pytest.mark.parametrize("value", [{}, None])
def test_paths_that_contradict_each_other_are_errors(paths: Any, value: object) -> None:
    with pytest.raises(ValueError, match=r"the path \['a'.* is both a leaf and a container"):
        nest(paths, [value] * len(paths))


# ----------------------------------------------------------------------------------- archives


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def archive(data: bytes, nbytes: int | None = None) -> Archive:
    return Archive(data, len(data) if nbytes is None else nbytes, "the archive", "f", 1000)


DENSE = {
    "plain": torch.arange(12.0).reshape(3, 4),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "rank 0": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "bfloat16": torch.arange(5).bfloat16(),
    "float8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "uint16": torch.arange(5).to(torch.uint16),
    "bool": torch.tensor([True, False]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "part": torch.arange(100.0)[10:20].clone(),
    "long axes of one": torch.arange(6.0).reshape(2, 1, 3, 1).permute(3, 0, 1, 2),
}


@pytest.mark.parametrize("what", DENSE)
def test_a_tensor_is_found_by_the_head_of_its_archive(what: str) -> None:
    value = DENSE[what]
    data = saved(value)
    found, start = archive(data).tensor(Allowance(MIB))
    assert archive(data[:1024], len(data)).tensor(Allowance(MIB)) == (found, start)
    dtype = str(value.dtype).removeprefix("torch.")
    layout = layout_of(archive(data), found, tuple(value.shape), dtype)
    assert dtype in DTYPES
    stored = np.frombuffer(data, np.uint8, value.nbytes, start)
    if value.nbytes:
        decode = codec_of(layout, tuple(value.shape), dtype).decode
        stored = stored if decode is None else decode([stored], value.nbytes)
    got = stored.view(ZARR_DTYPES[dtype]).reshape(tuple(value.shape))
    whole = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    assert got.tobytes() == whole.view(torch.uint8).numpy().tobytes()


def test_a_negative_view_is_negated() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    found, start = archive(data := saved(value)).tensor(Allowance(MIB))
    assert value.is_neg() and found.neg
    # As DCP does, which copies what is a part of its storage; the bit stays.
    packed = SavedTensor(SavedStorage("0", "float32", 2), "float32", 0, (2,), (1,), neg=True)
    decode = codec_of(layout_of(archive(data), packed, (2,), "float32"), (2,), "float32").decode
    assert decode is not None
    parts = np.frombuffer(data, np.float32, 4, start)[1::2].copy()
    assert decode([parts.view(np.uint8)], 8).view(np.float32).tolist() == value.tolist()


@pytest.mark.parametrize("value", [torch.arange(6.0).reshape(2, 3).t(), [1, "text"]], ids=str)
def test_an_archive_cut_anywhere_is_short_or_corrupt(value: object) -> None:
    data = saved(value)
    for end in range(0, len(data) - 250, 3):
        for nbytes in (end, len(data)):
            try:
                cut = archive(data[:end], nbytes)
                if isinstance(value, list):
                    assert load_value(cut.pickle(), Allowance(MIB)) == value
                else:
                    cut.tensor(Allowance(MIB))
            except CorruptCheckpointError as error:
                assert error.file == "f"
                assert 1000 <= (error.offset or 0) <= 1000 + len(data)
            except ShortHeadError:
                assert nbytes > end


def test_a_head_is_corrupt_if_it_is_longer_than_what_is_read_at_last() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        new.writestr("a" * (LONG_HEAD_NBYTES - 20) + "/data.pkl", b"")
    data = buffer.getvalue()
    with pytest.raises(ShortHeadError):
        archive(data[:1000], len(data)).tensor(Allowance(MIB))
    with pytest.raises(CorruptCheckpointError, match="too long"):
        archive(data[:LONG_HEAD_NBYTES], len(data)).tensor(Allowance(MIB))


@given(st.data())
def test_changed_bytes_of_a_head_raise_our_errors_or_give_a_tensor(data: st.DataObject) -> None:
    raw = bytearray(saved(torch.arange(6.0).reshape(2, 3)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 710))] = data.draw(st.integers(0, 255))
    try:
        changed = archive(bytes(raw))
        found, _ = changed.tensor(Allowance(MIB))
        layout_of(changed, found, (2, 3), "float32")
    except (CorruptCheckpointError, UnsupportedFormatError, ShortHeadError):
        pass


def rezipped(change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of a tensor, written again by zipfile, with members changed."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.arange(3.0)))) as old,
        zipfile.ZipFile(buffer, "w", method) as new,
    ):
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return buffer.getvalue()


def test_archives_of_any_writer_of_zip_files_are_read() -> None:
    data = rezipped(lambda _, content: content)
    found, start = archive(data).tensor(Allowance(MIB))
    assert np.frombuffer(data, "<f4", 3, start).tolist() == [0, 1, 2]
    assert found.shape == (3,)


def test_another_byte_order_is_refused() -> None:
    data = rezipped(lambda name, content: b"big" if name.endswith("byteorder") else content)
    with pytest.raises(UnsupportedFormatError, match=r"another byte order \(b'big'\)") as caught:
        archive(data).tensor(Allowance(MIB))
    assert data[(caught.value.offset or 0) - 1000 :].startswith(b"big")


def test_compressed_members_are_refused() -> None:
    data = rezipped(lambda _, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedFormatError, match="compressed or encrypted members"):
        archive(data).tensor(Allowance(MIB))


def test_what_is_no_archive_is_corrupt() -> None:
    for data in (b"", b"PK\x03\x04", b"\x80\x04N.", bytes(2000)):
        with pytest.raises(CorruptCheckpointError, match="the archive is damaged"):
            archive(data).tensor(Allowance(MIB))
        with pytest.raises(CorruptCheckpointError, match="the archive is damaged"):
            archive(data).pickle()


def test_another_first_member_is_corrupt() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        new.writestr("archive/version", b"3")
    with pytest.raises(CorruptCheckpointError, match="its first member is 'version'"):
        archive(buffer.getvalue()).pickle()


# ------------------------------------------------------------------------------------- layout


@given(st.data())
def test_permuted_arrays_are_dense_and_come_back(data: st.DataObject) -> None:
    stored_shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    axes = tuple(data.draw(st.permutations(range(len(stored_shape)))))
    stored = np.arange(np.prod(stored_shape), dtype=np.float32).reshape(stored_shape)
    values = stored.transpose(axes)
    strides = tuple(step // 4 for step in values.strides)
    found = dense_axes(values.shape, strides)
    assert found is not None
    codec = codec_of(Layout(found), values.shape, "float32")
    raw = stored.reshape(-1).view(np.uint8)
    if codec.decode is not None:
        half = raw.nbytes // 2
        raw = codec.decode([raw[:half], raw[half:]], raw.nbytes)
    assert raw.view(np.float32).reshape(values.shape).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2,), (2,)), ((2, 2), (0, 1)), ((2, 2), (1, 1)), ((2, 3), (4, 1)), ((2,), (0,))],
)
def test_arrays_with_gaps_or_shared_elements_are_not_dense(shape: Any, strides: Any) -> None:
    assert dense_axes(shape, strides) is None
    tensor = SavedTensor(SavedStorage("0", "float32", 100), "float32", 0, shape, strides)
    with pytest.raises(UnsupportedFormatError, match="share or skip bytes") as caught:
        layout_of(archive(b""), tensor, shape, "float32")
    assert (caught.value.file, caught.value.offset) == ("f", 1000)


def test_a_chunk_of_another_length_is_damaged() -> None:
    codec = codec_of(Layout((1, 0)), (2, 3), "float32")
    assert codec.decode is not None
    with pytest.raises(ChunkError, match="it holds 20 bytes, the chunk has 24"):
        codec.decode([np.zeros(20, np.uint8)], 24)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "int32"}, r"the metadata says float32\[2, 3\], the archive int32\[2, 3\]"),
        ({"shape": (3, 2)}, "the metadata says"),
        ({"offset": 1}, "reaches past the 6 elements"),
        ({"storage": SavedStorage("0", "float32", 5)}, "reaches past the 5 elements"),
        ({"storage": SavedStorage("0", "", 20)}, "reaches past the 5 elements"),
        ({"storage": SavedStorage("0", "int32", 6)}, "reaches past"),
        ({"conj": True}, "cannot be conjugated"),
    ],
)
def test_an_archive_that_contradicts_the_metadata_is_an_error(changes: Any, reason: str) -> None:
    fields = {"storage": SavedStorage("0", "float32", 6), "dtype": "float32", "offset": 0}
    fields |= {"shape": (2, 3), "strides": (3, 1), **changes}
    with pytest.raises(CorruptCheckpointError, match=reason) as caught:
        layout_of(archive(b""), SavedTensor(**fields), (2, 3), "float32")
    assert (caught.value.file, caught.value.offset) == ("f", 1000)
