"""The keys of a database: made an array at a time, and the same as one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.format.zarr3 import chunk_keys, encode_metadata, metadata_key
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.save import plan_save
from asyncckpt.save.index import make_catalog
from asyncckpt.spec import array_spec
from tests.planning.jobs import SIZES

names = st.text("ab.%-0é", min_size=1, max_size=5)
shapes = st.lists(st.integers(0, 120), max_size=3).map(tuple)


@settings(deadline=None)
@given(st.dictionaries(names, shapes, max_size=8), st.booleans())
def test_keys_lead_to_their_chunks(leaves: dict[str, tuple[int, ...]], tied: bool) -> None:
    layouts = [
        LeafLayout(name, array_spec(shape, "float32"), 4096) for name, shape in leaves.items()
    ]
    if tied and layouts:
        first = layouts[0]
        layouts.append(LeafLayout("tied", first.spec, first.chunk_nbytes, tied_to=0))
    arrays = plan_save(layouts, **SIZES).arrays
    wanted: dict[bytes, object] = {}
    for array, name in enumerate(arrays.names):
        part = arrays.of(array)
        wanted[metadata_key(name)] = encode_metadata(part.spec, part.grid.chunk_shape, None)
        for cell, key in enumerate(chunk_keys(name, part.grid.counts)):
            wanted[key] = int(arrays.first_chunk[array]) + cell
    made = make_catalog(arrays)
    found: dict[bytes, object] = {}
    templates = len(made.templates)
    inline = dict(zip(made.inline_chunk.tolist(), range(templates, 1 << 20), strict=False))
    for row in range(len(made.columns)):
        chunk, value = int(made.chunk[row]), int(made.inline[row])
        found[made.columns.key(row)] = chunk if chunk >= 0 else made.templates[value]
        if chunk >= 0:
            assert value == inline.get(chunk, -1)
    assert list(found.items()) == sorted(wanted.items())
    for chunk, key in zip(made.inline_chunk.tolist(), made.inline_key.tolist(), strict=True):
        assert made.chunk[key] == chunk
