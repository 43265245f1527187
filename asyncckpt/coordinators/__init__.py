"""Coordinators: which processes take part, where their messages go, and how they agree.

`choice` chooses one of the coordinators `single`, `directory`, `jax` and `torch`, which differ in
the service that holds their keys. `handshake` turns the processes into a group with a run id;
`messages` carries errors from one process to the others, and `beats` finds silent ones.
"""
