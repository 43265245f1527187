"""One save of one checkpoint: a file for each stage, and the pipeline that connects them.

Not here: which saves run when (`session`), what to write where (`planning`), and how a store
makes bytes durable (`stores`).
"""
