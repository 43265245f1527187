"""Manifests."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.manifest import (
    NUMBERED,
    Manifest,
    Version,
    decode_manifest,
    numbered_name,
)
from asyncckpt.format.ocdbt.manifest import encode_manifest as manifest_of
from asyncckpt.format.ocdbt.wire import MANIFEST_MAGIC, frame
from asyncckpt.options import INLINE_NBYTES, NODE_NBYTES
from tests.format.manifests import Config, VersionNode, encode_manifest

u62 = st.integers(0, 2**62 - 1)
names = st.sampled_from(["d/a", "d/ab", "d/index", "x"])
locations = st.builds(Location, names, u62, u62)
rooted = st.builds(Version, st.just(0), locations, st.integers(0, 255), u62, u62, u62, u62)
empty = st.builds(
    Version, st.just(0), st.none(), st.just(0), st.just(0), st.just(0), st.just(0), u62
)


nodes = st.builds(VersionNode, st.just(0), locations, u62, u62, st.integers(0, 255))
configs = st.builds(
    Config, st.integers(0, 2**20), u62, st.integers(1, 16), st.none() | st.integers(-5, 22)
)


def numbered(rows: list[object]) -> tuple[object, ...]:
    return tuple(dataclasses.replace(row, generation=i + 1) for i, row in enumerate(rows))


manifests = st.builds(
    Manifest,
    st.binary(min_size=16, max_size=16),
    st.lists(rooted | empty, max_size=4).map(numbered),
)


SMALL = Manifest(
    bytes(range(16)),
    (Version(1, Location("d/index-0", 4096, 777), 2, 5, 900, 12_345, 1_700_000_000_000_000_000),),
)


@given(manifests, configs, st.lists(nodes, max_size=3).map(numbered))
def test_manifests_round_trip(
    manifest: Manifest, config: Config, older: tuple[VersionNode, ...]
) -> None:
    assert decode_manifest(encode_manifest(manifest, config, older), file="m") == manifest


@pytest.mark.parametrize("root", [SMALL.versions[0].root, None])
def test_our_manifests_have_one_version_and_no_more(root: Location | None) -> None:
    facts = (2, 5, 900, 12_345) if root else (0, 0, 0, 0)
    version = Version(1, root, *facts, 1_700_000_000_000_000_000)
    manifest = dataclasses.replace(SMALL, versions=(version,))
    expected = encode_manifest(manifest, Config(INLINE_NBYTES, NODE_NBYTES))
    assert manifest_of(SMALL.uuid, version) == expected


def test_latest_is_the_last_version() -> None:
    assert SMALL.latest == SMALL.versions[0]
    assert Manifest(bytes(16)).latest is None


@pytest.mark.parametrize("row", range(len(encode_manifest(SMALL))))
def test_every_flipped_bit_of_a_manifest_is_found(row: int) -> None:
    data = encode_manifest(SMALL)
    for bit in range(8):
        bad = bytearray(data)
        bad[row] ^= 1 << bit
        with pytest.raises(CorruptCheckpointError, match=r"m, byte \d+: the OCDBT manifest"):
            decode_manifest(bytes(bad), file="m")


def test_every_truncation_of_a_manifest_is_found() -> None:
    data = encode_manifest(SMALL)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError) as caught:
            decode_manifest(data[:length], file="m")
        assert caught.value.file == "m"


def reframed(change: object) -> bytes:
    body = bytearray(encode_manifest(SMALL)[14:-4])
    change(body)  # type: ignore[operator]
    return bytes(frame(MANIFEST_MAGIC, bytes(body)))


@given(st.integers(0, len(encode_manifest(SMALL)) - 19), st.integers(0, 255))
def test_a_changed_byte_with_a_right_checksum_is_a_manifest_or_an_error(at: int, byte: int) -> None:
    data = reframed(lambda body: body.__setitem__(at, byte))
    try:
        manifest = decode_manifest(data, file="m")
    except (CorruptCheckpointError, UnsupportedFormatError):
        return
    assert decode_manifest(encode_manifest(manifest), file="m") == without_base_paths(manifest)


def without_base_paths(manifest: Manifest) -> Manifest:
    """As it is encoded: base paths are read, but not written."""
    return dataclasses.replace(
        manifest,
        versions=tuple(
            dataclasses.replace(v, root=v.root and dataclasses.replace(v.root, base_path=""))
            for v in manifest.versions
        ),
    )


def test_a_manifest_of_numbered_manifests_has_no_versions() -> None:
    manifest = Manifest(bytes(range(16)), numbered=True)
    assert decode_manifest(encode_manifest(manifest, Config(zstd_level=3)), file="m") == manifest
    with pytest.raises(CorruptCheckpointError, match="bytes follow the end"):
        decode_manifest(reframed(lambda body: body.__setitem__(16, 1)), file="m")


def test_names_of_numbered_manifests_sort_by_generation() -> None:
    assert numbered_name(21) == "manifest.0000000000000015"
    names = [numbered_name(generation) for generation in (1, 21, 2**32, 2**64 - 1)]
    assert names == sorted(names) and all(map(NUMBERED.fullmatch, names))
    for name in ("manifest.ocdbt", "manifest.15", "manifest.000000000000001F", "x"):
        assert NUMBERED.fullmatch(name) is None


def test_kinds_of_manifests_from_the_future_are_named() -> None:
    data = reframed(lambda body: body.__setitem__(16, 2))
    with pytest.raises(UnsupportedFormatError, match="manifests of kind 2"):
        decode_manifest(data, file="m")


def test_bytes_behind_the_structure_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="1 bytes follow the end"):
        decode_manifest(reframed(lambda body: body.append(0)), file="m")


def test_generations_that_do_not_increase_are_refused() -> None:
    twice = dataclasses.replace(SMALL, versions=SMALL.versions * 2)
    with pytest.raises(CorruptCheckpointError, match="do not increase"):
        decode_manifest(encode_manifest(twice), file="m")


def test_a_version_without_a_root_has_no_keys() -> None:
    bare = dataclasses.replace(SMALL.versions[0], root=None)
    with pytest.raises(CorruptCheckpointError, match="has no root, but a height or keys"):
        decode_manifest(encode_manifest(dataclasses.replace(SMALL, versions=(bare,))), file="m")


def test_the_level_of_zstd_is_a_little_endian_int32() -> None:
    data = encode_manifest(Manifest(bytes(16)), Config(zstd_level=-3))
    assert b"\x01" + struct.pack("<i", -3) in data
    assert decode_manifest(data, file="m") == Manifest(bytes(16))


def test_the_location_of_a_version_node_is_checked() -> None:
    for location, reason in (
        (Location("", 0, 1), "empty path"),
        (Location("d/a", 2**63 - 2, 2), "ends past 2"),
    ):
        data = encode_manifest(SMALL, nodes=[VersionNode(1, location, 1, 1, 1)])
        with pytest.raises(CorruptCheckpointError, match=reason):
            decode_manifest(data, file="m")
