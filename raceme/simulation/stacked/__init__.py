"""Training of many clients together, with stacked weights, on a GPU or a CPU."""

from raceme.simulation.stacked.executor import Stacked

__all__ = ["Stacked"]
