"""OCDBT, the B+tree key-value format of TensorStore: manifest, nodes and data-file tables.

Source: the page "ocdbt Key-Value Store driver" of the TensorStore documentation. Only what a
checkpoint needs is written (one generation, no compression); what TensorStore and Orbax write is
read (zstd, several generations, numbered manifests, trees of any height, base paths).
"""

from __future__ import annotations

from asyncckpt.format.ocdbt.btree import EncodedTree, ValueColumns, encode_tree
from asyncckpt.format.ocdbt.datafiles import DataFile, Location
from asyncckpt.format.ocdbt.keys import KeyColumns, prepare_keys
from asyncckpt.format.ocdbt.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Config,
    Manifest,
    Version,
    VersionNode,
    decode_manifest,
    generation_of,
    numbered_name,
)
from asyncckpt.format.ocdbt.nodes import InteriorNode, LeafNode, Node, decode_node
from asyncckpt.format.ocdbt.walk import (
    TreeColumns,
    TreeDecoder,
    TreeLimits,
    decode_tree,
)

__all__ = [
    "MANIFEST_NAME",
    "MAX_MANIFEST_NBYTES",
    "Config",
    "DataFile",
    "EncodedTree",
    "InteriorNode",
    "KeyColumns",
    "LeafNode",
    "Location",
    "Manifest",
    "Node",
    "TreeColumns",
    "TreeDecoder",
    "TreeLimits",
    "ValueColumns",
    "Version",
    "VersionNode",
    "decode_manifest",
    "decode_node",
    "decode_tree",
    "encode_tree",
    "generation_of",
    "numbered_name",
    "prepare_keys",
]
