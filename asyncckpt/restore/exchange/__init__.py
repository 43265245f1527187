"""Parts of a restore that several processes make together: each reads a piece, and all get it.

Collectives belong in `coordinators/collectives/`; which bytes are exchanged is planned in
`planning/streams.py`.
"""
