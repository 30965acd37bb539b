"""Training and testing a network on one client's own samples."""

from raceme.training.local import Network, Samples, Sgd, evaluate, train

__all__ = ["Network", "Samples", "Sgd", "evaluate", "train"]
