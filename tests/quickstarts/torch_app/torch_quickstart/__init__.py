"""A small network in PyTorch."""
