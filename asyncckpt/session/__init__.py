"""One opened root: its steps, saves in flight, retention, reads and garbage collection.

Not here: how one checkpoint is saved (`save`) or restored (`restore`), and what callers see
(`checkpointer`, `blocking`).
"""
