"""Restores by several processes: their agreement, and the exchange of pieces that each reads.

Collectives belong in `coordinators/collectives/`; `planning/streams.py` plans which bytes are
exchanged.
"""
