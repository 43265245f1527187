"""An opened checkpoint, asyncckpt's or foreign: its contents, and the places of its bytes.

Metadata, payload copies and dtype casts are here. Not here: byte formats (`format`), reading the
payload (`restore`), and checking all of it (`verify`).
"""
