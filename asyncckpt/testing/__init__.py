"""Conformance suites for stores and coordinators, and a store that fails by script.

Also for tests of third-party stores, so it uses only public names and ports. Tests of the library
itself, including its simulator of object stores, are in `tests/`.
"""
