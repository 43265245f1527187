"""Machinery of the pipeline, which knows neither checkpoints nor stores.

Byte budget, staging buffers, worker threads, cancellation and the engine's event loop are here.
"""
