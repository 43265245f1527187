"""Stores of checkpoints, behind the `Store` port.

`local` is POSIX directories, `objects` is object stores; `paths`, `claims` and `exchange` are for
both. Not here: the contents of the files (`format`).
"""
