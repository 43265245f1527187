"""Measurements of the code itself: its docstrings and its layout.

What measures running time belongs in `benchmarks` or `benchmarks.remote`, not here.
"""
