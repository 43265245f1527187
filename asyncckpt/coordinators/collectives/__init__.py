"""Collectives of the runtimes, which carry the payload of restores between processes.

Messages go through the coordinators.
"""
