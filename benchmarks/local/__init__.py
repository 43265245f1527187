"""Benchmarks on a local filesystem: the scenarios of `python -m benchmarks`.

Sampling, workloads, peers and reports are one folder up, where `benchmarks.remote` finds them too.
"""
