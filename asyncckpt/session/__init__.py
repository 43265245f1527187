"""One opened root: its steps, saves in flight, retention, reads and garbage collection.

Not here: saving (`save`) and restoring (`restore`) one checkpoint, and the public API
(`checkpointer`, `blocking`).
"""
