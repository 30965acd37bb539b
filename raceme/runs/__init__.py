"""From a configuration to a finished run: experiment, checkpoints, observers, trackers."""
