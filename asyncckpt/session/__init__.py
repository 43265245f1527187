"""One opened root: its steps, saves in flight, retention, reads and garbage collection.

Saving and restoring one checkpoint are in `save` and `restore`; the public API is in `checkpointer`
and `blocking`.
"""
