"""Paired timings of two checkouts of the package, in alternation on one machine.

Not here: comparisons with other libraries (`benchmarks`, `benchmarks.remote`).
"""
