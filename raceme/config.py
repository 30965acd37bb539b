"""The keys of a run: one list for the command line, TOML files and Flower's run config."""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from raceme.errors import UserError, unknown_name

Value = str | int | float | bool
"""What a key can hold, in TOML as in Flower's run config."""

SET = "set"
"""The key that stands for any others, as the option ``--set`` does."""

AUTO = "auto"
"""How a key that is left to the dataset is written; in Python it is None."""


def key(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    among: tuple[str, ...] = (),
) -> Any:
    """Declare a key: its default, its one-line description and its range.

    Parameters
    ----------
    default : Any
        The default; None stands for "auto".
    help : str
        What the key means, for ``raceme list`` and the docs.
    low, above, high : float, optional
        Smallest allowed value; largest value that is too small; largest allowed value.
    among : tuple[str, ...]
        The allowed values of a text.
    """
    rules = {"help": help, "low": low, "above": above, "high": high, "among": among}
    return field(default=default, metadata=rules)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the outcome of a run.

    The attribute ``data_root`` is the key ``data-root`` wherever a person writes it. None stands
    for ``"auto"``: the dataset's own default, filled in by :func:`raceme.experiment.resolve`.
    """

    strategy: str = key("casa", "method; see `raceme list`")
    dataset: str = key("digits", "dataset; see `raceme list`")
    data_root: str = key("", "folder that holds the datasets' files")
    download: bool = key(False, "fetch missing files into data-root")
    data_file: str = key("", "npz: the file with x_train, y_train, x_test, y_test")
    model: str | None = key(None, "network, or module:function that builds one")
    clients: int | None = key(None, "number of clients (auto: what suits the dataset)", low=1)
    partition: str = key("label-groups", "how samples go to clients; see `raceme list`")
    groups: str = key("0.2,0.2,0.3,0.3", "label-groups: share of clients and labels per group")
    dirichlet_alpha: float = key(1.0, "Dirichlet concentration of labels", above=0)
    classes_per_client: int = key(2, "classes: labels that one client holds", low=1)
    sizes: str = key(
        "equal", "samples per client: equal or power-law", among=("equal", "power-law")
    )
    test_fraction: float = key(0.2, "share of a client's samples kept for testing", above=0)
    synthetic_alpha: float = key(1.0, "synthetic: how far the clients' models differ", low=0)
    synthetic_beta: float = key(1.0, "synthetic: how far the clients' inputs differ", low=0)
    image_size: int = key(0, "image-folder: pixels of height and width (0: as they are)", low=0)
    drift: str = key("none", "how clients' data change; see `raceme list`")
    drift_at: str | None = key(
        None, "when data change: moments, '60s, 120s', '500 updates', or 'every 3 uploads'"
    )
    drift_seed: int | None = key(None, "seed of the drift (auto: that of the run)", low=0)
    noise_std: float = key(1.0, "noise-groups: deviation of the noise in the last group", low=0)
    lr: float | None = key(None, "learning rate of the local SGD", above=0)
    batch_size: int = key(10, "mini-batch size of the local SGD", low=1)
    local_epochs: int = key(1, "passes over the local data per update", low=1)
    devices: str = key(
        "slow30x5",
        "device profile, TOML file with one, or trace:FOLDER of a run; see `raceme list`",
    )
    max_updates: int = key(500, "stop after so many client updates", low=1)
    max_time: float = key(0.0, "stop at this time in seconds (0: no limit)", low=0)
    target_accuracy: float | None = key(None, "stop at this mean client accuracy", above=0, high=1)
    stop_at_target: bool | None = key(None, "stop at the target (auto: only if one is given)")
    eval_every: int | None = key(
        None, "updates between two evaluations (auto: as many as there are clients)", low=1
    )
    concurrency: int = key(0, "clients that train at a time (0: all that are online)", low=0)
    task_timeout: float = key(3600.0, "seconds after which an unanswered task is lost", above=0)
    workers: str = key("auto", "worker processes (auto; 0: none); the outcome is the same")
    device: str = key("cpu", "where clients train: cpu or cuda", among=("cpu", "cuda"))
    vectorised: bool = key(False, "train all clients together, as on cuda, on the cpu too")
    seed: int = key(0, "seed of everything random", low=0)
    checkpoint_every: int = key(0, "updates between two checkpoints (0: none by updates)", low=0)
    checkpoint_seconds: float | None = key(
        None,
        "wall-clock seconds between two checkpoints (0: none by time; auto: 60 on real devices, "
        "and in comparisons, 0 in a run on virtual time)",
        low=0,
    )
    resume: str = key("", "folder of a run to go on with, from its last checkpoint")
    out: str = key("", "folder for the results (empty: runs/<time>-<strategy>-<dataset>)")
    options: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    """Hyper-parameters by strategy, e.g. ``{"casa": {"gamma": 0.15}}``."""

    def __post_init__(self) -> None:
        for item in _keys().values():
            _check_range(item, getattr(self, item.name))
        if self.test_fraction >= 1:
            raise UserError(f"test-fraction must be below 1, got {self.test_fraction:g}.")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Value]) -> RunConfig:
        """Build a configuration from dotted keys as a person writes them.

        Parameters
        ----------
        mapping : Mapping[str, Value]
            E.g. ``{"max-updates": 100, "casa.gamma": 0.2}``. Absent keys keep their defaults. The
            key ``set`` holds further ones as text, ``"casa.gamma=0.2 seed=1"``, which win: Flower
            takes only keys that ``pyproject.toml`` lists.

        Raises
        ------
        UserError
            A key that does not exist, a value of the wrong type or out of its range.
        """
        known = _keys()
        values: dict[str, Any] = {}
        options: dict[str, dict[str, Value]] = {}
        given = dict(mapping)
        given.update(_assignments(str(given.pop(SET, ""))))
        for name, value in given.items():
            if "." in name:
                strategy, option = name.split(".", 1)
                options.setdefault(strategy, {})[option] = _option(strategy, option, value)
            elif name in known:
                item = known[name]
                values[item.name] = _convert(name, value, str(item.type))
            else:
                raise unknown_name("key", name, [*known, *_option_keys()])
        return cls(**values, options=options)

    def to_mapping(self) -> dict[str, Value]:
        """Return all keys as dotted names, with the hyper-parameters of the chosen strategy.

        :meth:`from_mapping` of the result is this configuration again.
        """
        flat: dict[str, Value] = {}
        for name, item in _keys().items():
            value = getattr(self, item.name)
            flat[name] = AUTO if value is None else value
        for option, value in self.parameters().items():
            flat[f"{self.strategy}.{option}"] = value
        return flat

    def parameters(self) -> dict[str, Value]:
        """Return the hyper-parameters of the chosen strategy, defaults included."""
        return {**_defaults(self.strategy), **self.options.get(self.strategy, {})}

    @property
    def num_clients(self) -> int:
        """Number of clients of a configuration that has been filled in."""
        assert self.clients is not None, "raceme.datasets.with_defaults fills it in"
        return self.clients

    def with_values(self, **values: Any) -> RunConfig:
        """Return a copy with other values, by attribute name."""
        return replace(self, **values)


def read_toml(path: Path) -> dict[str, Value]:
    """Read a configuration file into dotted keys.

    Raises
    ------
    UserError
        The file is missing or is not TOML.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the configuration file {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    flat: dict[str, Value] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{option}": inner for option, inner in value.items()})
        else:
            flat[name] = value
    return flat


def write_toml(config: RunConfig, path: Path) -> None:
    """Write a configuration so that :func:`read_toml` gives the same run again."""
    tree: dict[str, Any] = {}
    for name, value in config.to_mapping().items():
        if "." in name:
            table, option = name.split(".", 1)
            tree.setdefault(table, {})[option] = value
        else:
            tree[name] = value
    path.write_text(tomli_w.dumps(tree), encoding="utf-8")


def parse_assignment(text: str) -> tuple[str, Value]:
    """Split ``key=value`` as typed after ``--set``; the value is TOML, or else plain text.

    Raises
    ------
    UserError
        There is no ``=``.
    """
    name, equals, raw = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"--set takes key=value, got '{text}'.")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    return name.strip(), value


