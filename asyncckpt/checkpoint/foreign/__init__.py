"""Checkpoints of other libraries, opened like our own.

Orbax, torch.distributed.checkpoint, safetensors, OCDBT and zarr are here: which files to read, and
which leaves they hold. Not here: the bytes of those formats (`format.foreign`).
"""
