"""Plans of saves and restores, computed without I/O: chunk grids, packing, balancing, ranges.

Everything here is pure. Not here: moving the bytes (`save`, `restore`).
"""
