"""Coordinators: which processes take part, where their messages go, and how they agree.

`choice` chooses one of the coordinators `directory`, `jax` and `torch`, which differ in the service
that holds their keys, or none for a process that works alone. `handshake` turns the processes into
a group with a run id, `messages` carries errors between them, and `beats` finds silent ones.
"""
