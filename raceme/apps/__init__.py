"""Anybody's Flower apps on virtual time."""
