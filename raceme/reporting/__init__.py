"""What is left of a run: its store, its summary, its plots, and what the terminal shows."""
