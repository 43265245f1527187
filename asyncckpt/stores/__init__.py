"""Where checkpoints live: the stores behind the `Store` port."""
