"""Inspecting a checkpoint and verifying every byte of it.

Not here: checks made while restoring (`restore.decode`).
"""
