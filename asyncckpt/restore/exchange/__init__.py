"""Exchange in a restore by several processes: each reads a piece, and all get every piece.

Collectives belong in `coordinators/collectives/`; `planning/streams.py` plans which bytes are
exchanged.
"""