def _assignments(text: str) -> list[tuple[str, Value]]:
    """Split the text of the key ``set``."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{SET} takes 'key=value key=value', got '{text}': {error}.") from None
    return [parse_assignment(part) for part in parts]


def all_keys() -> dict[str, tuple[Value, str]]:
    """Return every key with its default and its description, strategies' own included."""
    listed: dict[str, tuple[Value, str]] = {}
    for name, item in _keys().items():
        default: Any = AUTO if item.default is None else item.default
        listed[name] = (default, item.metadata["help"])
    from raceme.strategies import STRATEGIES

    for strategy in STRATEGIES:
        for option in fields(STRATEGIES[strategy].parameters_type):
            default = AUTO if option.default is None else option.default
            help_text = option.metadata.get("help", "")
            listed[f"{strategy}.{_kebab(option.name)}"] = (default, help_text)
    return listed


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _keys() -> dict[str, Field[Any]]:
    return {_kebab(item.name): item for item in fields(RunConfig) if item.name != "options"}


def _option_keys() -> list[str]:
    from raceme.strategies import STRATEGIES

    return [f"{name}.{option}" for name in STRATEGIES for option in _defaults(name)]


def _defaults(strategy: str) -> dict[str, Value]:
    """Return the default hyper-parameters of a strategy, by key."""
    from raceme.strategies import STRATEGIES

    parameters = asdict(STRATEGIES[strategy].parameters_type())
    return {_kebab(name): AUTO if value is None else value for name, value in parameters.items()}


