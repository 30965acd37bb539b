"""Methods: one file or folder each, as Flower strategies; each is imported when it is asked for.

``from raceme.strategies import FedAsync`` imports :mod:`raceme.strategies.fedasync` and no other
method. Where each is defined says `STRATEGIES`, in :mod:`raceme.core.registry`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raceme.core.registry import STRATEGIES

if TYPE_CHECKING:
    from raceme.core.progress import Plan
    from raceme.core.scheduling import RoundsParameters
    from raceme.core.strategy import Method
    from raceme.strategies.ace import ACE, ACED, ACEDParameters, ACEParameters
    from raceme.strategies.casa.strategy import (
        CASA,
        CASAC,
        CASAD,
        CASAParameters,
        CASAPlus,
        CASAPlusParameters,
    )
    from raceme.strategies.cdfl.fedsoft import (
        FedSoft,
        FedSoftAsync,
        FedSoftAsyncParameters,
        FedSoftParameters,
    )
    from raceme.strategies.cdfl.strategy import CDFL, CDFLParameters
    from raceme.strategies.cfl import CFL, CFLAsync, CFLAsyncParameters, CFLParameters
    from raceme.strategies.continual.strategy import (
        APD,
        EWC,
        APDParameters,
        EWCParameters,
        FedWeIT,
        FedWeITParameters,
        StableSGD,
        StableSGDParameters,
    )
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
    from raceme.strategies.faacl.continual import CFAACL, CFAACLParameters
    from raceme.strategies.faacl.strategy import (
        FAACL,
        FAACLAsync,
        FAACLAsyncParameters,
        FAACLParameters,
    )
    from raceme.strategies.fedasync import FedAsync, FedAsyncParameters
    from raceme.strategies.fedavg import (
        FedAvg,
        FedAvgParameters,
        FedMedian,
        FedMedianParameters,
        FedProx,
        FedProxParameters,
        FedTrimmedAvg,
        FedTrimmedAvgParameters,
        FlowerRounds,
        Krum,
        KrumParameters,
        MultiKrum,
        MultiKrumParameters,
    )
    from raceme.strategies.fedbuff import (
        CA2FL,
        FADAS,
        PORT,
        CA2FLParameters,
        FADASParameters,
        FedBuff,
        FedBuffParameters,
        PORTParameters,
    )
    from raceme.strategies.fedcompass import FedCompass, FedCompassParameters
    from raceme.strategies.feddrift import (
        FedDrift,
        FedDriftAsync,
        FedDriftAsyncParameters,
        FedDriftEager,
        FedDriftEagerParameters,
        FedDriftParameters,
    )
    from raceme.strategies.fedrc.strategy import FedRC, FedRCParameters
    from raceme.strategies.fesem import FeSEM, FeSEMParameters
    from raceme.strategies.flexcfl import (
        FedGroup,
        FedGroupParameters,
        FlexCFL,
        FlexCFLAsync,
        FlexCFLAsyncParameters,
        FlexCFLParameters,
    )
    from raceme.strategies.icfl import ICFL, ICFLAsync, ICFLAsyncParameters, ICFLParameters
    from raceme.strategies.ifca import IFCA, IFCAAsync, IFCAAsyncParameters, IFCAParameters
    from raceme.strategies.panicle.strategy import Panicle, PanicleParameters
    from raceme.strategies.profiles.cfl_gp import CFLGP, CFLGPParameters
    from raceme.strategies.profiles.flux import FLUX, FLUXParameters
    from raceme.strategies.profiles.pacfl import PACFL, PACFLParameters
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

_MODULES = STRATEGIES.modules() | {
    "FlowerRounds": "raceme.strategies.fedavg",
    "Method": "raceme.core.strategy",
    "Plan": "raceme.core.progress",
    "RoundsParameters": "raceme.core.scheduling",
}


def __getattr__(name: str) -> Any:
    """Import a method, or its hyper-parameters, which stand beside it."""
    module = _MODULES.get(name) or _MODULES.get(name.removesuffix("Parameters"))
    if name not in __all__ or module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
