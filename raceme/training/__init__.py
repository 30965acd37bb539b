"""Training and testing a network on one client's own samples."""

from raceme.training.local import epochs, evaluate, losses, step, torch_seed, train
from raceme.training.network import Network
from raceme.training.objective import Objective, Regression, objective_of
from raceme.training.samples import Samples
from raceme.training.settings import TrainingSettings

__all__ = [
    "Network",
    "Objective",
    "Regression",
    "Samples",
    "TrainingSettings",
    "epochs",
    "evaluate",
    "losses",
    "objective_of",
    "step",
    "torch_seed",
    "train",
]
