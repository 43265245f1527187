"""Stores of checkpoints, behind the `Store` port.

`local` is POSIX directories, `objects` is object stores; both use `paths`, `claims` and `exchange`.
Not here: the contents of the files (`format`).
"""
