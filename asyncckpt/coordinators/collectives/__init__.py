"""Collectives of the runtimes, by which processes exchange what each has read a piece of.

They carry payload of restores only. Messages go through the coordinators.
"""
