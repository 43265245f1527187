"""Byte formats of PyTorch, without I/O: pickles, archives and DCP metadata.

Nothing is imported or executed from a pickle. Not here: which files to open
(`checkpoint.foreign`).
"""
