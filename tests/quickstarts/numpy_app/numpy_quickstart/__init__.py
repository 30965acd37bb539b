"""Linear regression in numpy."""
