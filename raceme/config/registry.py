"""Names that users type, and the objects they stand for.

A new strategy, dataset, partition, drift or model is one line in a table here. What has a name is
imported when it is first asked for, so that this module needs none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from raceme.config.errors import unknown_name
from raceme.config.extras import explained


class Registry(Mapping[str, Any]):
    """A read-only map from names to objects that are imported when first asked for.

    Parameters
    ----------
    kind : str
        What is registered, in the singular, for error messages: ``"strategy"``.
    targets : Mapping[str, str]
        Name to ``"module:attribute"``.
    declares : str
        The attribute of such an object that is the dataclass of its options.
    prefixed : bool
        Keys of the options have the object's name in front: ``casa.gamma``.
    aliases : Mapping[str, str], optional
        Names that are taken too, but not listed: an old one to the present one.
    """

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, str],
        *,
        declares: str = "options_type",
        prefixed: bool = False,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.prefixed = prefixed
        self._targets = dict(targets)
        self._declares = declares
        self._aliases = dict(aliases or {})

    def __getitem__(self, name: str) -> Any:
        """Return the object registered under `name`.

        Raises
        ------
        UserError
            When no such name exists; it lists the valid names and the nearest match. Or when it
            needs a package that a device's installation has not.
        """
        name = self._aliases.get(name, name)
        if name not in self._targets:
            raise unknown_name(self.kind, name, self._targets)
        module, attribute = self._targets[name].split(":")
        try:
            return getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise explained(error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self._aliases

    def options_type(self, name: str) -> type[Any] | None:
        """Return the dataclass of the options that `name` reads; None if it reads none.

        Raises
        ------
        UserError
            When no such name exists.
        """
        found: type[Any] | None = getattr(self[name], self._declares, None)
        return found

    def prefix(self, name: str) -> str:
        """Return what stands in front of the keys of the options that `name` reads."""
        return f"{name}." if self.prefixed else ""

    def summaries(self) -> dict[str, str]:
        """Return the first line of each object's docstring, by name."""
        return {
            name: (self[name].__doc__ or "").strip().splitlines()[0] if self[name].__doc__ else ""
            for name in self
        }


STRATEGIES = Registry(
    "strategy",
    {
        "c-faacl": "raceme.strategies.c_faacl:CFAACL",
        "ace": "raceme.strategies.ace:ACE",
        "aced": "raceme.strategies.ace:ACED",
        "apd": "raceme.strategies.apd:APD",
        "ca2fl": "raceme.strategies.ca2fl:CA2FL",
        "casa": "raceme.strategies.casa:CASA",
        "casa-c": "raceme.strategies.casa_ablations:CASAC",
        "casa-d": "raceme.strategies.casa_ablations:CASAD",
        "casa-plus": "raceme.strategies.casa_plus:CASAPlus",
        "cfl": "raceme.strategies.cfl:CFL",
        "cfl-async": "raceme.strategies.cfl:CFLAsync",
        "cfl-gp": "raceme.strategies.cfl_gp:CFLGP",
        "csafl": "raceme.strategies.csafl:CSAFL",
        "faacl": "raceme.strategies.faacl:FAACL",
        "faacl-async": "raceme.strategies.faacl_async:FAACLAsync",
        "ewc": "raceme.strategies.ewc:EWC",
        "fadas": "raceme.strategies.fadas:FADAS",
        "fedasync": "raceme.strategies.fedasync:FedAsync",
        "fedavg": "raceme.strategies.flower_rounds:FedAvg",
        "fedbuff": "raceme.strategies.fedbuff:FedBuff",
        "fedcompass": "raceme.strategies.fedcompass:FedCompass",
        "feddrift": "raceme.strategies.feddrift:FedDrift",
        "feddrift-async": "raceme.strategies.feddrift_async:FedDriftAsync",
        "feddrift-eager": "raceme.strategies.feddrift:FedDriftEager",
        "fedgroup": "raceme.strategies.flexcfl:FedGroup",
        "fedmedian": "raceme.strategies.robust_rounds:FedMedian",
        "fedprox": "raceme.strategies.flower_rounds:FedProx",
        "fedrc": "raceme.strategies.fedrc:FedRC",
        "fedtrimmedavg": "raceme.strategies.robust_rounds:FedTrimmedAvg",
        "fesem": "raceme.strategies.fesem:FeSEM",
        "cdfl": "raceme.strategies.cdfl:CDFL",
        "fedweit": "raceme.strategies.fedweit:FedWeIT",
        "fedsoft": "raceme.strategies.fedsoft:FedSoft",
        "fedsoft-async": "raceme.strategies.fedsoft_async:FedSoftAsync",
        "flexcfl": "raceme.strategies.flexcfl:FlexCFL",
        "flexcfl-async": "raceme.strategies.flexcfl_async:FlexCFLAsync",
        "flux": "raceme.strategies.flux:FLUX",
        "g-fedavg": "raceme.strategies.csafl:GFedAvg",
        "ga-fedavg": "raceme.strategies.csafl:GAFedAvg",
        "icfl": "raceme.strategies.icfl:ICFL",
        "icfl-async": "raceme.strategies.icfl:ICFLAsync",
        "ifca": "raceme.strategies.ifca:IFCA",
        "ifca-async": "raceme.strategies.ifca:IFCAAsync",
        "krum": "raceme.strategies.robust_rounds:Krum",
        "multikrum": "raceme.strategies.robust_rounds:MultiKrum",
        "nog-fedavg": "raceme.strategies.csafl:NoGFedAvg",
        "pacfl": "raceme.strategies.pacfl:PACFL",
        "port": "raceme.strategies.port:PORT",
        "r-fedavg": "raceme.strategies.csafl:RFedAvg",
        "panicle": "raceme.strategies.panicle:Panicle",
        "ssgd": "raceme.strategies.ssgd:StableSGD",
        "standalone": "raceme.strategies.standalone:Standalone",
        "t-fedavg": "raceme.strategies.csafl:TFedAvg",
        "ta-fedavg": "raceme.strategies.csafl:TAFedAvg",
    },
    declares="parameters_type",
    prefixed=True,
    aliases={"local": "standalone"},
)

