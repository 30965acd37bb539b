"""Written by ``python tests/strategy_stubs.py``: what editors and type checkers know."""

# ruff: noqa
# fmt: off

from typing import Any, TypedDict, Unpack

from raceme.core.progress import Plan as Plan
from raceme.core.registry import STRATEGIES as STRATEGIES
from raceme.core.scheduling import MetricsFn
from raceme.core.scheduling import RoundsParameters as RoundsParameters
from raceme.core.strategy import Method as Method
from raceme.strategies.fedavg import FlowerRounds as FlowerRounds
from raceme.strategies.casa.strategy import CASA as _CASA
from raceme.strategies.casa.strategy import CASAParameters as CASAParameters
from raceme.strategies.casa.strategy import CASAPlus as _CASAPlus
from raceme.strategies.casa.strategy import CASAPlusParameters as CASAPlusParameters
from raceme.strategies.cdfl.fedsoft import FedSoft as _FedSoft
from raceme.strategies.cdfl.fedsoft import FedSoftAsync as _FedSoftAsync
from raceme.strategies.cdfl.fedsoft import FedSoftAsyncParameters as FedSoftAsyncParameters
from raceme.strategies.cdfl.fedsoft import FedSoftParameters as FedSoftParameters
from raceme.strategies.cdfl.strategy import CDFL as _CDFL
from raceme.strategies.cdfl.strategy import CDFLParameters as CDFLParameters
from raceme.strategies.cfl import CFL as _CFL
from raceme.strategies.cfl import CFLAsync as _CFLAsync
from raceme.strategies.cfl import CFLAsyncParameters as CFLAsyncParameters
from raceme.strategies.cfl import CFLParameters as CFLParameters
from raceme.strategies.cfl import OCFL as _OCFL
from raceme.strategies.cfl import OCFLParameters as OCFLParameters
from raceme.strategies.continual.strategy import APD as _APD
from raceme.strategies.continual.strategy import APDParameters as APDParameters
from raceme.strategies.continual.strategy import EWC as _EWC
from raceme.strategies.continual.strategy import EWCParameters as EWCParameters
from raceme.strategies.continual.strategy import FedWeIT as _FedWeIT
from raceme.strategies.continual.strategy import FedWeITParameters as FedWeITParameters
from raceme.strategies.continual.strategy import StableSGD as _StableSGD
from raceme.strategies.continual.strategy import StableSGDParameters as StableSGDParameters
from raceme.strategies.csafl import CSAFL as _CSAFL
from raceme.strategies.csafl import CSAFLParameters as CSAFLParameters
from raceme.strategies.echopfl import EchoPFL as _EchoPFL
from raceme.strategies.echopfl import EchoPFLParameters as EchoPFLParameters
from raceme.strategies.faacl.continual import CFAACL as _CFAACL
from raceme.strategies.faacl.continual import CFAACLParameters as CFAACLParameters
from raceme.strategies.faacl.strategy import FAACL as _FAACL
from raceme.strategies.faacl.strategy import FAACLAsync as _FAACLAsync
from raceme.strategies.faacl.strategy import FAACLAsyncParameters as FAACLAsyncParameters
from raceme.strategies.faacl.strategy import FAACLParameters as FAACLParameters
from raceme.strategies.fedasync import FedAsync as _FedAsync
from raceme.strategies.fedasync import FedAsyncParameters as FedAsyncParameters
from raceme.strategies.fedavg import FedAvg as _FedAvg
from raceme.strategies.fedavg import FedMedian as _FedMedian
from raceme.strategies.fedavg import FedProx as _FedProx
from raceme.strategies.fedavg import FedProxParameters as FedProxParameters
from raceme.strategies.fedavg import FedTrimmedAvg as _FedTrimmedAvg
from raceme.strategies.fedavg import FedTrimmedAvgParameters as FedTrimmedAvgParameters
from raceme.strategies.fedavg import MultiKrum as _MultiKrum
from raceme.strategies.fedavg import MultiKrumParameters as MultiKrumParameters
from raceme.strategies.fedbuff import ACE as _ACE
from raceme.strategies.fedbuff import ACEDParameters as ACEDParameters
from raceme.strategies.fedbuff import ACEParameters as ACEParameters
from raceme.strategies.fedbuff import CA2FL as _CA2FL
from raceme.strategies.fedbuff import CA2FLParameters as CA2FLParameters
from raceme.strategies.fedbuff import FADAS as _FADAS
from raceme.strategies.fedbuff import FADASParameters as FADASParameters
from raceme.strategies.fedbuff import FedBuff as _FedBuff
from raceme.strategies.fedbuff import FedBuffParameters as FedBuffParameters
from raceme.strategies.fedbuff import PORT as _PORT
from raceme.strategies.fedbuff import PORTParameters as PORTParameters
from raceme.strategies.fedcompass import FedCompass as _FedCompass
from raceme.strategies.fedcompass import FedCompassParameters as FedCompassParameters
from raceme.strategies.feddrift import FedDrift as _FedDrift
from raceme.strategies.feddrift import FedDriftAsync as _FedDriftAsync
from raceme.strategies.feddrift import FedDriftAsyncParameters as FedDriftAsyncParameters
from raceme.strategies.feddrift import FedDriftEagerParameters as FedDriftEagerParameters
from raceme.strategies.feddrift import FedDriftParameters as FedDriftParameters
from raceme.strategies.fedrc.strategy import FedRC as _FedRC
from raceme.strategies.fedrc.strategy import FedRCParameters as FedRCParameters
from raceme.strategies.fielding import Fielding as _Fielding
from raceme.strategies.fielding import FieldingParameters as FieldingParameters
from raceme.strategies.flexcfl import FedGroupParameters as FedGroupParameters
from raceme.strategies.flexcfl import FlexCFL as _FlexCFL
from raceme.strategies.flexcfl import FlexCFLAsync as _FlexCFLAsync
from raceme.strategies.flexcfl import FlexCFLAsyncParameters as FlexCFLAsyncParameters
from raceme.strategies.flexcfl import FlexCFLParameters as FlexCFLParameters
from raceme.strategies.icfl import ICFL as _ICFL
from raceme.strategies.icfl import ICFLAsync as _ICFLAsync
from raceme.strategies.icfl import ICFLAsyncParameters as ICFLAsyncParameters
from raceme.strategies.icfl import ICFLParameters as ICFLParameters
from raceme.strategies.ifca import FeSEM as _FeSEM
from raceme.strategies.ifca import FeSEMParameters as FeSEMParameters
from raceme.strategies.ifca import IFCA as _IFCA
from raceme.strategies.ifca import IFCAAsync as _IFCAAsync
from raceme.strategies.ifca import IFCAAsyncParameters as IFCAAsyncParameters
from raceme.strategies.ifca import IFCAParameters as IFCAParameters
from raceme.strategies.panicle.strategy import Panicle as _Panicle
from raceme.strategies.panicle.strategy import PanicleParameters as PanicleParameters
from raceme.strategies.personalized import APFL as _APFL
from raceme.strategies.personalized import APFLParameters as APFLParameters
from raceme.strategies.personalized import Ditto as _Ditto
from raceme.strategies.personalized import DittoParameters as DittoParameters
from raceme.strategies.personalized import FedPer as _FedPer
from raceme.strategies.personalized import FedPerParameters as FedPerParameters
from raceme.strategies.personalized import FedRep as _FedRep
from raceme.strategies.personalized import FedRepParameters as FedRepParameters
from raceme.strategies.personalized import Standalone as _Standalone
from raceme.strategies.personalized import StandaloneParameters as StandaloneParameters
from raceme.strategies.profiles.cfl_gp import CFLGP as _CFLGP
from raceme.strategies.profiles.cfl_gp import CFLGPParameters as CFLGPParameters
from raceme.strategies.profiles.flux import FLUX as _FLUX
from raceme.strategies.profiles.flux import FLUXParameters as FLUXParameters
from raceme.strategies.profiles.pacfl import PACFL as _PACFL
from raceme.strategies.profiles.pacfl import PACFLParameters as PACFLParameters

