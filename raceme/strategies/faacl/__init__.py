"""FAACL, FAACL-Async and C-FAACL: clusters that support each other."""

# Names of kinds of work, records and settings that both halves of the method use.

LEARN = "learn"
"""Train, and remember a sample of the validation samples."""
MATCH = "match"
"""The loss of every sample under each of several models, on several sets of samples: the kind of
work, answered by an array for each set, float32, shape (models, samples)."""
LEND = "lend"
"""Hand out remembered samples: the kind of work, answered by their inputs and labels."""
REMEMBERED = "remembered"
"""How many samples of a step a client remembers."""
MEMORY_STEPS = "memory-steps"
"""Steps of which a client is to use what it remembers: a list of numbers."""
MEMORY = "memory"
"""Remembered samples of a step, numbered by it."""
BORROWED = "borrowed"
"""Samples that another client has lent: records numbered from 0."""
LOCAL = "local"
"""Models that clients have trained themselves, beside those of clusters: numbered from 0."""
INPUTS, LABELS = "x", "y"
"""Arrays of a record of samples."""
