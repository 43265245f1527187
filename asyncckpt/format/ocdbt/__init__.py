"""OCDBT, the B+tree key-value format of TensorStore: manifest, nodes and data-file tables.

Source: the page "ocdbt Key-Value Store driver" of the TensorStore documentation. The encoders write
one generation without compression. The decoders read everything that TensorStore and Orbax write:
zstd, several generations, numbered manifests, trees of any height, base paths.
"""
