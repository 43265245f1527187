"""Restores by several processes: their agreement, and the exchange of pieces that each reads.

Collectives belong in `coordinators/`; `planning/streams.py` plans which bytes are exchanged.
"""
