"""Conformance suites for stores and coordinators, and a store that fails by script.

For third-party stores too, so it uses only public names and ports. Tests of the library itself,
including its object-store simulator, are in `tests/`.
"""
