"""Records of a run: its events on disk, and numbers derived from them."""
