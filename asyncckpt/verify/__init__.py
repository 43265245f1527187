"""Inspection of a checkpoint, and verification of all its bytes.

Not here: checks made while restoring (`restore.decode`).
"""
