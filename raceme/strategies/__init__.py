"""Methods: one file each, as Flower strategies.

A new method is a new file and one line in `STRATEGIES`.
"""

from raceme.registry import Registry
from raceme.server.dispatch import RoundsParameters
from raceme.server.method import Method
from raceme.server.plan import Plan
from raceme.strategies.casa import CASA, CASAParameters
from raceme.strategies.casa_ablations import CASAC, CASAD
from raceme.strategies.casa_plus import CASAPlus, CASAPlusParameters
from raceme.strategies.cfl import CFL, CFLAsync, CFLAsyncParameters, CFLParameters
from raceme.strategies.fedasync import FedAsync, FedAsyncParameters
from raceme.strategies.fedbuff import FedBuff, FedBuffParameters
from raceme.strategies.fedgroup import FedGroup, FedGroupParameters
from raceme.strategies.fesem import FeSEM, FeSEMParameters
from raceme.strategies.flower_rounds import (
    FedAvg,
    FedAvgParameters,
    FedProx,
    FedProxParameters,
    FlowerRounds,
)
from raceme.strategies.icfl import ICFL, ICFLAsync, ICFLAsyncParameters, ICFLParameters
from raceme.strategies.ifca import IFCA, IFCAAsync, IFCAAsyncParameters, IFCAParameters
from raceme.strategies.standalone import Standalone

STRATEGIES = Registry(
    "strategy",
    {
        "casa": "raceme.strategies.casa:CASA",
        "casa-c": "raceme.strategies.casa_ablations:CASAC",
        "casa-d": "raceme.strategies.casa_ablations:CASAD",
        "casa-plus": "raceme.strategies.casa_plus:CASAPlus",
        "cfl": "raceme.strategies.cfl:CFL",
        "cfl-async": "raceme.strategies.cfl:CFLAsync",
        "fedasync": "raceme.strategies.fedasync:FedAsync",
        "fedavg": "raceme.strategies.flower_rounds:FedAvg",
        "fedbuff": "raceme.strategies.fedbuff:FedBuff",
        "fedgroup": "raceme.strategies.fedgroup:FedGroup",
        "fedprox": "raceme.strategies.flower_rounds:FedProx",
        "fesem": "raceme.strategies.fesem:FeSEM",
        "icfl": "raceme.strategies.icfl:ICFL",
        "icfl-async": "raceme.strategies.icfl:ICFLAsync",
        "ifca": "raceme.strategies.ifca:IFCA",
        "ifca-async": "raceme.strategies.ifca:IFCAAsync",
        "standalone": "raceme.strategies.standalone:Standalone",
    },
)

__all__ = [
    "CASA",
    "CASAC",
    "CASAD",
    "CFL",
    "ICFL",
    "IFCA",
    "STRATEGIES",
    "CASAParameters",
    "CASAPlus",
    "CASAPlusParameters",
    "CFLAsync",
    "CFLAsyncParameters",
    "CFLParameters",
    "FeSEM",
    "FeSEMParameters",
    "FedAsync",
    "FedAsyncParameters",
    "FedAvg",
    "FedAvgParameters",
    "FedBuff",
    "FedBuffParameters",
    "FedGroup",
    "FedGroupParameters",
    "FedProx",
    "FedProxParameters",
    "FlowerRounds",
    "ICFLAsync",
    "ICFLAsyncParameters",
    "ICFLParameters",
    "IFCAAsync",
    "IFCAAsyncParameters",
    "IFCAParameters",
    "Method",
    "Plan",
    "RoundsParameters",
    "Standalone",
]
