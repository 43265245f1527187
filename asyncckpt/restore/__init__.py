"""One restore of one checkpoint, a file for each stage.

Match, fetch, decode, place and rebuild are here, and the pipeline that wires them. Not here: the
metadata of checkpoints (`checkpoint`), and the choice of the step (`session`).
"""
