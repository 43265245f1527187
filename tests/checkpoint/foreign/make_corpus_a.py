"""Makes the bad safetensors files and DCP directories below `corpus/`.

`python -m tests.checkpoint.foreign.make_corpus_a` writes them anew,
and `expected-a.toml` beside them: for
each the error that reading it must give, a part of its message, and the file that it names.
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

from tests.checkpoint.foreign.pickles import (
    Raw,
    archive,
    bytes_described,
    call,
    described,
    floats,
    index,
    instance,
    metadata,
    named,
    pickled,
    place,
    program,
    tensor,
)

CORPUS = Path(__file__).parent / "corpus"

CORRUPT = "CorruptCheckpointError"
UNSUPPORTED = "UnsupportedFormatError"
NOT_FOUND = "CheckpointNotFoundError"


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# ----------------------------------------------------------------------------------- safetensors


def st_tensor(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> Any:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def st_file(header: object, nbytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def one(tensor: Any) -> bytes:
    return st_file({"a": tensor}, 4)


def two(first: Any, second: Any) -> bytes:
    return st_file({"a": first, "b": second}, 12)


GOOD = st_file({"a": st_tensor(0, 8), "b": st_tensor(8, 12)}, 12)

FILES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", CORRUPT, "it has 0 bytes"),
    "length-alone": (GOOD[:8], CORRUPT, "at most 0"),
    "huge-header": (struct.pack("<Q", 1 << 62) + b"{}", CORRUPT, "claims a header of"),
    "header-beyond-file": (GOOD[:40], CORRUPT, "at most 32"),
    "not-json": (st_file(b"a header"), CORRUPT, "byte 8: "),
    "header-cut": (st_file(b'{"a":{"dtype":"F32","shape":[2'), CORRUPT, "is not JSON"),
    "overlap": (
        st_file({"a": st_tensor(0, 8), "b": st_tensor(4, 12)}, 12),
        CORRUPT,
        "overlap: 'b'",
    ),
    "same-bytes": (
        st_file({"a": st_tensor(0, 8), "b": st_tensor(0, 8)}, 8),
        CORRUPT,
        "overlap: 'b'",
    ),
    "gap": (
        st_file({"a": st_tensor(0, 4), "b": st_tensor(8, 12)}, 12),
        CORRUPT,
        "a gap: 'b' begins",
    ),
    "truncated": (GOOD[:-1], CORRUPT, "is truncated"),
    "bytes-behind": (GOOD + b"\0", CORRUPT, "continues after them"),
    "size-lie": (st_file({"a": st_tensor(0, 8, shape=[3])}, 8), CORRUPT, "float32[3] takes 12"),
    "shape-bomb": (
        st_file({"a": st_tensor(0, 8, shape=[1 << 40, 1 << 40])}, 8),
        CORRUPT,
        "no array",
    ),
    "negative-shape": (st_file({"a": st_tensor(0, 4, shape=[-1, -1])}, 4), CORRUPT, "no array has"),
    "rank-1000": (st_file({"a": st_tensor(0, 4, shape=[1] * 1000)}, 4), CORRUPT, "more than 32"),
    "offsets-turned": (one(st_tensor(8, 0, shape=[2])), CORRUPT, "not first and last byte"),
    "name-twice": (
        st_file(b'{"a":%b,"a":%b}' % ((json.dumps(st_tensor(0, 4)).encode(),) * 2), 4),
        CORRUPT,
        "'a' occurs twice",
    ),
    "unknown-member": (
        st_file({"a": {**st_tensor(0, 4), "x": 1}}, 4),
        CORRUPT,
        "tensor 'a'.'x'",
    ),
    "metadata-of-numbers": (st_file({"__metadata__": {"a": 1}}), CORRUPT, "is not a string"),
    "depth": (st_file(b'{"a":{"shape":' + b"[" * 60_000), CORRUPT, "is not JSON"),
    "list-bomb": (st_file(b'{"a":{"shape":[' + b"[]," * 20_000), CORRUPT, "is not JSON"),
    "unknown-dtype": (
        st_file({"a": st_tensor(0, 8, "F128")}, 8),
        UNSUPPORTED,
        "'F128' of tensor 'a'",
    ),
    "sub-byte-dtype": (
        st_file({"a": st_tensor(0, 4, "F4", [8])}, 4),
        UNSUPPORTED,
        "'F4' of tensor",
    ),
    "parts": (
        st_file(
            {
                "__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [2]}}'},
                "a": st_tensor(0, 8),
            },
            8,
        ),
        UNSUPPORTED,
        "parts of larger ones",
    ),
}


def st_index(weight_map: object, **more: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 12}, "weight_map": weight_map, **more}).encode()


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
HALVES = {A: st_file({"a": st_tensor(0, 8)}, 8), B: st_file({"b": st_tensor(0, 4)}, 4)}

# Name -> files (a text is the target of a link), error, part of its message, file that it names.
Set = tuple[dict[str, bytes | str], str, str, str | None]

SETS: dict[str, Set] = {
    "index-leaves": (
        {**HALVES, INDEX: st_index({"a": A, "b": f"../{B}"})},
        CORRUPT,
        "has a part '..'",
        INDEX,
    ),
    "index-absolute": (
        {**HALVES, INDEX: st_index({"a": A, "b": f"/{B}"})},
        CORRUPT,
        "is absolute",
        INDEX,
    ),
    "index-is-no-json": ({**HALVES, INDEX: b"weight_map"}, CORRUPT, "byte 0: ", INDEX),
    "index-without-map": ({**HALVES, INDEX: b'{"metadata": {}}'}, CORRUPT, "weight_map is", INDEX),
    "index-of-a-tensor-elsewhere": (
        {**HALVES, INDEX: st_index({"a": A, "b": A})},
        CORRUPT,
        f"it places 'b' in {A}, which does not hold it",
        INDEX,
    ),
    "index-without-a-tensor": (
        {**HALVES, INDEX: st_index({"a": A}), A: GOOD},
        CORRUPT,
        "holds 'b', which it does not name",
        INDEX,
    ),
    "two-of-one-name": (
        {A: GOOD, B: HALVES[B], INDEX: st_index({"a": A, "b": B})},
        CORRUPT,
        f"holds 'b', which it places in {B}",
        INDEX,
    ),
    "missing-file": ({A: HALVES[A], INDEX: st_index({"a": A, "b": B})}, CORRUPT, "is missing", B),
    "truncated-file": (
        {**HALVES, B: HALVES[B][:-2], INDEX: st_index({"a": A, "b": B})},
        CORRUPT,
        "is truncated",
        B,
    ),
    "linked-file": (
        {A: HALVES[A], B: f"../missing-file/{A}", INDEX: st_index({"a": A, "b": B})},
        CORRUPT,
        "symbolic link",
        B,
    ),
    "two-files": (HALVES, UNSUPPORTED, "nothing says which belong together", None),  # type: ignore[dict-item]
    "two-indexes": (
        {**HALVES, INDEX: st_index({"a": A, "b": B}), f"x{INDEX}": st_index({"a": A, "b": B})},
        UNSUPPORTED,
        "nothing says which belong together",
        None,
    ),
}

# ------------------------------------------------------------------------------------------- DCP

DATA = "__0_0.distcp"
WEIGHT = archive(tensor((2, 3), (3, 1)), floats(0, 1, 2, 3, 4, 5))
SHARDS = [((0, 0), (2, 3))]


def dcp(
    weight: bytes = WEIGHT,
    value: bytes | None = None,
    *,
    shards: Any = SHARDS,
    file: object = DATA,
    offset: object = 0,
    length: object = None,
    dtype: str = "float32",
    layout: str = "torch.strided",
    planner_data: object = None,
    **more: object,
) -> dict[str, bytes | str]:
    """A checkpoint of one tensor `w` and, with `value`, of one other value `v`."""
    keys = {"w": described((2, 3), shards, dtype=dtype, layout=layout)}
    places = [
        (index("w", start), place(file, offset, len(weight) if length is None else length))
        for start, _ in shards
    ]
    data = weight
    if value is not None:
        keys["v"] = bytes_described()
        places.append((index("v"), place(DATA, len(weight), len(value))))
        data += value
    document = metadata(keys, places, planner_data=planner_data, **more)
    return {".metadata": pickled(document), DATA: data}


def bad_value(*code: bytes) -> dict[str, bytes | str]:
    """A checkpoint with a value made by these opcodes."""
    return dcp(value=archive(Raw(b"".join(code))))


def bad_metadata(data: bytes) -> dict[str, bytes | str]:
    return {**dcp(), ".metadata": data}


SYSTEM = call(named("posix", "system"), "touch executed")
LAUGHS = b"](X\x02\x00\x00\x00hae\x94" + b"".join(
    b"](" + b"h%c" % n * 10 + b"e\x94" for n in range(12)
)

CHECKPOINTS: dict[str, Set] = {
    "system-in-metadata": (
        bad_metadata(pickled(metadata({}, [], storage_meta=SYSTEM))),
        UNSUPPORTED,
        "the global 'posix.system'",
        ".metadata",
    ),
    "eval-in-metadata": (
        bad_metadata(pickled(call(named("builtins", "eval"), "open('executed', 'w')"))),
        UNSUPPORTED,
        "the global 'builtins.eval'",
        ".metadata",
    ),
    "system-in-a-value": (
        dcp(value=archive([SYSTEM])),
        UNSUPPORTED,
        "the archive of 'v' has the global 'posix.system'",
        DATA,
    ),
    "system-in-a-tensor": (
        dcp(archive(SYSTEM, floats(0, 1, 2, 3, 4, 5))),
        UNSUPPORTED,
        "the archive of 'w' has the global 'posix.system'",
        DATA,
    ),
    "getattr-in-a-value": (
        dcp(value=archive(call(named("builtins", "getattr"), named("os", "x"), "system"))),
        UNSUPPORTED,
        "the global 'builtins.getattr'",
        DATA,
    ),
    "instance-in-a-value": (
        dcp(value=archive(instance(named("argparse", "Namespace"), {"lr": 1}))),
        UNSUPPORTED,
        "the global 'argparse.Namespace'",
        DATA,
    ),
    "array-in-a-value": (
        dcp(value=archive((named("numpy.ma.core", "_mareconstruct"),))),
        UNSUPPORTED,
        "the global 'numpy.ma.core._mareconstruct'",
        DATA,
    ),
    "tensor-in-a-value": (
        dcp(value=archive((tensor((3,), (1,), count=2), 3), floats(1, 2))),
        CORRUPT,
        "reaches past the 2 elements of its storage",
        DATA,
    ),
    "storage-in-a-value": (
        dcp(value=archive((tensor((2,), (1,), count=9000), 3), floats(1, 2))),
        CORRUPT,
        "the storage '0' reaches past its end",
        DATA,
    ),
    "set-in-a-value": (bad_value(b"\x8f"), UNSUPPORTED, "has a set", DATA),
    "extension-code": (bad_value(b"\x82\x01"), UNSUPPORTED, "extension registry", DATA),
    "float-as-a-key": (bad_value(program({1.5: None})), UNSUPPORTED, "a float as a key", DATA),
    "protocol-6": (bad_metadata(b"\x80\x06N."), UNSUPPORTED, "protocol 6", ".metadata"),
    "unknown-opcode": (bad_metadata(b"\x80\x04\xff."), CORRUPT, "does not exist", ".metadata"),
    "empty-metadata": (bad_metadata(b""), CORRUPT, "ends before its last opcode", ".metadata"),
    "metadata-cut": (
        bad_metadata(pickled(metadata({}, []))[:-20]),
        CORRUPT,
        "ends before its last opcode",
        ".metadata",
    ),
    "metadata-of-text": (bad_metadata(pickled("text")), CORRUPT, "it is a str", ".metadata"),
    "text-that-is-not-there": (
        bad_metadata(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"."),
        CORRUPT,
        "ends before its last opcode",
        ".metadata",
    ),
    "memo-that-is-not-there": (bad_value(b"h\x07"), CORRUPT, "memo entry 7 of 0", DATA),
    "billion-laughs": (bad_value(b"(", LAUGHS, b"t"), CORRUPT, "one container so often", DATA),
    "deep-value": (bad_value(b")", b"\x85" * 50_000), CORRUPT, "deep", DATA),
    "deep-key": (bad_value(b"})", b"\x85" * 50_000, b"Ns"), UNSUPPORTED, "as a key", DATA),
    "endless-list": (bad_value(b"]\x94h\x00a"), CORRUPT, "one container so often", DATA),
    "one-text-many-times": (
        bad_value(
            b"X" + struct.pack("<I", 60_000) + b"a" * 60_000 + b"\x94(",
            b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 1500,
            b"t\x86",
        ),
        CORRUPT,
        "far more memory than its bytes",
        DATA,
    ),
    "huge-integer": (
        bad_value(b"\x8b", struct.pack("<I", 5000), b"\x01" * 5000),
        CORRUPT,
        "an integer of 5000 bytes",
        DATA,
    ),
    "version-2": (dcp(version="2.0.0"), UNSUPPORTED, "version '2.0.0'", ".metadata"),
    "unknown-field": (dcp(new_field=1), UNSUPPORTED, "the field 'new_field' of", ".metadata"),
    "shards-with-a-gap": (
        dcp(shards=[((0, 0), (1, 3))]),
        CORRUPT,
        "they hold 3 of its 6 elements",
        ".metadata",
    ),
    "shards-that-overlap": (
        dcp(shards=[((0, 0), (2, 3)), ((1, 0), (1, 3))]),
        CORRUPT,
        "overlap",
        ".metadata",
    ),
    "shard-beyond": (
        dcp(shards=[((1, 0), (2, 3))]),
        CORRUPT,
        "[1:3, 0:3] reaches past it",
        ".metadata",
    ),
    "shards-of-the-same-bytes": (
        dcp(shards=[((0, 0), (1, 3)), ((1, 0), (1, 3))]),
        CORRUPT,
        "share bytes of __0_0.distcp",
        ".metadata",
    ),
    "no-places": (
        bad_metadata(pickled(metadata({"w": described((2, 3), SHARDS)}, []))),
        CORRUPT,
        "does not locate a shard of 'w'",
        ".metadata",
    ),
    "path-leaves": (dcp(file=f"../x/{DATA}"), CORRUPT, "has a part '..'", ".metadata"),
    "path-absolute": (dcp(file=f"/{DATA}"), CORRUPT, "is absolute", ".metadata"),
    "sparse": (dcp(layout="torch.sparse_coo"), UNSUPPORTED, "torch.sparse_coo", ".metadata"),
    "extension": (
        bad_metadata(
            pickled(
                metadata(
                    {"w": described((2, 3), SHARDS)},
                    [
                        (
                            index("w", (0, 0)),
                            place(DATA, 0, 9, transform_descriptors=["stream.zstd/1"]),
                        )
                    ],
                )
            )
        ),
        UNSUPPORTED,
        "the extension 'stream.zstd/1'",
        ".metadata",
    ),
    "paths-that-collide": (
        dcp(value=archive(1), planner_data={"w": ("a",), "v": ("a", "b")}),
        CORRUPT,
        "both a leaf and a container",
        ".metadata",
    ),
    "missing-data": (dcp(file="__1_0.distcp"), CORRUPT, "is missing", "__1_0.distcp"),
    "linked-data": (
        {**dcp(file="__1_0.distcp"), "__1_0.distcp": DATA},
        CORRUPT,
        "symbolic link",
        "__1_0.distcp",
    ),
    "linked-metadata": (
        {DATA: WEIGHT, ".metadata": "../missing-data/.metadata"},
        NOT_FOUND,
        "there is no checkpoint here",
        None,
    ),
    "data-cut": ({**dcp(), DATA: WEIGHT[:-30]}, CORRUPT, "it is truncated", DATA),
    "offset-beyond": (dcp(offset=1 << 40), CORRUPT, "it is truncated", DATA),
    "no-archive": (dcp(b"\0" * 2000), CORRUPT, "is not the header of a member of a zip file", DATA),
    "archive-of-another-dtype": (
        dcp(archive(tensor((2, 3), (3, 1), storage="IntStorage"), floats(0, 1, 2, 3, 4, 5))),
        CORRUPT,
        "the metadata says float32[2, 3], the archive int32[2, 3]",
        DATA,
    ),
    "archive-of-another-shape": (
        dcp(archive(tensor((3, 2), (2, 1)), floats(0, 1, 2, 3, 4, 5))),
        CORRUPT,
        "the metadata says float32[2, 3], the archive float32[3, 2]",
        DATA,
    ),
    "archive-with-a-short-storage": (
        dcp(archive(tensor((2, 3), (3, 1), count=5), floats(0, 1, 2, 3, 4))),
        CORRUPT,
        "reaches past the 5 elements",
        DATA,
    ),
    "archive-without-its-payload": (
        dcp(archive(tensor((2, 3), (3, 1)))),
        CORRUPT,
        "the archive of 'w' is damaged",
        DATA,
    ),
    "archive-with-shared-elements": (
        dcp(archive(tensor((2, 3), (0, 1), count=6), floats(0, 1, 2, 3, 4, 5))),
        UNSUPPORTED,
        "save tensor.contiguous()",
        DATA,
    ),
    "archive-of-another-byte-order": (
        dcp(archive(tensor((2, 3), (3, 1)), floats(0, 1, 2, 3, 4, 5), byteorder=b"big")),
        UNSUPPORTED,
        "another byte order",
        DATA,
    ),
    "archive-that-is-compressed": (
        dcp(archive(tensor((2, 3), (3, 1)), floats(0, 1, 2, 3, 4, 5), method=zipfile.ZIP_DEFLATED)),
        UNSUPPORTED,
        "compressed or encrypted members",
        DATA,
    ),
    "archive-of-a-value": (dcp(archive([1, 2])), UNSUPPORTED, "a list instead of a tensor", DATA),
    "archive-without-a-pickle": (
        dcp(archive(1, first="model.json")),
        CORRUPT,
        "its first member is 'model.json'",
        DATA,
    ),
    "dtype-that-is-not-restored": (
        dcp(dtype="complex32"),
        UNSUPPORTED,
        "a tensor of the dtype complex32",
        DATA,
    ),
}

# ------------------------------------------------------------------------------------- writing it


def toml_string(text: str) -> str:
    return json.dumps(text)


def write_corpus(corpus: Path) -> None:
    """The bad input and what is expected of it stand below `corpus`."""
    lines = ["# Written by make_corpus_a.py.\n"]

    def expect(path: str, error: str, match: str, file: str | None) -> None:
        lines.append(f"[{toml_string(path)}]")
        lines.append(f"error = {toml_string(error)}\nmatch = {toml_string(match)}")
        lines.append("" if file is None else f"file = {toml_string(file)}\n")

    for name, (data, error, match) in FILES.items():
        write(corpus / "safetensors" / f"{name}.safetensors", data)
        expect(f"safetensors/{name}.safetensors", error, match, "")
    makers: tuple[tuple[str, dict[str, Set]], ...] = (("safetensors", SETS), ("dcp", CHECKPOINTS))
    for kind, cases in makers:
        for name, (files, error, match, file) in cases.items():
            for path, content in files.items():
                if isinstance(content, bytes):
                    write(corpus / kind / name / path, content)
                else:
                    (corpus / kind / name / path).symlink_to(content)
            expect(f"{kind}/{name}", error, match, file)
    write(corpus / "expected-a.toml", "\n".join(lines).encode())


if __name__ == "__main__":
    for kind in ("safetensors", "dcp"):
        shutil.rmtree(CORPUS / kind, ignore_errors=True)
    write_corpus(CORPUS)
