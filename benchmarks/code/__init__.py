"""Measurements of the code itself: its size, its docstrings, its layout, the length of its paths.

What measures running time belongs in `benchmarks` or `benchmarks.remote`, not here.
"""
