"""Byte formats of other libraries, without I/O: Orbax, safetensors and zarr v2.

Damaged or hostile bytes raise `CorruptCheckpointError`, unsupported features
`UnsupportedFormatError`; docstrings name other errors only.

PyTorch's formats are in `torch`. Not here: which files to open (`checkpoint.foreign`).
"""
