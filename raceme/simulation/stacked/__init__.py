"""Training of many clients together: the weights of all are stacked, on a GPU or a CPU."""

from raceme.simulation.stacked.executor import Stacked

__all__ = ["Stacked"]
