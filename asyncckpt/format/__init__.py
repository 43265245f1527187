"""Byte formats of our checkpoints, without I/O: functions map values to bytes and back.

Nothing here waits, opens files or starts threads. Formats that others write are in `foreign`.
"""