def _option(strategy: str, option: str, value: Value) -> Value:
    """Check one hyper-parameter, and convert it to the type of its field."""
    from raceme.strategies import STRATEGIES

    if strategy not in STRATEGIES:
        raise unknown_name("key", f"{strategy}.{option}", [*_keys(), *_option_keys()])
    items = {_kebab(item.name): item for item in fields(STRATEGIES[strategy].parameters_type)}
    if option not in items:
        raise unknown_name("key", f"{strategy}.{option}", [f"{strategy}.{name}" for name in items])
    item = items[option]
    converted = _convert(f"{strategy}.{option}", value, str(item.type))
    _check_range(item, converted, prefix=f"{strategy}.")
    return AUTO if converted is None else converted


def _convert(name: str, value: Value, annotation: str) -> Any:
    """Convert a value to the annotated type of a key."""
    wanted, _, optional = annotation.partition(" | ")
    if optional and value == AUTO:
        return None
    if wanted == "bool":
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif wanted == "str":
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    elif wanted == "int":
        whole = _whole_number(value)
        if whole is not None:
            return whole
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    described = {"bool": "true or false", "int": "a whole number", "float": "a number"}
    raise UserError(f"{name} must be {described.get(wanted, 'text')}, got {value!r}.")


def _whole_number(value: object) -> int | None:
    """Return a value as an exact whole number; None if it is not one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        # Not through float where it need not be: a large seed would lose digits.
        with suppress(ValueError):
            return int(value)
        with suppress(ValueError):  # "1e3"
            value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _check_range(item: Field[Any], value: Any, prefix: str = "") -> None:
    """Raise UserError if a number is outside the range that its key declares."""
    low, above, high = (item.metadata.get(rule) for rule in ("low", "above", "high"))
    name = prefix + _kebab(item.name)
    among = item.metadata.get("among", ())
    if among and value not in among:
        raise unknown_name(f"value of {name}", str(value), among)
    if value is None or isinstance(value, bool | str):
        return
    if low is not None and value < low:
        raise UserError(f"{name} must be at least {low:g}, got {value:g}.")
    if above is not None and value <= above:
        raise UserError(f"{name} must be greater than {above:g}, got {value:g}.")
    if high is not None and value > high:
        raise UserError(f"{name} must be at most {high:g}, got {value:g}.")


def parameters_from(parameters_type: type[Any], values: Mapping[str, Value]) -> Any:
    """Build a strategy's frozen dataclass of hyper-parameters from its keys."""
    types = {_kebab(item.name): item for item in fields(parameters_type)}
    built = {}
    for name, value in values.items():
        item = types[name]
        built[item.name] = _convert(name, value, str(item.type))
    missing = [item.name for item in types.values() if item.default is MISSING]
    if missing:
        raise TypeError(f"{parameters_type.__name__} needs defaults for {missing}.")
    return parameters_type(**built)
