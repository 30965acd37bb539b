"""Methods: one file each, as Flower strategies.

A new method is a new file and one line in `STRATEGIES`, in `raceme/config/registry.py`.
"""

from raceme.config.registry import STRATEGIES
from raceme.server.dispatch import RoundsParameters
from raceme.server.method import Method
from raceme.server.plan import Plan
from raceme.strategies.ace import ACE, ACED, ACEDParameters, ACEParameters
from raceme.strategies.apd import APD, APDParameters
from raceme.strategies.c_faacl import CFAACL, CFAACLParameters
from raceme.strategies.ca2fl import CA2FL, CA2FLParameters
from raceme.strategies.casa import CASA, CASAParameters
from raceme.strategies.casa_ablations import CASAC, CASAD
from raceme.strategies.casa_plus import CASAPlus, CASAPlusParameters
from raceme.strategies.cdfl import CDFL, CDFLParameters
from raceme.strategies.cfl import CFL, CFLAsync, CFLAsyncParameters, CFLParameters
from raceme.strategies.cfl_gp import CFLGP, CFLGPParameters
from raceme.strategies.csafl import (
    CSAFL,
    CSAFLParameters,
    GAFedAvg,
    GFedAvg,
    NoGFedAvg,
    RFedAvg,
    TAFedAvg,
    TFedAvg,
)
from raceme.strategies.ewc import EWC, EWCParameters
from raceme.strategies.faacl import FAACL, FAACLParameters
from raceme.strategies.faacl_async import FAACLAsync, FAACLAsyncParameters
from raceme.strategies.fadas import FADAS, FADASParameters
from raceme.strategies.fedasync import FedAsync, FedAsyncParameters
from raceme.strategies.fedbuff import FedBuff, FedBuffParameters
from raceme.strategies.fedcompass import FedCompass, FedCompassParameters
from raceme.strategies.feddrift import (
    FedDrift,
    FedDriftEager,
    FedDriftEagerParameters,
    FedDriftParameters,
)
from raceme.strategies.feddrift_async import FedDriftAsync, FedDriftAsyncParameters
from raceme.strategies.fedrc import FedRC, FedRCParameters
from raceme.strategies.fedsoft import FedSoft, FedSoftParameters
from raceme.strategies.fedsoft_async import FedSoftAsync, FedSoftAsyncParameters
from raceme.strategies.fedweit import FedWeIT, FedWeITParameters
from raceme.strategies.fesem import FeSEM, FeSEMParameters
from raceme.strategies.flexcfl import FedGroup, FedGroupParameters, FlexCFL, FlexCFLParameters
from raceme.strategies.flexcfl_async import FlexCFLAsync, FlexCFLAsyncParameters
from raceme.strategies.flower_rounds import (
    FedAvg,
    FedAvgParameters,
    FedProx,
    FedProxParameters,
    FlowerRounds,
)
from raceme.strategies.flux import FLUX, FLUXParameters
from raceme.strategies.icfl import ICFL, ICFLAsync, ICFLAsyncParameters, ICFLParameters
from raceme.strategies.ifca import IFCA, IFCAAsync, IFCAAsyncParameters, IFCAParameters
from raceme.strategies.pacfl import PACFL, PACFLParameters
from raceme.strategies.panicle import Panicle
from raceme.strategies.panicle_parameters import PanicleParameters
from raceme.strategies.port import PORT, PORTParameters
from raceme.strategies.robust_rounds import (
    FedMedian,
    FedMedianParameters,
    FedTrimmedAvg,
    FedTrimmedAvgParameters,
    Krum,
    KrumParameters,
    MultiKrum,
    MultiKrumParameters,
)
from raceme.strategies.ssgd import StableSGD, StableSGDParameters
from raceme.strategies.standalone import Standalone

__all__ = [
    "ACE",
    "ACED",
    "APD",
    "CA2FL",
    "CASA",
    "CASAC",
    "CASAD",
    "CDFL",
    "CFAACL",
    "CFL",
    "CFLGP",
    "CSAFL",
    "EWC",
    "FAACL",
    "FADAS",
    "FLUX",
    "ICFL",
    "IFCA",
    "PACFL",
    "PORT",
    "STRATEGIES",
    "ACEDParameters",
    "ACEParameters",
    "APDParameters",
    "CA2FLParameters",
    "CASAParameters",
    "CASAPlus",
    "CASAPlusParameters",
    "CDFLParameters",
    "CFAACLParameters",
    "CFLAsync",
    "CFLAsyncParameters",
    "CFLGPParameters",
    "CFLParameters",
    "CSAFLParameters",
    "EWCParameters",
    "FAACLAsync",
    "FAACLAsyncParameters",
    "FAACLParameters",
    "FADASParameters",
    "FLUXParameters",
    "FeSEM",
    "FeSEMParameters",
    "FedAsync",
    "FedAsyncParameters",
    "FedAvg",
    "FedAvgParameters",
    "FedBuff",
    "FedBuffParameters",
    "FedCompass",
    "FedCompassParameters",
    "FedDrift",
    "FedDriftAsync",
    "FedDriftAsyncParameters",
    "FedDriftEager",
    "FedDriftEagerParameters",
    "FedDriftParameters",
    "FedGroup",
    "FedGroupParameters",
    "FedMedian",
    "FedMedianParameters",
    "FedProx",
    "FedProxParameters",
    "FedRC",
    "FedRCParameters",
    "FedSoft",
    "FedSoftAsync",
    "FedSoftAsyncParameters",
    "FedSoftParameters",
    "FedTrimmedAvg",
    "FedTrimmedAvgParameters",
    "FedWeIT",
    "FedWeITParameters",
    "FlexCFL",
    "FlexCFLAsync",
    "FlexCFLAsyncParameters",
    "FlexCFLParameters",
    "FlowerRounds",
    "GAFedAvg",
    "GFedAvg",
    "ICFLAsync",
    "ICFLAsyncParameters",
    "ICFLParameters",
    "IFCAAsync",
    "IFCAAsyncParameters",
    "IFCAParameters",
    "Krum",
    "KrumParameters",
    "Method",
    "MultiKrum",
    "MultiKrumParameters",
    "NoGFedAvg",
    "PACFLParameters",
    "PORTParameters",
    "Panicle",
    "PanicleParameters",
    "Plan",
    "RFedAvg",
    "RoundsParameters",
    "StableSGD",
    "StableSGDParameters",
    "Standalone",
    "TAFedAvg",
    "TFedAvg",
]
