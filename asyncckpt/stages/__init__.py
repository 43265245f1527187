"""The stages of a save (stage, serialize, upload, commit) and a restore (fetch, decode, place)."""
