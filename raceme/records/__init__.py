"""What a run leaves: its events on disk, and what can be read off them."""
