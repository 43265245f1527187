"""Collectives of the runtimes, by which processes exchange what they have read.

They carry only the payload of restores. Messages go through the coordinators.
"""
