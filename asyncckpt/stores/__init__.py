"""Stores of checkpoints, behind the `Store` port.

`local` is POSIX directories, `objects` is object stores; `layout` has the names that both
share. Not here: the contents of the files (`format`).
"""
