"""The benchmark suite: `python -m benchmarks` measures, and writes JSON, a table and plots."""
