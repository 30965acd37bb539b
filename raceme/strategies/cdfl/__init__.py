"""CDFL, and FedSoft, which it is compared with."""

# Names of kinds of work, records and settings that both halves of the method use.

TRAIN_MIXED = "train-mixed"
"""Train the mixture of several models that fits the training samples: the kind of work."""
SHARES = "shares"
"""How much each of several models counts in a mixture: the numbers that answer such work, and the
record that says what the client has answered last. Float64, shape (models,), sum 1."""
TRAIN_OWN = "train-own"
"""Train the client's own model, that it keeps, with a pull towards the received one."""
