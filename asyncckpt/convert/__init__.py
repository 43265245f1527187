"""Conversion from and to other formats, and differences between checkpoints.

Not here: reading foreign checkpoints (`checkpoint.foreign`) and their bytes (`format.foreign`).
"""
