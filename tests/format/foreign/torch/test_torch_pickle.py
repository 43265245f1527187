"""The interpreter of pickles: it gives what pickle gives for plain values, and executes nothing."""

from __future__ import annotations

import collections
import datetime
import gc
import io
import math
import os
import pathlib
import pickle
import pickletools
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.foreign.torch.plain_values import load_value
from asyncckpt.format.foreign.torch.torch_pickle import (
    Dtype,
    StorageInfo,
    load_tensor,
    load_tree,
    metadata_names,
)
from asyncckpt.format.foreign.torch.unpickle import (
    MAX_INTEGER_NBYTES,
    READ,
    REFUSED,
    Allowance,
    PickleSource,
    Unpickler,
)
from asyncckpt.options import MIB

PROTOCOLS = range(2, 6)
PLENTY = 1 << 30


def source(data: bytes, base: int = 0) -> PickleSource:
    return PickleSource(data, "the value", "file", base)


def value_of(data: bytes, nbytes: int = PLENTY) -> Any:
    return load_value(source(data), Allowance(nbytes))


@contextmanager
def memory_peak() -> Iterator[list[int]]:
    """Afterwards the list has the peak of memory allocated inside, in bytes."""
    peaks: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield peaks
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------- plain values

keys = st.text(max_size=5) | st.integers()
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**600), 2**600)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary(max_size=300)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=30,
)


