"""An opened checkpoint, ours or foreign: what it holds, and where the bytes are.

Metadata, payload copies and dtype casts are here. Not here: byte formats (`format`), reading the
payload (`restore`), and checking all of it (`verify`).
"""
