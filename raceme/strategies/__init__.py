"""Methods: one file each, as Flower strategies.

A new method is a new file and one line in `STRATEGIES`.
"""

from raceme.registry import Registry
from raceme.strategies.base import AsyncStrategy
from raceme.strategies.casa import CASA, CASAParameters
from raceme.strategies.fedasync import FedAsync, FedAsyncParameters
from raceme.strategies.fedbuff import FedBuff, FedBuffParameters
from raceme.strategies.flower_rounds import (
    FedAvg,
    FedAvgParameters,
    FedProx,
    FedProxParameters,
    FlowerRounds,
)
from raceme.strategies.plan import Plan
from raceme.strategies.rounds import Rounds, RoundsParameters
from raceme.strategies.standalone import Standalone

STRATEGIES = Registry(
    "strategy",
    {
        "casa": "raceme.strategies.casa:CASA",
        "fedasync": "raceme.strategies.fedasync:FedAsync",
        "fedavg": "raceme.strategies.flower_rounds:FedAvg",
        "fedbuff": "raceme.strategies.fedbuff:FedBuff",
        "fedprox": "raceme.strategies.flower_rounds:FedProx",
        "standalone": "raceme.strategies.standalone:Standalone",
    },
)

__all__ = [
    "CASA",
    "STRATEGIES",
    "AsyncStrategy",
    "CASAParameters",
    "FedAsync",
    "FedAsyncParameters",
    "FedAvg",
    "FedAvgParameters",
    "FedBuff",
    "FedBuffParameters",
    "FedProx",
    "FedProxParameters",
    "FlowerRounds",
    "Plan",
    "Rounds",
    "RoundsParameters",
    "Standalone",
]
