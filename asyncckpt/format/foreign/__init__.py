"""Byte formats of other libraries, without I/O: Orbax, safetensors and zarr v2.

PyTorch's formats are in `torch`. Not here: which files to open (`checkpoint.foreign`).
"""
