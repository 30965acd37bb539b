"""Names that users type, and the objects they stand for.

A new strategy, dataset, partition, drift or model is one line in a table here. What has a name is
imported when it is first asked for, so that this module needs none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from raceme.core.errors import UserError, unknown_name

# -----------------------------------------------------------------------------
# What only a host needs: the extra ``server`` of the distribution, and what is said without it.
# -----------------------------------------------------------------------------


SERVER = {
    "PIL": "pillow",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "prometheus_client": "prometheus-client",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "threadpoolctl": "threadpoolctl",
    "torchvision": "torchvision",
}
"""Packages of the extra ``server`` as they are imported, and as they are installed."""

INSTALL = "python3 -m pip install -e '.[server]'"
"""What installs them, typed in a checkout."""


def explained(error: ModuleNotFoundError) -> Exception:
    """Return what to raise where an import has failed.

    Parameters
    ----------
    error : ModuleNotFoundError
        What the import raised.

    Returns
    -------
    Exception
        A `UserError` that names the command which installs the package, if it is one of the extra
        ``server``; `error` itself for any other.
    """
    package = SERVER.get((error.name or "").partition(".")[0])
    if package is None:
        return error
    return UserError(
        f"{package} is not installed: this is an installation for a device. On a host, type in "
        f"Raceme's folder: {INSTALL}"
    )


# -----------------------------------------------------------------------------
# Names that users type, and the objects they stand for.
# -----------------------------------------------------------------------------


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
        "c-faacl": "raceme.strategies.faacl.continual:CFAACL",
        "ace": "raceme.strategies.ace:ACE",
        "aced": "raceme.strategies.ace:ACED",
        "apd": "raceme.strategies.continual:APD",
        "ca2fl": "raceme.strategies.fedbuff:CA2FL",
        "casa": "raceme.strategies.casa.strategy:CASA",
        "casa-c": "raceme.strategies.casa.strategy:CASAC",
        "casa-d": "raceme.strategies.casa.strategy:CASAD",
        "casa-plus": "raceme.strategies.casa.strategy:CASAPlus",
        "cfl": "raceme.strategies.cfl:CFL",
        "cfl-async": "raceme.strategies.cfl:CFLAsync",
        "cfl-gp": "raceme.strategies.cfl_gp:CFLGP",
        "csafl": "raceme.strategies.csafl:CSAFL",
        "faacl": "raceme.strategies.faacl.strategy:FAACL",
        "faacl-async": "raceme.strategies.faacl.strategy:FAACLAsync",
        "ewc": "raceme.strategies.continual:EWC",
        "fadas": "raceme.strategies.fedbuff:FADAS",
        "fedasync": "raceme.strategies.fedasync:FedAsync",
        "fedavg": "raceme.strategies.fedavg:FedAvg",
        "fedbuff": "raceme.strategies.fedbuff:FedBuff",
        "fedcompass": "raceme.strategies.fedcompass:FedCompass",
        "feddrift": "raceme.strategies.feddrift:FedDrift",
        "feddrift-async": "raceme.strategies.feddrift:FedDriftAsync",
        "feddrift-eager": "raceme.strategies.feddrift:FedDriftEager",
        "fedgroup": "raceme.strategies.flexcfl:FedGroup",
        "fedmedian": "raceme.strategies.fedavg:FedMedian",
        "fedprox": "raceme.strategies.fedavg:FedProx",
        "fedrc": "raceme.strategies.fedrc:FedRC",
        "fedtrimmedavg": "raceme.strategies.fedavg:FedTrimmedAvg",
        "fesem": "raceme.strategies.fesem:FeSEM",
        "cdfl": "raceme.strategies.cdfl.strategy:CDFL",
        "fedweit": "raceme.strategies.continual:FedWeIT",
        "fedsoft": "raceme.strategies.cdfl.fedsoft:FedSoft",
        "fedsoft-async": "raceme.strategies.cdfl.fedsoft:FedSoftAsync",
        "flexcfl": "raceme.strategies.flexcfl:FlexCFL",
        "flexcfl-async": "raceme.strategies.flexcfl:FlexCFLAsync",
        "flux": "raceme.strategies.flux:FLUX",
        "g-fedavg": "raceme.strategies.csafl:GFedAvg",
        "ga-fedavg": "raceme.strategies.csafl:GAFedAvg",
        "icfl": "raceme.strategies.icfl:ICFL",
        "icfl-async": "raceme.strategies.icfl:ICFLAsync",
        "ifca": "raceme.strategies.ifca:IFCA",
        "ifca-async": "raceme.strategies.ifca:IFCAAsync",
        "krum": "raceme.strategies.fedavg:Krum",
        "multikrum": "raceme.strategies.fedavg:MultiKrum",
        "nog-fedavg": "raceme.strategies.csafl:NoGFedAvg",
        "pacfl": "raceme.strategies.pacfl:PACFL",
        "port": "raceme.strategies.fedbuff:PORT",
        "r-fedavg": "raceme.strategies.csafl:RFedAvg",
        "panicle": "raceme.strategies.panicle.strategy:Panicle",
        "ssgd": "raceme.strategies.continual:StableSGD",
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
        "digits": "raceme.datasets.synthetic:Digits",
        "mnist": "raceme.datasets.images:Mnist",
        "fashion-mnist": "raceme.datasets.images:FashionMnist",
        "synthetic": "raceme.datasets.synthetic:Synthetic",
        "npz": "raceme.datasets.npz:Npz",
        "cifar10": "raceme.datasets.images:Cifar10",
        "image-folder": "raceme.datasets.images:ImageFolder",
        "characters": "raceme.datasets.leaf:Characters",
        "femnist": "raceme.datasets.leaf:Femnist",
        "leaf": "raceme.datasets.leaf:Leaf",
        "npz-folder": "raceme.datasets.npz:NpzFolder",
        "harbox": "raceme.datasets.sensors:HarBox",
        "imu": "raceme.datasets.sensors:Imu",
        "uci-har": "raceme.datasets.sensors:UciHar",
        "fsdd": "raceme.datasets.sensors:Fsdd",
        "text": "raceme.datasets.leaf:Text",
        "usps": "raceme.datasets.images:Usps",
        "emnist": "raceme.datasets.images:Emnist",
        "gas-drift": "raceme.datasets.sensors:GasDrift",
        "beijing-air": "raceme.datasets.sensors:BeijingAir",
        "hit-bearing": "raceme.datasets.sensors:HitBearing",
        "digits-by-origin": "raceme.datasets.images:DigitsByOrigin",
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
        "rotation-groups": "raceme.datasets.partition:rotation_groups",
        "noise-groups": "raceme.datasets.partition:noise_groups",
        "scenario": "raceme.datasets.partition:scenario",
    },
)

DRIFTS = Registry(
    "drift",
    {
        "none": "raceme.datasets.drift:NoDrift",
        "swap-all": "raceme.datasets.drift:SwapAll",
        "swap-part": "raceme.datasets.drift:SwapPart",
        "incremental": "raceme.datasets.drift:Incremental",
        "rotate": "raceme.datasets.drift:Rotate",
        "label-shift": "raceme.datasets.drift:LabelShift",
        "noise": "raceme.datasets.drift:Noise",
        "concepts": "raceme.datasets.drift:Concepts",
        "mixture": "raceme.datasets.drift:Mixture",
        "tasks": "raceme.datasets.drift:Tasks",
        "in-order": "raceme.datasets.drift:InOrder",
        "scenario-stream": "raceme.datasets.drift:ScenarioStream",
    },
)
"""How data change during a run."""

PROTECTIONS = Registry(
    "protection",
    {
        "none": "raceme.core.protection:NoProtection",
        "norm": "raceme.core.protection:NormProtection",
        "filter": "raceme.core.protection:FilterProtection",
    },
)
"""What stands between clients' updates and a method."""

ATTACKS = Registry(
    "attack",
    {
        "none": "raceme.simulation.attacks:NoAttack",
        "scale": "raceme.simulation.attacks:Scale",
        "sign-flip": "raceme.simulation.attacks:SignFlip",
        "label-flip": "raceme.simulation.attacks:LabelFlip",
        "noise": "raceme.simulation.attacks:Noise",
    },
)
"""What some simulated clients do to harm a run."""

MODELS = Registry(
    "model",
    {
        "mclr": "raceme.training.models:mclr",
        "mlp": "raceme.training.models:mlp",
        "cnn": "raceme.training.models:cnn",
        "cnn1d": "raceme.training.models:cnn1d",
        "gru": "raceme.training.models:gru",
        "lstm": "raceme.training.models:lstm",
        "mlp128": "raceme.training.models:mlp128",
        "mlp512": "raceme.training.models:mlp512",
        "cnn3x3": "raceme.training.models:cnn3x3",
        "cnn6": "raceme.training.models:cnn6",
        "cnn5x5": "raceme.training.models:cnn5x5",
        "cnn5x5-wide": "raceme.training.models:cnn5x5_wide",
        "resnet18": "raceme.training.models:resnet18",
    },
)
