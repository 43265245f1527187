"""What to write and read, computed without I/O: chunk grids, packing, balancing, read batches.

Everything here is a pure function of its arguments: the same call gives the same plan in every
process, whatever its hash seed.
"""
