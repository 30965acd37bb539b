"""Panicle: clusters that form from the first updates and repair themselves."""

# Names of kinds of work, records and settings that both halves of the method use.

TRAIN_SKETCH = "train-sketch"
"""Kind of work: train as a probe, and return only a noisy sketch of the model's direction."""
SKETCH_NOISE = "sketch-noise"
"""Setting: standard deviation of the noise on each number of a sketch, whose length is 1."""
