"""The device's side: local training, kinds of work, models, statistics."""
