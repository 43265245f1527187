"""One save of one checkpoint, a file for each stage.

Snapshot, plan, stage, serialize, upload and commit are here, and the pipeline that wires them.
Not here: which saves run when (`session`), what to write where (`planning`), and how a store
makes bytes durable (`stores`).
"""
