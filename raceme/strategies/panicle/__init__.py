"""Panicle: clusters that form from the first updates and repair themselves."""
