"""Byte formats of a checkpoint, without I/O: every function maps values to bytes or back."""
