"""Benchmarks on object stores: `python -m benchmarks.remote` measures against a simulated service.

The service runs in a process of its own, and so does everybody who is measured, so that no event
loop, allocator or environment variable of one of them reaches another.
"""