DATASETS = Registry(
    "dataset",
    {
        "digits": "raceme.datasets.digits:Digits",
        "mnist": "raceme.datasets.mnist:Mnist",
        "fashion-mnist": "raceme.datasets.mnist:FashionMnist",
        "synthetic": "raceme.datasets.synthetic:Synthetic",
        "npz": "raceme.datasets.npz:Npz",
        "cifar10": "raceme.datasets.cifar10:Cifar10",
        "image-folder": "raceme.datasets.image_folder:ImageFolder",
        "characters": "raceme.datasets.characters:Characters",
        "femnist": "raceme.datasets.femnist:Femnist",
        "leaf": "raceme.datasets.leaf:Leaf",
        "npz-folder": "raceme.datasets.npz_folder:NpzFolder",
        "harbox": "raceme.datasets.har:HarBox",
        "imu": "raceme.datasets.har:Imu",
        "uci-har": "raceme.datasets.har:UciHar",
        "fsdd": "raceme.datasets.fsdd:Fsdd",
        "text": "raceme.datasets.text:Text",
        "usps": "raceme.datasets.usps:Usps",
        "emnist": "raceme.datasets.emnist:Emnist",
        "gas-drift": "raceme.datasets.gas:GasDrift",
        "beijing-air": "raceme.datasets.air:BeijingAir",
        "hit-bearing": "raceme.datasets.bearing:HitBearing",
        "digits-by-origin": "raceme.datasets.origins:DigitsByOrigin",
    },
    aliases={"har": "npz-folder"},
)

PARTITIONERS = Registry(
    "partition",
    {
        "label-groups": "raceme.datasets.partition:label_groups",
        "dirichlet": "raceme.datasets.partition:dirichlet",
        "classes": "raceme.datasets.partition:classes",
        "iid": "raceme.datasets.partition:iid",
        "rotation-groups": "raceme.datasets.skew:rotation_groups",
        "noise-groups": "raceme.datasets.skew:noise_groups",
        "scenario": "raceme.datasets.scenario:scenario",
    },
)

DRIFTS = Registry(
    "drift",
    {
        "none": "raceme.datasets.drift.base:NoDrift",
        "swap-all": "raceme.datasets.drift.swap:SwapAll",
        "swap-part": "raceme.datasets.drift.swap:SwapPart",
        "incremental": "raceme.datasets.drift.change:Incremental",
        "rotate": "raceme.datasets.drift.change:Rotate",
        "label-shift": "raceme.datasets.drift.change:LabelShift",
        "noise": "raceme.datasets.drift.change:Noise",
        "concepts": "raceme.datasets.drift.concepts:Concepts",
        "mixture": "raceme.datasets.drift.mixture:Mixture",
        "tasks": "raceme.datasets.drift.tasks:Tasks",
        "in-order": "raceme.datasets.drift.in_order:InOrder",
        "scenario-stream": "raceme.datasets.drift.stream:ScenarioStream",
    },
)
"""How data change during a run."""

PROTECTIONS = Registry(
    "protection",
    {
        "none": "raceme.protection.guard:NoProtection",
        "norm": "raceme.protection.guard:NormProtection",
        "filter": "raceme.protection.guard:FilterProtection",
    },
)
"""What stands between clients' updates and a method."""

ATTACKS = Registry(
    "attack",
    {
        "none": "raceme.protection.attacks:NoAttack",
        "scale": "raceme.protection.attacks:Scale",
        "sign-flip": "raceme.protection.attacks:SignFlip",
        "label-flip": "raceme.protection.attacks:LabelFlip",
        "noise": "raceme.protection.attacks:Noise",
    },
)
"""What some simulated clients do to harm a run."""

MODELS = Registry(
    "model",
    {
        "mclr": "raceme.models.mclr:build",
        "mlp": "raceme.models.mlp:build",
        "cnn": "raceme.models.cnn:build",
        "cnn1d": "raceme.models.cnn1d:build",
        "gru": "raceme.models.recurrent:gru",
        "lstm": "raceme.models.recurrent:lstm",
        "mlp128": "raceme.models.mlp:mlp128",
        "mlp512": "raceme.models.mlp:mlp512",
        "cnn3x3": "raceme.models.paper_cnns:cnn3x3",
        "cnn6": "raceme.models.paper_cnns:cnn6",
        "cnn5x5": "raceme.models.paper_cnns:cnn5x5",
        "cnn5x5-wide": "raceme.models.paper_cnns:cnn5x5_wide",
        "resnet18": "raceme.models.resnet:resnet18",
    },
)
