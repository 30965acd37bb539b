"""What a run stores: its events on disk, and what is read off them."""
