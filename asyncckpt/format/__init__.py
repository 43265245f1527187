"""Byte formats of checkpoints, without I/O: functions map values to bytes and back.

Nothing here waits, opens files or starts threads. Formats of other libraries are in `foreign`.
"""
