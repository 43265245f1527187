"""The awaitable stages of a save (stage, serialize, upload, commit) and of a restore (fetch, decode, place)."""
