"""One restore of one checkpoint, a file for each stage.

Match, fetch, decode, place and rebuild are here, and the pipeline that wires them. Not here: what
a stored checkpoint says about itself (`checkpoint`) and which step is restored (`session`).
"""
