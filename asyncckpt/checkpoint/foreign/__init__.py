"""Foreign checkpoints, opened like those of asyncckpt.

For Orbax, torch.distributed.checkpoint, safetensors, OCDBT and zarr, these modules choose the files
to read and find the leaves in them. Not here: the bytes of those formats (`format.foreign`).
"""