@given(trees, st.sampled_from(PROTOCOLS))
def test_plain_values_are_what_pickle_makes_of_them(value: Any, protocol: int) -> None:
    found = value_of(pickle.dumps(value, protocol))
    # repr tells types, the sign of zero and NaN, where == does not.
    assert repr(found) == repr(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lists_and_dicts_longer_than_a_batch_are_whole(protocol: int) -> None:
    value = {"list": list(range(5003)), "dict": {str(n): n for n in range(2501)}, "tuple": (1,) * 9}
    assert value_of(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_container_used_twice_stands_at_both_places(protocol: int) -> None:
    shared = [1, {"a": "text"}]
    assert value_of(pickle.dumps([shared, shared, "text"], protocol)) == [shared, shared, "text"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sizes_are_tuples_and_ordered_dicts_are_dicts(protocol: int) -> None:
    value = (torch.Size([2, 3]), collections.OrderedDict(a=1, b=[2]))
    found = value_of(pickle.dumps(value, protocol))
    assert found == ((2, 3), {"a": 1, "b": [2]})
    assert [type(part) for part in found] == [tuple, dict]


def test_text_that_is_no_unicode_keeps_its_surrogates() -> None:
    assert value_of(pickle.dumps("a\ud800b", 4)) == "a\ud800b"


def test_what_follows_a_pickle_is_left_alone() -> None:
    data = pickle.dumps([1], 4)
    found = Unpickler(PickleSource(b"PK" + data + b"\xff", "it", "f", 0, 2), {}, Allowance(PLENTY))
    assert found.run() == [1]
    assert found.nbytes == len(data)


def test_a_pickle_is_decoded_in_turns() -> None:
    unpickler = Unpickler(source(pickle.dumps(list(range(50_000)))), {}, Allowance(PLENTY))
    turns = 1
    while not unpickler.step(10_000):
        turns += 1
    assert unpickler.value == list(range(50_000))
    assert turns > 3


# ------------------------------------------------------------------------ beyond the allow-list


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


class Stateful:
    """Pickles as an instance with a state."""

    def __init__(self) -> None:
        self.field = 1


OFF_THE_LIST: dict[str, Any] = {
    "os.system": Calls(os.system, "touch executed"),
    "eval": Calls(eval, "open('executed', 'w')"),
    "exec": Calls(exec, "open('executed', 'w')"),
    "open": Calls(open, "executed", "w"),
    "getattr": Calls(getattr, "text", "upper"),
    "bytearray": bytearray(b"abc"),
    "set": {1, 2},
    "frozenset": frozenset((1, 2)),
    "an instance": Stateful(),
    "a class": Stateful,
    "a function": math.sqrt,
    "a path": pathlib.PurePosixPath("a"),
    "a date": datetime.date(2020, 1, 2),
    "a defaultdict": collections.defaultdict(list, a=[1]),
    "a dtype": torch.float32,
    "an array": np.arange(3),
    "a number of NumPy": np.float64(1),
    "a tensor": torch.ones(2),
    "a range": range(3),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("what", OFF_THE_LIST)
def test_nothing_off_the_allow_list_is_read_or_executed(
    what: str, protocol: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(["before", {"inside": OFF_THE_LIST[what]}], protocol)
    with pytest.raises(UnsupportedFormatError, match=r"file, byte \d+: the value has ") as caught:
        load_value(source(data, 1000), Allowance(PLENTY))
    assert caught.value.file == "file"
    assert 1000 <= (caught.value.offset or 0) < 1000 + len(data)
    assert not list(tmp_path.iterdir())


def test_the_error_names_the_global_and_its_place() -> None:
    data = pickle.dumps(Calls(os.system, "true"), 2)
    where = data.index(b"cposix")
    with pytest.raises(UnsupportedFormatError, match=rf"byte {where}: .*'posix\.system'") as caught:
        value_of(data)
    assert caught.value.offset == where
    assert caught.value.found == "the global 'posix.system'"


@pytest.mark.parametrize("key", [1.5, None, (1, 2), b"a", True])
def test_keys_are_strings_and_integers(key: object) -> None:
    with pytest.raises(UnsupportedFormatError, match="as a key"):
        value_of(pickle.dumps({key: 1}))


def test_a_long_integer_as_a_key_is_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="more than 1024 bits as a key"):
        value_of(pickle.dumps({2**1100: 1}))


def test_every_opcode_of_pickle_is_read_or_refused() -> None:
    assert not READ.keys() & REFUSED.keys()
    assert READ.keys() | REFUSED.keys() == {ord(opcode.code) for opcode in pickletools.opcodes}


def argument_of(code: int) -> bytes:
    """An argument that an opcode may have, by the description of CPython."""
    argument = pickletools.code2op[chr(code)].arg
    if argument is None:
        return b""
    sizes = {
        pickletools.TAKEN_FROM_ARGUMENT1: b"\2ab",
        pickletools.TAKEN_FROM_ARGUMENT4: b"\2\0\0\0ab",
        pickletools.TAKEN_FROM_ARGUMENT4U: b"\2\0\0\0ab",
        pickletools.TAKEN_FROM_ARGUMENT8U: b"\2\0\0\0\0\0\0\0ab",
        pickletools.UP_TO_NEWLINE: b"a\nb\n",
    }
    return sizes.get(argument.n) or bytes(argument.n)


@pytest.mark.parametrize("code", sorted(READ))
def test_opcodes_that_are_read_have_the_arguments_of_pickle(code: int) -> None:
    data = bytes([code]) + argument_of(code)
    unpickler = Unpickler(source(data + b"behind"), {("a", "b"): None}, Allowance(PLENTY))
    with suppress(CorruptCheckpointError):  # of its operands there are none
        unpickler.step(1)
    assert unpickler.nbytes == len(data)


@pytest.mark.parametrize("code", sorted(REFUSED))
def test_refused_opcodes_are_named(code: int) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"byte 2: the value has {REFUSED[code]},"):
        value_of(b"\x80\x04" + bytes([code]) + b".")


def test_a_newer_protocol_is_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="protocol 6"):
        value_of(b"\x80\x06N.")


# --------------------------------------------------------------------------- damaged and hostile

VALUE = {"a": [1, 2.5, b"bytes", None, True], "b": ({"c": "text"}, 2**70, 1 + 2j)}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_pickle_cut_anywhere_is_corrupt(protocol: int) -> None:
    data = pickle.dumps(VALUE, protocol)
    for end in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="the value is damaged"):
            value_of(data[:end])


@given(st.data(), st.sampled_from(PROTOCOLS))
def test_changed_bytes_raise_our_errors_or_give_a_value(data: st.DataObject, protocol: int) -> None:
    raw = bytearray(pickle.dumps(VALUE, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        value_of(bytes(raw))
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        assert error.file == "file"
        assert error.offset is not None


@settings(max_examples=300)
@given(st.lists(st.sampled_from(sorted(READ)), max_size=30))
def test_any_program_of_known_opcodes_ends(codes: list[int]) -> None:
    program = b"".join(bytes([code]) + argument_of(code) for code in codes)
    with suppress(CorruptCheckpointError, UnsupportedFormatError):
        value_of(b"\x80\x04" + program + b".", 10 * MIB)


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return b"\x80\x04" + opening * depth + b"N" + closing * depth + b"."


MANY = 150_000

HOSTILE: dict[str, bytes] = {
    "lists within lists": nested(b"]", b"a", MANY),
    "tuples within tuples": b"\x80\x04)" + b"\x85" * MANY + b".",
    "dicts within dicts": nested(b"}K\x00", b"s", MANY),
    "a deep tuple as a key": b"\x80\x04})" + b"\x85" * MANY + b"Ns.",
    "marks without end": b"\x80\x04" + b"(" * MANY + b".",
    "lists without end": b"\x80\x04(" + b"]" * MANY + b"t.",
    "dicts without end": b"\x80\x04(" + b"}" * MANY + b"t.",
    "numbers without end": b"\x80\x04(" + b"M\xff\xff" * MANY + b"t.",
    "nothing without end": b"\x80\x04(" + b"N" * MANY + b"t.",
    "texts in the memo": b"\x80\x04(" + b"\x8c\x01a\x94" * MANY + b"t(h\x00t\x86.",
    "bytes of one text many times": b"\x80\x04X"
    + struct.pack("<I", 60_000)
    + b"a" * 60_000
    + b"\x94("
    + b"c_codecs\nencode\nh\x00\x8c\x06latin1\x86R" * 2_000
    + b"t\x86.",
    "a text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"abc.",
    "bytes that are not there": b"\x80\x04B" + struct.pack("<I", 0xFFFFFFFF) + b"abc.",
    "a number that is not there": b"\x80\x04\x8b" + struct.pack("<I", 0x7FFFFFFF) + b"abc.",
    "a huge number": b"\x80\x04\x8b" + struct.pack("<I", MANY) + b"\x01" * MANY + b".",
    "a negative length": b"\x80\x04\x8b\xff\xff\xff\xffabc.",
}


def laughs(levels: int, width: int) -> bytes:
    """Lists that each hold the one before many times."""
    value: list[Any] = ["ha"]
    for _ in range(levels):
        value = [value] * width
    return pickle.dumps(value, 4)


HOSTILE["a billion laughs"] = laughs(9, 10)
HOSTILE["an endless list"] = pickle.dumps((lambda a: a.append(a) or a)([]), 4)
HOSTILE["an endless dict"] = pickle.dumps((lambda a: a.update(a=a) or a)({}), 4)


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pickles_are_refused_within_their_memory(what: str) -> None:
    data = HOSTILE[what]
    with (
        memory_peak() as peak,
        pytest.raises((CorruptCheckpointError, UnsupportedFormatError)) as caught,
    ):
        value_of(data, 3 * len(data) + 3 * MIB)
    assert caught.value.offset is not None
    assert peak[0] <= 3 * len(data) + 3 * MIB


def test_fields_of_an_instance_have_names() -> None:
    """The text of a long integer takes more time than its bytes explain."""
    begin = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}"
    with pytest.raises(CorruptCheckpointError, match="a field of a MetadataIndex is a int"):
        Unpickler(source(begin + b"K\x00Nsb."), metadata_names(), Allowance(PLENTY)).run()


TEXT = b"X" + struct.pack("<I", 60_000) + b"a" * 60_000
NUMBER = b"\x8b" + struct.pack("<I", 1700) + b"\x01" * 1700


@pytest.mark.parametrize(
    "call",
    [
        b"ctorch\ndevice\n\x94" + TEXT + b"K\x00\x86\x94",
        b"ctorch\ndevice\n\x94\x8c\x01a" + NUMBER + b"\x86\x94",
        b"cnumpy\ndtype\n\x94" + TEXT + b"NN\x87\x94",
    ],
    ids=["a device with a long name", "a device with a long number", "a dtype with a long name"],
)
def test_names_made_of_one_text_many_times_are_refused_within_their_memory(call: bytes) -> None:
    data = b"\x80\x04(" + call + b"h\x00h\x01R" * 20_000 + b"t."
    with (
        memory_peak() as peak,
        pytest.raises((CorruptCheckpointError, UnsupportedFormatError)),
    ):
        load_tree(source(data), Allowance(3 * len(data) + 3 * MIB), 0)
    assert peak[0] <= 3 * len(data) + 3 * MIB


def test_a_long_size_is_paid_for_each_time() -> None:
    """Otherwise the time to look at its items would grow with the square of the pickle."""
    size = b"((" + b"K\x01" * 20_000 + b"t\x85\x94ctorch\nSize\n\x94"
    with pytest.raises(CorruptCheckpointError, match="objects would take far more memory"):
        value_of(b"\x80\x04" + size + b"h\x01h\x00R" * 200 + b"t.", 3 * MIB)


ARRAY = pickle.dumps(np.zeros(40_000, np.uint8), 2)[2:-1]

ARRAYS: dict[str, bytes] = {
    "too few bytes": ARRAY.replace(b"M@\x9c", b"M@\x9d"),
    "a shape of text": ARRAY.replace(b"M@\x9c\x85", b"X\x01\0\0\0a\x85"),
    "another class": ARRAY.replace(b"numpy\nndarray", b"torch\nSize"),
}


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_that_contradict_themselves_are_damaged(what: str) -> None:
    assert load_tree(source(b"\x80\x02" + ARRAY + b"."), Allowance(PLENTY), 0)
    assert ARRAYS[what] != ARRAY
    with pytest.raises(CorruptCheckpointError, match="NumPy array"):
        load_tree(source(b"\x80\x02" + ARRAYS[what] + b"."), Allowance(PLENTY), 0)


def test_an_array_counts_for_each_use() -> None:
    array = np.zeros(40_000, np.uint8)
    data = pickle.dumps([array] * 1000, 2)
    with memory_peak() as peak, pytest.raises(CorruptCheckpointError, match="more memory"):
        load_tree(source(data), Allowance(3 * len(data) + MIB), 0)
    assert peak[0] <= 3 * len(data) + MIB


def test_values_within_their_depth_are_read_and_no_deeper() -> None:
    value: list[Any] = []
    for _ in range(254):
        value = [value]
    data = pickle.dumps(value, 4)
    assert value_of(data) == value
    with pytest.raises(CorruptCheckpointError, match="deep"):
        load_value(source(data), Allowance(PLENTY), depth=4)


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_up_to_the_limit_of_python_are_read(sign: int) -> None:
    largest = sign * (2 ** (8 * MAX_INTEGER_NBYTES - 1) - 1)
    assert value_of(pickle.dumps(largest)) == largest
    assert len(str(abs(largest))) < 4300
    with pytest.raises(CorruptCheckpointError, match="an integer of"):
        value_of(pickle.dumps(largest << 8))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (b"0.", "opcode"),
        (b".", "0 values are left"),
        (b"NN.", "2 values are left"),
        (b"(.", "are left"),
        (b"a.", "takes more values"),
        (b"N(a.", "takes more values"),
        (b"\x85.", "takes more values"),
        (b"(\x85.", "takes more values"),
        (b"t.", "takes more values"),
        (b"NNa.", "appends to a NoneType"),
        (b"NNNs.", "of a NoneType"),
        (b"}(NNNu.", "3 keys and values"),
        (b"h\x00.", "memo entry 0 of 0"),
        (b"N\x94h\x01.", "memo entry 1 of 1"),
        (b"N)R.", "calls a NoneType"),
        (b"N)\x81.", "makes an instance"),
        (b"NNb.", "sets the state of a NoneType"),
        (b"NN\x93.", "names a global by something that is not text"),
        (b"\xff.", "opcode 0xff, which does not exist"),
        (b"X\x02\x00\x00\x00\xff\xfe.", "utf-8"),
    ],
)
def test_malformed_programs_say_what_is_wrong(program: bytes, reason: str) -> None:
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match=reason):
        value_of(b"\x80\x04" + program)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (b"c_codecs\nencode\n\x8c\x01a\x8c\x03rot\x86R.", "encodes something other"),
        (b"c_codecs\nencode\n\x8c\x01a\x85R.", "encodes something other"),
        (b"c__builtin__\nbytes\nM\xff\xff\x85R.", "makes bytes from arguments"),
        (b"c__builtin__\ncomplex\n\x8c\x01a\x85R.", "complex number of something other"),
        (b"ccollections\nOrderedDict\n)\x85R.", "OrderedDict from arguments"),
        (b"ctorch\nSize\n]\x85R.", "torch.Size of something other"),
        (b"ctorch\nSize\n\x8c\x01a\x85\x85R.", "torch.Size of something other"),
        (b"ctorch\nSize\n)\x81.", "makes an instance"),
    ],
)
def test_calls_with_other_arguments_are_corrupt(call: bytes, reason: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=reason):
        value_of(b"\x80\x04" + call)


