"""OCDBT, the B+tree key-value format of TensorStore: manifest, nodes and data-file tables.

Source: the page "ocdbt Key-Value Store driver" of the TensorStore documentation. Only what a
checkpoint needs is written (one generation, no compression); what TensorStore and Orbax write is
read (zstd, several generations, numbered manifests, trees of any height, base paths).
"""
