"""OCDBT, the B+tree key-value format of TensorStore: manifest, nodes and data-file tables.

Source: the page "ocdbt Key-Value Store driver" of the TensorStore documentation. Only what a
checkpoint needs is written (one generation, no compression); what TensorStore and Orbax write is
read (zstd, several generations, numbered manifests, trees of any height, base paths).
"""

from __future__ import annotations

from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    Version,
    decode_manifest,
    generation_of,
    numbered_name,
)
from asyncckpt.format.ocdbt.walk import TreeDecoder, TreeLimits, decode_tree

__all__ = [
    "MANIFEST_NAME",
    "MAX_MANIFEST_NBYTES",
    "Location",
    "Manifest",
    "TreeDecoder",
    "TreeLimits",
    "Version",
    "decode_manifest",
    "decode_tree",
    "generation_of",
    "numbered_name",
]
