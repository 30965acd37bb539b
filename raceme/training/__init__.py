"""Training and testing a network on one client's own samples."""

from raceme.training.local import epochs, evaluate, losses, step, torch_seed, train
from raceme.training.network import Network
from raceme.training.objective import criterion, hits
from raceme.training.samples import Samples
from raceme.training.settings import TrainingSettings

__all__ = [
    "Network",
    "Samples",
    "TrainingSettings",
    "criterion",
    "epochs",
    "evaluate",
    "hits",
    "losses",
    "step",
    "torch_seed",
    "train",
]
