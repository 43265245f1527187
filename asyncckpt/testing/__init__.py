"""Conformance suites for stores and coordinators, and a store that fails by script.

For the tests of third-party stores too, so that only public names and ports are used here. Tests of
the library itself, its simulator of object stores included, are in `tests/`.
"""
