"""Machinery of the pipeline, independent of checkpoints and stores.

Byte budget, staging buffers, worker threads, cancellation and the engine.
"""