# ------------------------------------------------------------------------------------- of torch


def test_at_least_the_memory_that_is_taken_is_counted() -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    places = {
        MetadataIndex(f"model.layers.{n}.weight", (n, 0), n): _StorageInfo("__0_0.distcp", n, 4711)
        for n in range(1000)
    }
    data = pickle.dumps(places, 4)
    allowance = Allowance(PLENTY)
    with memory_peak() as peak:
        found = Unpickler(source(data), metadata_names(), allowance).run()
    assert len(found) == 1000
    assert all(isinstance(info, StorageInfo) for info in found.values())
    counted = PLENTY - allowance.left
    assert peak[0] < counted < 3 * peak[0]


def test_a_state_that_is_filled_again_is_paid_for_again() -> None:
    """What is refunded for a cleared state must not exceed what was paid for it."""
    begin = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}\x94"
    counted = []
    for count in (1, 1000):
        allowance = Allowance(PLENTY)
        data = begin + b"h\x00".join([b"\x8c\x01xNsb"] * count) + b"."
        Unpickler(source(data), metadata_names(), allowance).run()
        counted.append(PLENTY - allowance.left)
    assert 0 < counted[0] < counted[1]


def test_dtypes_are_their_names() -> None:
    data = pickle.dumps([torch.bfloat16, torch.float8_e5m2, torch.complex32])
    found = Unpickler(source(data), metadata_names(), Allowance(PLENTY)).run()
    assert found == [Dtype("bfloat16"), Dtype("float8_e5m2"), Dtype("complex32")]


def test_unknown_names_of_torch_are_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"the global 'torch\.load'"):
        Unpickler(source(b"\x80\x02ctorch\nload\n."), metadata_names(), Allowance(PLENTY)).run()


def tensor_pickle(value: object) -> PickleSource:
    """The pickle in what torch.save writes."""
    import zipfile

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return source(zipfile.ZipFile(buffer).read("archive/data.pkl"))


@pytest.mark.parametrize(
    "dtype",
    [d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point],
    ids=str,
)
def test_tensors_say_dtype_shape_and_strides(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, dtype=torch.float32).to(torch.uint8).reshape(2, 3).t()
    tensor = tensor.view(dtype) if dtype.itemsize == 1 else tensor.to(dtype)
    found, _ = load_tensor(tensor_pickle(tensor), Allowance(PLENTY))
    assert f"torch.{found.dtype}" == str(dtype)
    assert (found.shape, found.strides, found.offset) == ((3, 2), (1, 3), 0)


def test_a_pickle_of_something_else_is_no_tensor() -> None:
    with pytest.raises(UnsupportedFormatError, match="a list instead of a tensor"):
        load_tensor(source(pickle.dumps([])), Allowance(PLENTY))
