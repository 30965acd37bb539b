"""CASA without one of its parts: the ablations of CASA's paper, section 5.3."""

from __future__ import annotations

from dataclasses import dataclass

from raceme.config.options import option
from raceme.server.method import Variant
from raceme.strategies.casa import CASA, CASAParameters


@dataclass(frozen=True)
class CASACParameters(CASAParameters):
    """Hyper-parameters of CASA-C."""

    clustering: bool = option(False, "split clusters (true: CASA)")


@dataclass(frozen=True)
class CASADParameters(CASAParameters):
    """Hyper-parameters of CASA-D."""

    bi_level: bool = option(False, "bi-level decay (true: CASA)")


CASAC = Variant(CASA, CASACParameters, "CASA without clustering: the ablation CASA-C.")
CASAD = Variant(CASA, CASADParameters, "CASA with a constant decay: the ablation CASA-D.")
