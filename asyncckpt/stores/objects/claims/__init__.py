"""Claims on an object store: which records count, and how a run is taken over."""
