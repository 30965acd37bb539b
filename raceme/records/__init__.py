"""Records of a run: its events on disk, and the numbers that follow from them."""