class _Arguments(TypedDict, total=False):
    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsFn | None
    evaluate_metrics_aggr_fn: MetricsFn | None
    accuracy_key: str
    loss_key: str
class ACE(_ACE):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        server_lr: float = 1.0,
        start: str = 'all',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def ACED(
    parameters: Any = None,
    seed: int = 0,
    *,
    server_lr: float = 1.0,
    start: str = 'all',
    delay: int | None = None,
    clock: str = 'trained',
    **arguments: Unpack[_Arguments],
) -> ACE: ...
class APD(_APD):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        mu: float = 0.05,
        sparsity: float = 0.01,
        drift: float = 100.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class APFL(_APFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        alpha: float = 0.5,
        adaptive: bool = True,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CA2FL(_CA2FL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        m: int = 10,
        server_lr: float = 1.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CASA(_CASA):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        alpha0: float = 2.0,
        kappa: float = 0.001,
        gamma: float = 0.15,
        compare: str = 'weights',
        sketch: int = 0,
        budget: int = 0,
        budget_counts: str = 'items',
        gap_range: float = 0.0,
        staleness_unit: str = 'cluster',
        noise_guard: float = 0.0,
        missing_pairs: str = 'wait',
        patience: float = 10.0,
        clustering: bool = True,
        bi_level: bool = True,
        constant_alpha: float = 0.3,
        exact_up_to: int = 2000,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def CASAC(
    parameters: Any = None,
    seed: int = 0,
    *,
    alpha0: float = 2.0,
    kappa: float = 0.001,
    gamma: float = 0.15,
    compare: str = 'weights',
    sketch: int = 0,
    budget: int = 0,
    budget_counts: str = 'items',
    gap_range: float = 0.0,
    staleness_unit: str = 'cluster',
    noise_guard: float = 0.0,
    missing_pairs: str = 'wait',
    patience: float = 10.0,
    clustering: bool = False,
    bi_level: bool = True,
    constant_alpha: float = 0.3,
    exact_up_to: int = 2000,
    **arguments: Unpack[_Arguments],
) -> CASA: ...
def CASAD(
    parameters: Any = None,
    seed: int = 0,
    *,
    alpha0: float = 2.0,
    kappa: float = 0.001,
    gamma: float = 0.15,
    compare: str = 'weights',
    sketch: int = 0,
    budget: int = 0,
    budget_counts: str = 'items',
    gap_range: float = 0.0,
    staleness_unit: str = 'cluster',
    noise_guard: float = 0.0,
    missing_pairs: str = 'wait',
    patience: float = 10.0,
    clustering: bool = True,
    bi_level: bool = False,
    constant_alpha: float = 0.3,
    exact_up_to: int = 2000,
    **arguments: Unpack[_Arguments],
) -> CASA: ...
class CASAPlus(_CASAPlus):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        alpha0: float = 2.0,
        kappa: float = 0.001,
        gamma: float = 0.15,
        compare: str = 'weights',
        sketch: int = 0,
        budget: int = 0,
        budget_counts: str = 'items',
        gap_range: float = 0.0,
        staleness_unit: str = 'cluster',
        noise_guard: float = 0.0,
        missing_pairs: str = 'wait',
        patience: float = 10.0,
        clustering: bool = True,
        bi_level: bool = True,
        constant_alpha: float = 0.3,
        exact_up_to: int = 2000,
        sparsity: float = 0.5,
        rounds: int = 0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CDFL(_CDFL):
    def __init__(
        self,
        parameters: CDFLParameters | None = None,
        seed: int = 0,
        *,
        requests: str = 'poisson',
        request_seconds: float = 10.0,
        loss_rise: float = 0.1,
        least_seconds: float = 0.0,
        rho: float = 0.1,
        beta0: float = 0.025,
        a: float = 10.0,
        b: float = 5.0,
        oldest: int | None = None,
        share_bar: float | None = None,
        last_update: str = 'before',
        k: int | None = None,
        c1: float = 0.5,
        c2: float = 0.25,
        sharpness: str = '3',
        loss_bar: str = '0.5',
        model_loss_bar: str = '0',
        distance_bar: str = '0',
        high_bar: str = 'lower',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CFAACL(_CFAACL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        epsilon: float = 0.5,
        alpha: float = 0.05,
        init_epochs: int = 5,
        hierarchical: bool = True,
        remembered: int = 50,
        borrow: str = 'samples',
        learn_epochs: int = 20,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CFL(_CFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        linkage: str = 'complete',
        wait_rounds: int = 0,
        least_members: int = 2,
        gamma_max: float = 0.0,
        eps1: float = 0.4,
        eps2: float = 0.7,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CFLAsync(_CFLAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        alpha: float = 0.3,
        linkage: str = 'complete',
        wait_rounds: int = 0,
        least_members: int = 2,
        gamma_max: float = 0.0,
        eps1: float = 0.4,
        eps2: float = 1.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CFLGP(_CFLGP):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        k: int = 4,
        every: int = 2,
        until: int = 10,
        warmup: int = 4,
        criterion: str = 'cycle',
        profile: str = 'all',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class CSAFL(_CSAFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        update: str = 'semi-asynchronous',
        grouping: str = 'spectral',
        groups: int = 4,
        budget: float = 10.0,
        picked: int = 20,
        threshold: int = 5,
        stale: str = 'mixed',
        rho: float = 0.1,
        width: float = 0.0,
        pretrain_epochs: int = 2,
        unfinished: str = 'averaged',
        mixing: str = 'model',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class Ditto(_Ditto):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        strength: float = 1.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class EWC(_EWC):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        mu: float = 0.05,
        strength: float = 1000.0,
        memory: float = 1.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class EchoPFL(_EchoPFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        alpha: float = 0.3,
        expand: float = 0.0,
        echo: float = 1.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FAACL(_FAACL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        epsilon: float = 0.5,
        alpha: float = 0.05,
        init_epochs: int = 5,
        hierarchical: bool = True,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FAACLAsync(_FAACLAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        epsilon: float = 0.5,
        alpha: float = 0.05,
        init_epochs: int = 5,
        share: float = 0.6,
        compared: int = 5,
        retest_after: int = 8,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FADAS(_FADAS):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        m: int = 5,
        server_lr: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.99,
        epsilon: float = 1e-08,
        calm_delay: int = 1,
        delay_rule: str = 'divide',
        bias_correction: bool = False,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FLUX(_FLUX):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        dimensions: int = 10,
        least_gain: float = 0.06,
        latest: float = 0.8,
        warmup: int = 0,
        reach: float = 1.0,
        noise: float = 0.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FeSEM(_FeSEM):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        k: int = 4,
        start: str = 'models',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedAsync(_FedAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        alpha: float = 0.3,
        rho: float = 0.0,
        first_staleness: int = 0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedAvg(_FedAvg):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedBuff(_FedBuff):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        k: int = 10,
        server_lr: float = 1.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedCompass(_FedCompass):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        min_steps: int = 20,
        max_steps: int = 100,
        patience: float = 1.5,
        renewal: float = 0.9,
        alpha: float = 0.9,
        a: float = 0.5,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedDrift(_FedDrift):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        delta: float = 0.1,
        merge_delta: float | None = None,
        isolation: int = 1,
        measure: str = 'accuracy',
        start: str = 'one',
        max_models: int = 0,
        memory: int = 0,
        compare_on: str = 'all',
        scoring_cost: float = 0.0,
        ask_every: int = 0,
        founding: str = 'each',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedDriftAsync(_FedDriftAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        alpha: float = 0.3,
        delta: float = 0.1,
        merge_delta: float | None = None,
        isolation: int = 1,
        measure: str = 'accuracy',
        start: str = 'one',
        max_models: int = 0,
        memory: int = 0,
        compare_on: str = 'all',
        scoring_cost: float = 0.0,
        ask_every: int = 5,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def FedDriftEager(
    parameters: Any = None,
    seed: int = 0,
    *,
    fraction: float = 1.0,
    sampling: str = 'random',
    delta: float = 0.1,
    merge_delta: float | None = None,
    isolation: int = 1,
    measure: str = 'accuracy',
    start: str = 'one',
    max_models: int = 0,
    memory: int = 0,
    compare_on: str = 'all',
    scoring_cost: float = 0.0,
    ask_every: int = 0,
    founding: str = 'together',
    **arguments: Unpack[_Arguments],
) -> FedDrift: ...
def FedGroup(
    parameters: Any = None,
    seed: int = 0,
    *,
    fraction: float = 1.0,
    sampling: str = 'random',
    groups: int = 4,
    pretrain: int = 20,
    pretrain_steps: int = 50,
    measure: str = 'edc',
    detect: str = 'none',
    distance: str = 'counts',
    start: str = 'own',
    tolerance: float = 0.2,
    newcomers: str = 'direction',
    placing: str = 'server',
    eta_g: float = 0.0,
    inter_group: str = 'mean',
    paper: bool = False,
    **arguments: Unpack[_Arguments],
) -> FlexCFL: ...
class FedMedian(_FedMedian):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedPer(_FedPer):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        head_layers: int = 1,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedProx(_FedProx):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        proximal_mu: float = 0.05,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedRC(_FedRC):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        k: int = 4,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedRep(_FedRep):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        head_layers: int = 1,
        head_epochs: int = 1,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedSoft(_FedSoft):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        k: int | None = None,
        estimate_every: int = 2,
        selection: str = 'drawn',
        drawn: int | None = None,
        smoothing: float = 0.0001,
        strength: float = 0.1,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedSoftAsync(_FedSoftAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        requests: str = 'poisson',
        request_seconds: float = 10.0,
        loss_rise: float = 0.1,
        least_seconds: float = 0.0,
        rho: float = 0.1,
        beta0: float = 0.025,
        a: float = 10.0,
        b: float = 5.0,
        oldest: int | None = None,
        share_bar: float | None = None,
        last_update: str = 'before',
        k: int | None = None,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedTrimmedAvg(_FedTrimmedAvg):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        beta: float = 0.2,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FedWeIT(_FedWeIT):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        mu: float = 0.05,
        sparsity: float = 0.01,
        drift: float = 100.0,
        others: int = 5,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class Fielding(_Fielding):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        most_clusters: int = 10,
        tolerance: float = 0.2,
        reach: float = 0.3333333333333333,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FlexCFL(_FlexCFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        groups: int = 4,
        pretrain: int = 20,
        pretrain_steps: int = 50,
        measure: str = 'edc',
        detect: str = 'label-counts',
        distance: str = 'counts',
        start: str = 'own',
        tolerance: float = 0.2,
        newcomers: str = 'direction',
        placing: str = 'server',
        eta_g: float = 0.0,
        inter_group: str = 'mean',
        paper: bool = False,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class FlexCFLAsync(_FlexCFLAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        alpha: float = 0.3,
        groups: int = 4,
        pretrain: int = 20,
        pretrain_steps: int = 50,
        measure: str = 'edc',
        detect: str = 'label-counts',
        distance: str = 'counts',
        start: str = 'own',
        tolerance: float = 0.2,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def GAFedAvg(
    parameters: Any = None,
    seed: int = 0,
    *,
    update: str = 'asynchronous',
    grouping: str = 'spectral',
    groups: int = 4,
    budget: float = 10.0,
    picked: int = 20,
    threshold: int = 5,
    stale: str = 'mixed',
    rho: float = 0.1,
    width: float = 0.0,
    pretrain_epochs: int = 2,
    unfinished: str = 'averaged',
    mixing: str = 'model',
    **arguments: Unpack[_Arguments],
) -> CSAFL: ...
def GFedAvg(
    parameters: Any = None,
    seed: int = 0,
    *,
    update: str = 'synchronous',
    grouping: str = 'spectral',
    groups: int = 4,
    budget: float = 10.0,
    picked: int = 20,
    threshold: int = 5,
    stale: str = 'mixed',
    rho: float = 0.1,
    width: float = 0.0,
    pretrain_epochs: int = 2,
    unfinished: str = 'averaged',
    mixing: str = 'model',
    **arguments: Unpack[_Arguments],
) -> CSAFL: ...
class ICFL(_ICFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        alpha_start: float = 0.85,
        epsilon: float = 4.0,
        rounds: int = 0,
        moves: bool = True,
        compare: str = 'updates',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class ICFLAsync(_ICFLAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        alpha: float = 0.3,
        alpha_start: float = 0.85,
        epsilon: float = 4.0,
        rounds: int = 0,
        moves: bool = True,
        compare: str = 'updates',
        time_decay: float = 0.01,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class IFCA(_IFCA):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        k: int = 4,
        choosing_cost: float = 0.0,
        by_examples: bool = False,
        detect: str = 'none',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class IFCAAsync(_IFCAAsync):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        decay: str = 'hinge',
        a: float = 1.0,
        b: float = 4.0,
        alpha: float = 0.3,
        k: int = 4,
        choosing_cost: float = 0.0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def Krum(
    parameters: Any = None,
    seed: int = 0,
    *,
    fraction: float = 1.0,
    sampling: str = 'random',
    num_malicious_nodes: int = 0,
    num_nodes_to_select: int | None = 1,
    **arguments: Unpack[_Arguments],
) -> MultiKrum: ...
class MultiKrum(_MultiKrum):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        num_malicious_nodes: int = 0,
        num_nodes_to_select: int | None = None,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def NoGFedAvg(
    parameters: Any = None,
    seed: int = 0,
    *,
    update: str = 'semi-asynchronous',
    grouping: str = 'none',
    groups: int = 4,
    budget: float = 10.0,
    picked: int = 20,
    threshold: int = 5,
    stale: str = 'mixed',
    rho: float = 0.1,
    width: float = 0.0,
    pretrain_epochs: int = 2,
    unfinished: str = 'averaged',
    mixing: str = 'model',
    **arguments: Unpack[_Arguments],
) -> CSAFL: ...
class OCFL(_OCFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        norm: float = 2.0,
        least_members: int = 2,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class PACFL(_PACFL):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        directions: int = 3,
        directions_in_all: int = 0,
        beta: float = 4.9,
        clusters: int = 0,
        linkage: str = 'average',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class PORT(_PORT):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        min_clients: int = 15,
        bound: int = 10,
        gamma: float = 3.0,
        mu: float = 1.0,
        reference: str = 'last-step',
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class Panicle(_Panicle):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        probe_steps: int = 10,
        clustering: bool = True,
        level: float = 0.6,
        drift: bool = True,
        forward: float = 0.5,
        average: float = 0.1,
        sketch_epsilon: float = 0.0,
        sketch_size: int = 64,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def RFedAvg(
    parameters: Any = None,
    seed: int = 0,
    *,
    update: str = 'semi-asynchronous',
    grouping: str = 'random',
    groups: int = 4,
    budget: float = 10.0,
    picked: int = 20,
    threshold: int = 5,
    stale: str = 'mixed',
    rho: float = 0.1,
    width: float = 0.0,
    pretrain_epochs: int = 2,
    unfinished: str = 'averaged',
    mixing: str = 'model',
    **arguments: Unpack[_Arguments],
) -> CSAFL: ...
class StableSGD(_StableSGD):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        *,
        fraction: float = 1.0,
        sampling: str = 'random',
        mu: float = 0.05,
        dropout: float = 0.25,
        decay: float = 0.8,
        batch_size: int | None = None,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
class Standalone(_Standalone):
    def __init__(
        self,
        parameters: Any = None,
        seed: int = 0,
        **arguments: Unpack[_Arguments],
    ) -> None: ...
def TAFedAvg(
    parameters: Any = None,
    seed: int = 0,
    *,
    update: str = 'asynchronous',
    grouping: str = 'none',
    groups: int = 4,
    budget: float = 10.0,
    picked: int = 20,
    threshold: int = 5,
    stale: str = 'mixed',
    rho: float = 0.1,
    width: float = 0.0,
    pretrain_epochs: int = 2,
    unfinished: str = 'averaged',
    mixing: str = 'model',
    **arguments: Unpack[_Arguments],
) -> CSAFL: ...
def TFedAvg(
    parameters: Any = None,
    seed: int = 0,
    *,
    update: str = 'synchronous',
    grouping: str = 'none',
    groups: int = 4,
    budget: float = 10.0,
    picked: int = 20,
    threshold: int = 5,
    stale: str = 'mixed',
    rho: float = 0.1,
    width: float = 0.0,
    pretrain_epochs: int = 2,
    unfinished: str = 'averaged',
    mixing: str = 'model',
    **arguments: Unpack[_Arguments],
) -> CSAFL: ...
