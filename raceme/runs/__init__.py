"""Runs: setup, execution, checkpoints, observers and trackers."""
