"""A run's configuration: keys from the command line, TOML files and Flower's run config.

:class:`RunConfig` declares the options that every run has; strategies, datasets and partitions
declare their own as dataclasses, which :meth:`RunConfig.read` fills with the values of the run.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from raceme.core.errors import UserError, printable, unknown_name
from raceme.core.files import ReadingError, absolute_text, parse_toml, read_text
from raceme.core.limits import Limits
from raceme.core.options import (
    AUTO,
    SECONDS,
    Key,
    Value,
    check_range,
    convert,
    declared,
    is_path,
    key_of,
    listed,
    names_in,
    option,
    present_names,
    shown_type,
    written,
)
from raceme.core.registry import (
    ATTACKS,
    DATASETS,
    DEVICES,
    DRIFTS,
    FEATURES,
    MODELS,
    PARTITIONERS,
    STRATEGIES,
    Registry,
    files_of,
    is_local,
    source_digest,
)
from raceme.core.training_settings import TrainingOptions

# -----------------------------------------------------------------------------
# Parsing of keys: TOML files, and ``key=value`` after ``--set``.
# -----------------------------------------------------------------------------


FEW_DEVICES = "panicle"
"""Default strategy on real devices, which are usually few: CASA needs ten or more clients."""

CONFIG = "config.toml"
"""The file with the keys of a run, in its folder."""

_TABLES = ".csv"
"""Suffix of files that are datasets."""

SET = "set"
"""The key that contains other keys, like the option ``--set``."""

TRUST = "trust"
"""The key that names a trusted folder or file, from the user alone."""

_trusted = logging.getLogger("raceme.trust")


def read_toml(path: Path, pipe: bool = False) -> dict[str, Value]:
    """Read a configuration file into dotted keys.

    Parameters
    ----------
    pipe : bool
        Whether a pipe is allowed: ``--config <(command)``.

    Raises
    ------
    UserError
        The file is missing or is not TOML.
    """
    flat: dict[str, Value] = {}
    for name, value in read_tree(path, "configuration file", pipe).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": given for inner, given in value.items()})
        else:
            flat[name] = value
    return flat


def keys_to_resume(folder: str | Path | None, typed: Mapping[str, Any]) -> dict[str, Value]:
    """Return the keys of an earlier run that is resumed; none without a folder.

    Parameters
    ----------
    folder : str or Path or None
        Folder of the earlier run.
    typed : Mapping[str, Value]
        Keys of the user, which take precedence.

    Raises
    ------
    UserError
        There is no run in the folder, or it names code that is not trusted.
    """
    if not folder:
        return {}
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise UserError(
            f"There is no run in {folder} to resume: expected the folder of a run, as `raceme run` "
            "names it in its last line."
        )
    keys = read_toml(path)
    check_keys_trusted(path, keys, typed)
    return keys


def read_tree(path: Path, what: str, pipe: bool = False) -> dict[str, Any]:
    """Return the tables of a TOML file; `what` names it in errors.

    Raises
    ------
    UserError
        The file is missing or is not TOML.
    """
    try:
        text = read_text(path, pipe=pipe)
    except ReadingError as error:
        raise UserError(f"Cannot read the {what} {path}: {error}.") from None
    try:
        return parse_toml(text)
    except ReadingError as error:
        raise UserError(f"The {what} {path} is not valid TOML: {error}.") from None


def write_toml(keys: Mapping[str, Value], path: Path) -> None:
    """Write dotted keys in the format of :func:`read_toml`."""
    path.write_text(tomli_w.dumps(as_tables(keys)), encoding="utf-8")


def as_tables(keys: Mapping[str, Value]) -> dict[str, Any]:
    """Return dotted keys as TOML tables.

    A method of a user may be named like a key, e.g. the class ``Model`` with the key ``model.rate``
    beside ``model``: such a key stays dotted, since a name is either a value or a table.
    """
    tree: dict[str, Any] = {}
    for name, value in keys.items():
        table, _, inner = name.rpartition(".")
        if table and table not in keys:
            tree.setdefault(table, {})[inner] = value
        else:
            tree[name] = value
    return tree


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
        value = parse_toml(f"value = {raw.strip()}")["value"]
    except ReadingError:
        value = raw.strip()
    return name.strip(), value


def expanded(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with the content of the key ``set`` expanded, which takes precedence.

    A dataset ``FILE.csv`` is the dataset ``table`` with this file.

    Raises
    ------
    UserError
        The text cannot be read.
    """
    given = dict(keys)
    given.update(assignments(str(given.pop(SET, ""))))
    if str(given.get("dataset", "")).endswith(_TABLES):
        given |= {"dataset": "table", "data-file": given["dataset"]}
    return given


def assignments(text: str) -> list[tuple[str, Value]]:
    """Split the text of the key ``set``."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{SET} takes 'key=value key=value', got '{text}': {error}.") from None
    return [parse_assignment(part) for part in parts]


# -----------------------------------------------------------------------------
# A run's configuration: keys from the command line, TOML files and Flower's run config.
# -----------------------------------------------------------------------------


_MAX_UPDATES = 500
"""Default of max-updates without max-rounds."""

_Options = TypeVar("_Options")
_Reader = tuple[Registry, str]
"""A reader of options: a registry and a name in it."""


@dataclass(frozen=True)
class RunConfig(TrainingOptions, Limits):
    """Configuration of a run: every key with its value.

    The attribute ``data_root`` is the key ``data-root`` on the command line and in files. None
    means ``"auto"``: the dataset's default, filled in by :func:`raceme.runs.experiment.resolve`.
    """

    strategy: str = option("casa", "method; see `raceme list`", names=STRATEGIES)
    dataset: str = option("digits", "dataset; see `raceme list`", names=DATASETS)
    data_root: str = option(
        "", "folder with the files of the datasets", path=True, affects_results=False
    )
    download: bool = option(False, "fetch missing files into data-root", affects_results=False)
    model: str | None = option(None, "network; see `raceme list`, or module:function")
    clients: int | None = option(
        None, "number of clients (auto: the dataset's default)", low=1, high=10**6
    )
    partition: str = option(
        "label-groups",
        "assignment of samples to clients; see `raceme list`",
        names=PARTITIONERS,
        unless=("dataset", "has_clients"),
    )
    test_fraction: float = option(
        0.2, "share of a client's samples held out for testing", above=0, below=1
    )
    validation_fraction: float = option(
        0.0, "share of a client's training samples to test on instead (0: off)", low=0, below=1
    )
    validation_share: float | None = option(
        None,
        "share of training samples to compare models on (auto: 0.2 if the run needs it)",
        low=0,
        below=1,
    )
    drift: str = option("none", "change of the clients' data; see `raceme list`", names=DRIFTS)
    features: str = option(
        "", "features of your own: module:Name, separated by commas", names=FEATURES, several=True
    )
    attack: str = option(
        "none",
        "attack by simulated clients, e.g. sign-flip (docs/protection.md), or module:Name",
        names=ATTACKS,
    )
    proxy: str = option(
        "",
        "samples on the server: their number per distribution, a share of the test samples (below "
        "1), or a folder with an .npz file per cluster (empty: none)",
    )
    pretrain: int = option(
        0, "samples per distribution on which the server pre-trains its first model (0: off)", low=0
    )
    pretrain_epochs: int = option(5, "epochs of the pre-training", low=1)
    batch_norm: str = option(
        "shared",
        "batch normalisation: averaged, or kept on each client (local: FedBN)",
        among=("shared", "local"),
    )
    devices: str = option(
        "slow30x5",
        "device profile (see `raceme list`), TOML file, or trace:FOLDER of a recorded run",
    )
    max_updates: int | None = option(
        None,
        f"stop after this number of client updates (0: no limit; auto: {_MAX_UPDATES}, but none "
        "with max-rounds and in `raceme serve`)",
        low=0,
    )
    task_timeout: float = option(
        3600.0, "time after which an unanswered task counts as lost", unit=SECONDS, above=0
    )
    workers: str = option(
        "auto",
        "worker processes (auto: one per core, 0: none), or ray, ray://HEAD:PORT; same results",
        affects_results=False,
    )
    device: str = option("cpu", "processor for training", among=("cpu", "cuda"))
    precision: str = option(
        "float32",
        "how device=cuda rounds the inputs of products: not, to 10 bits, or all to bfloat16",
        among=("float32", "tf32", "bf16"),
    )
    vectorised: bool = option(
        False, "train clients in stacked batches on the CPU too (always on cuda)"
    )
    seed: int = option(0, "random seed", low=0)
    checkpoint_every: int = option(
        0, "updates between two checkpoints (0: off)", low=0, affects_results=False
    )
    checkpoint_seconds: float | None = option(
        None,
        "wall-clock time between two checkpoints (0: off; auto: 2 % of the time on real devices, "
        "60 s in comparisons, off in a run on virtual time)",
        unit=SECONDS,
        low=0,
        affects_results=False,
    )
    device_keys: str = option(
        "", "file that binds device ids to keys, on the server (empty: ids are trusted)", path=True
    )
    labels: str = option("", "file with labels of clients: a TOML table for each", path=True)
    where: str = option(
        "", "only clients with these labels take part: room=kitchen|garden or id=attic (empty: all)"
    )
    track: str = option(
        "", "trackers, separated by commas: tensorboard, mlflow, wandb", affects_results=False
    )
    client_models: bool = option(
        False, "also write the model of each client at the end", affects_results=False
    )
    resume: str = option("", "folder of a run to resume from its last checkpoint", path=True)
    trust: str = option(
        "",
        "folder or file whose names of own code (module:name) may be imported, e.g. that of resume",
        path=True,
        affects_results=False,
    )
    out: str = option(
        "", "folder for the results (empty: runs/<date>-<time>-<strategy>-<dataset>)", path=True
    )
    options: Mapping[str, Value | None] = field(default_factory=dict, hash=False)
    """Non-default options of features and of the chosen strategy, dataset and partition, by key:
    ``{"casa.gamma": 0.2, "groups": "0.5,0.5"}``, for :meth:`read`."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            STRATEGIES.check(self.strategy)
        for name, item in _own_keys().items():
            check_range(name, getattr(self, item.name), item)
        if self.momentum != TrainingOptions.momentum and self.optimizer != "momentum":
            raise UserError(f"momentum is read by optimizer=momentum, not by '{self.optimizer}'.")
        if self.local_steps and self.local_epochs != 1:
            raise UserError("local-steps and local-epochs exclude each other: give one of them.")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], lenient: bool = False) -> RunConfig:
        """Build a configuration from dotted keys.

        Parameters
        ----------
        mapping : Mapping[str, Value]
            E.g. ``{"max-updates": 100, "casa.gamma": 0.2}``. Absent keys keep their defaults. The
            key ``set`` has further ones as text, ``"casa.gamma=0.2 seed=1"``, which take
            precedence: Flower accepts only keys listed in ``pyproject.toml``.
        lenient : bool
            Whether to ignore unread keys and all of strategies: for a device, whose server has
            checked them.

        Raises
        ------
        UserError
            The strategy is unknown, a non-default key does not exist or is not read, or a value has
            the wrong type or range.
        """
        general = general_keys()
        given = present_names(expanded(mapping), general)
        own = _own_keys()
        values = {
            own[name].name: convert(name, value, own[name])
            for name, value in given.items()
            if name in own
        }
        others = {name: value for name, value in given.items() if name not in own}
        if lenient and values.get("strategy") not in STRATEGIES:
            # It belongs to a package that only the server has installed.
            values.pop("strategy", None)
        return cls(**values)._with_options(others, lenient)

    def to_mapping(self) -> dict[str, Value]:
        """Return all keys that this run reads as dotted names, defaults included.

        The inverse of :meth:`from_mapping`.

        Raises
        ------
        UserError
            There is no such strategy, dataset or partition.
        """
        flat = {
            name: written(self.value(name))
            for name, item in general_keys().items()
            if not self._is_unread(item)
        }
        for registry, chosen in self._readers():
            for name, item in _declared_by(registry, chosen).items():
                value: Any = self.options.get(name, item.default)
                check_range(name, value, item)
                flat[name] = written(value)
        return flat

    def read(self, options_type: type[_Options], prefix: str = "") -> _Options:
        """Return the options of one reader, with the values of this run.

        Parameters
        ----------
        options_type : type
            The frozen dataclass that the reader declares.
        prefix : str
            Prefix of its keys, for a strategy its name and a dot.

        Raises
        ------
        UserError
            A value is out of its range.
        """
        kind: Any = options_type
        options: _Options = _read(self, kind, prefix)
        return options

    def value(self, key: str) -> Any:
        """Return the value of a key that every run has."""
        item = general_keys()[key]
        if key in _own_keys():
            return getattr(self, item.name)
        return self.options.get(key, item.default)

    @property
    def feature_names(self) -> list[str]:
        """Names of the features in the order of their chain, the user's own last."""
        return [*_package_features(), *names_in(_own_keys()["features"], self.features)]

    def parameters(self) -> Any:
        """Return the hyper-parameters of the chosen strategy: an instance of its dataclass."""
        parameters_type = STRATEGIES.options_type(self.strategy)
        assert parameters_type is not None, "every strategy declares its parameters"
        return self.read(parameters_type, STRATEGIES.prefix(self.strategy))

    @property
    def short_name(self) -> str:
        """Method and dataset, as in the name of the run's folder."""
        return f"{STRATEGIES.short(self.strategy)}-{DATASETS.short(self.dataset)}"

    @property
    def num_clients(self) -> int:
        """Number of clients of a resolved configuration."""
        assert self.clients is not None, "raceme.datasets.with_clients fills it in"
        return self.clients

    @property
    def planned_updates(self) -> int:
        """Client updates of the run; with max-rounds an estimate.

        Without any limit it is the default number of updates, since some schedules depend on it.
        For a method in rounds, ``participants(clients)`` of its parameters gives the number of
        clients per round; by default it is all clients.
        """
        if self.max_updates:
            return self.max_updates
        if not self.max_rounds:
            return _MAX_UPDATES
        participants = getattr(self.parameters(), "participants", int)
        return self.max_rounds * int(participants(self.num_clients))

    @property
    def expected_updates(self) -> int:
        """The planned updates; 0 if time or computation alone limits the run."""
        return self.planned_updates if self.max_updates != 0 or self.max_rounds else 0

    def with_values(self, **values: Any) -> RunConfig:
        """Return a copy with other values, by attribute name.

        Includes options of the copy's dataset or partition.
        """
        attributes = {item.name for item in fields(self)}
        general = {name: value for name, value in values.items() if name in attributes}
        others = {key_of(name): values[name] for name in values if name not in attributes}
        return replace(self, **general)._with_options(others)

    def narrowed(self, *attributes: str) -> RunConfig:
        """Return a configuration with only some attributes; the rest is default.

        Useful as a cache key.

        Parameters
        ----------
        *attributes : str
            General attributes. ``"dataset"`` and ``"partition"`` include their options.
        """
        return _narrowed(self, attributes)

    def with_absolute_paths(self) -> RunConfig:
        """Return a copy whose paths are absolute, so that it means the same in any folder."""
        paths = [item.name for item in general_keys().values() if is_path(item)]
        readable = self._readable(prefixed=False)
        options = {
            name: absolute_text(value) if name in readable and is_path(readable[name]) else value
            for name, value in self.options.items()
        }
        values: dict[str, Any] = {name: absolute_text(getattr(self, name)) for name in paths}
        return replace(self, options=options, **values)

    def check_options(self) -> None:
        """Check that every name exists and every given option is read by the run.

        Raises
        ------
        UserError
            A name is unknown.
        """
        check_names({name: self.value(name) for name in general_keys()})
        for name, item in general_keys().items():
            if self.value(name) != item.default and self._is_unread(item):
                other, _ = item.metadata["unless"]
                raise UserError(
                    f"{name} is not read with {other} {getattr(self, other)}: leave it out."
                )
        for name, value in self.options.items():
            if name not in self._readable("." in name):
                self._refuse(name, value)

    def _with_options(self, given: Mapping[str, Any], lenient: bool = False) -> RunConfig:
        """Return a copy with given options of readers."""
        if not given:
            return self
        features = [name for name in given if name in general_keys()]
        if features and len(features) < len(given):
            # Their values may name objects with options of their own.
            first = self._with_options({name: given[name] for name in features})
            rest = {name: value for name, value in given.items() if name not in features}
            return first._with_options(rest, lenient)
        options = dict(self.options)
        readable = {
            prefixed: self._readable(prefixed, lenient)
            for prefixed in {"." in name for name in given}
        }
        for part in readable.values():
            given = present_names(given, part)
        for name, value in given.items():
            item = readable.get("." in name, {}).get(name)
            if item is not None:
                options[name] = convert(name, value, item)
                # Explicit defaults equal absent keys.
                if options[name] == item.default:
                    del options[name]
            elif not lenient:
                self._refuse(name, value)
        return replace(self, options=options)

    def _readers(self, attributes: tuple[str, ...] = ()) -> Iterator[_Reader]:
        """Return the readers of options in this run: registry and name."""
        for key, item in general_keys().items():
            registry = item.metadata["names"]
            wanted = not attributes or item.name in attributes
            if registry is not None and wanted and not self._is_unread(item):
                yield from ((registry, name) for name in names_in(item, self.value(key)))
        if not attributes:
            yield from ((FEATURES, name) for name in _package_features())

    def _is_unread(self, item: Field[Any]) -> bool:
        """Return whether a general option has no effect, given another choice of this run."""
        if item.metadata["unless"] is None:
            return False
        other, attribute = item.metadata["unless"]
        registry: Registry = RunConfig.__dataclass_fields__[other].metadata["names"]
        return bool(getattr(registry[getattr(self, other)], attribute, False))

    def _readable(self, prefixed: bool, lenient: bool = False) -> dict[str, Field[Any]]:
        """Return the options that are read in this run, by key: those with a prefix, or others.

        With `lenient`, the strategy's options are left out.
        """
        readable: dict[str, Field[Any]] = {}
        for registry, chosen in self._readers():
            is_left_out = lenient and registry is STRATEGIES
            if not is_left_out and bool(registry.prefix(chosen)) == prefixed:
                readable |= _declared_by(registry, chosen)
        return readable

    def _refuse(self, name: str, value: Any) -> None:
        """Raise UserError for a key that this run does not read, unless it has its default."""
        read = tuple(self._readers())
        key, converted = check_key(name, value, read)
        if written(converted) == key.default:
            return
        chosen = {registry.kind: of for registry, of in read}
        having = [
            f"{kind} {chosen[kind]}" if kind in chosen else f"no {kind} (dataset {self.dataset})"
            for kind in key.readers
        ]
        readers = [f"{kind} {listed(names)}" for kind, names in key.readers.items()]
        raise UserError(
            f"{name} is read by {' and by '.join(readers)}; this run has {' and '.join(having)}."
        )


def with_prefixes(keys: Mapping[str, Any], strategies: Iterable[str]) -> dict[str, Any]:
    """Prefix hyper-parameters with the method's name: ``gamma`` becomes ``casa.gamma``.

    A key of several methods is set for each of them. General keys, keys of dataset and partition,
    and unknown ones are unchanged.

    Raises
    ------
    UserError
        There is no such strategy, dataset or partition, or a general key has a wrong value.
    """
    general = general_keys()
    run = RunConfig.from_mapping({name: keys[name] for name in keys if name in general})
    taken = general.keys() | run._readable(prefixed=False).keys()
    prefixes = {STRATEGIES.prefix(name): _declared_by(STRATEGIES, name) for name in strategies}
    found: dict[str, Any] = {}
    for name, value in keys.items():
        owners = [] if name in taken else [own for own in prefixes if own + name in prefixes[own]]
        found |= {own + name: value for own in owners or [""]}
    return found


def check_names(keys: Mapping[str, Any]) -> None:
    """Check the names in some keys' values, without importing.

    Raises
    ------
    UserError
        There is no such strategy, dataset, model etc., or a name is ambiguous.
    """
    keys = expanded(keys)
    for key in general_keys():
        registry, value = registry_of(key), keys.get(key)
        is_file = key == "devices" and str(value).endswith(".toml")
        if registry is not None and value not in (None, AUTO) and not is_file:
            for name in names_in(general_keys()[key], value):
                registry.check(name)


def code_of(keys: Mapping[str, Any]) -> str:
    """Return a digest of the source of the users' modules that a run's keys name; empty if none.

    See :func:`raceme.core.registry.source_digest`.
    """
    modules: list[str] = []
    for key in general_keys():
        registry, value = registry_of(key), str(keys.get(key, ""))
        if registry is not None and not value.startswith("trace:"):
            modules += map(registry.module_of, names_in(general_keys()[key], value))
    return source_digest(filter(None, modules))


# -----------------------------------------------------------------------------
# Trust: a name in a file is imported only if the user names it too, or trusts the file.
# -----------------------------------------------------------------------------


def imported_by(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in some keys that a run would import from outside Raceme, by key.

    Names from installed packages are left out: to install a package is to trust it.
    """
    given = present_names(expanded(keys), general_keys())
    found = {}
    for key in general_keys():
        registry, name = registry_of(key), str(given.get(key, ""))
        is_file = key == "devices" and (name.endswith(".toml") or name.startswith("trace:"))
        # Definitions of scripts and notebooks are in this process, or nowhere.
        if registry is not None and ":" in name and not is_file and not is_local(name):
            found[key] = name
    return found


def check_keys_trusted(
    path: Path, keys: Mapping[str, Any], typed: Mapping[str, Any], *, again: bool = True
) -> None:
    """Check that the user names or trusts the code that the keys in a file name.

    Parameters
    ----------
    path : Path
        The file.
    keys : Mapping[str, Value]
        Its keys.
    typed : Mapping[str, Value]
        Keys of the user: those of the same name replace the file's, and `TRUST` may name it.
    again : bool
        Whether the user can replace them.

    Raises
    ------
    UserError
        A name is neither named nor trusted by the user, or the file sets `TRUST`.
    """
    if expanded(keys).get(TRUST):
        raise UserError(
            f"{path} sets {TRUST}, which only the command line may set: remove it from the file."
        )
    given = expanded(typed)
    named = {key: name for key, name in imported_by(keys).items() if key not in given}
    options = " ".join(f"--{key} {name}" for key, name in named.items())
    otherwise = f", or name it again: {options}" if again else ""
    # For a run, trust applies to its folder.
    folder = path.parent if path.name == CONFIG else path
    check_trusted(path, named.items(), str(given.get(TRUST, "")), folder, otherwise)


def check_trusted(
    path: Path,
    named: Iterable[tuple[str, str]],
    trust: str,
    folder: Path | None = None,
    otherwise: str = "",
) -> None:
    """Check that the code named in a file may be imported, and log its names.

    Nothing is imported.

    Parameters
    ----------
    path : Path
        The file: a run's configuration or checkpoint, a suite, or a file of keys.
    named : Iterable[tuple[str, str]]
        What it names, e.g. ``strategy``, and the name, ``module:attribute``.
    trust : str
        The trusted folder or file; empty for none.
    folder : Path, optional
        What to trust as a remedy; by default the file.
    otherwise : str
        Another remedy.

    Raises
    ------
    UserError
        The file is neither trusted nor in a trusted folder.
    """
    each = []
    for what, name in named:
        module = name.partition(":")[0]
        files = " and ".join(files_of(module)) or f"no module {module} is found here"
        each.append(f"{what} {name} ({files})")
    if not each:
        return
    code = printable(", ".join(each), _LONGEST_LIST)
    if trust and path.resolve().is_relative_to(Path(trust).expanduser().resolve()):
        _trusted.warning("Importing what %s names: %s", path, code)
        return
    raise UserError(
        f"{path} names code that is not Raceme's: {code}. Nothing was imported. If you trust it, "
        f"add --trust {path if folder is None else folder}{printable(otherwise, _LONGEST_LIST)}."
    )


_LONGEST_LIST = 1000
"""Characters of the names in an error."""


_OWN_NAMES = {"model": MODELS, "devices": DEVICES}
"""Keys whose values are either names or something else."""


def registry_of(key: str) -> Registry | None:
    """Return the registry of a key's names; None if it takes none."""
    if key in _OWN_NAMES:
        return _OWN_NAMES[key]
    item = general_keys().get(key)
    return item.metadata["names"] if item else None


@cache
def _own_keys() -> dict[str, Field[Any]]:
    """Return the attributes of a configuration, by key."""
    first = RunConfig.__annotations__
    ordered = sorted(fields(RunConfig), key=lambda item: item.name not in first)
    return {key_of(item.name): item for item in ordered if item.name != "options"}


@cache
def general_keys() -> dict[str, Field[Any]]:
    """Return the options that every run has, by key: its own, and those of the features."""
    keys = dict(_own_keys())
    for name in _package_features():
        keys |= _declared_by(FEATURES, name)
    return keys


def _package_features() -> list[str]:
    """Return the features of every run, in the order of their chain."""
    return list(filter(FEATURES.is_own, FEATURES))


def all_keys() -> dict[str, Key]:
    """Return every key: of all runs, and of every strategy, dataset and partition.

    Raises
    ------
    UserError
        Two readers declare the same key differently.
    """
    return _keys_of(_all_readers())


def keys_of(keys: Mapping[str, Any]) -> dict[str, Key]:
    """Return the declarations of a run's keys, as far as they belong to Raceme's own objects.

    Keys of users' objects are left out: reading a configuration imports no code that it names.
    """
    known = _keys_of(())
    for name, item in general_keys().items():
        registry = item.metadata["names"]
        for chosen in names_in(item, keys.get(name, item.default)) if registry else ():
            if registry.is_own(chosen):
                # A package that the module imports may be missing on this machine.
                with suppress(UserError):
                    known |= _keys_of([(registry, chosen)])
    return known


def own_keys(config: RunConfig) -> dict[str, Key]:
    """Return the declarations of the keys that a run's users and installed packages declare."""
    found: dict[str, Key] = {}
    for registry, chosen in config._readers():
        if not registry.is_own(chosen):
            found |= {name: _key(item) for name, item in _declared_by(registry, chosen).items()}
    return found


def check_key(name: str, value: Any, further: Iterable[_Reader] = ()) -> tuple[Key, Any]:
    """Return the declaration of a key of any reader, and the converted value.

    Parameters
    ----------
    name : str
        The key as typed, dotted where it belongs to a reader: ``casa.gamma``.
    value : Any
        Value as written.
    further : Iterable[tuple[Registry, str]]
        Unlisted readers: a strategy given as ``module:Class``.

    Raises
    ------
    UserError
        There is no such key, or the value is of another type or out of the range.
    """
    if name in general_keys():
        # All readers of a key declare it alike, so the others need not be imported.
        return _key(general_keys()[name]), convert(name, value, general_keys()[name])
    # Reading a strategy's keys imports the strategy, so as few as possible are read.
    strategy, dot, _ = name.partition(".")
    further = tuple(reader for reader in further if not _is_package_feature(*reader))
    readers = dict.fromkeys([*_all_readers(), *further])
    known = _keys_of(
        (registry, of)
        for registry, of in readers
        if registry.prefix(of) == (f"{strategy}." if dot else "")
    )
    (name,) = present_names({name: value}, {key: about.item for key, about in known.items()})
    if name not in known:
        own = [key for key in known if key.startswith(f"{strategy}.")]
        valid = own or (_keys_of(readers) if dot else known | _keys_of(further))
        raise unknown_name("key", name, valid, "raceme list --keys")
    return known[name], convert(name, value, known[name].item)


def _all_readers() -> list[_Reader]:
    """Return all readers of options: registry and name."""
    registries = [item.metadata["names"] for item in general_keys().values()]
    readers = ((registry, of) for registry in registries if registry is not None for of in registry)
    return [reader for reader in readers if not _is_package_feature(*reader)]


def _is_package_feature(registry: Registry, name: str) -> bool:
    """Return whether a reader's options are among those of every run."""
    return registry is FEATURES and registry.is_own(name)


def _keys_of(readers: Iterable[_Reader]) -> dict[str, Key]:
    """Return the keys of all runs, and of some that declare options."""
    known = {name: _key(item) for name, item in general_keys().items()}
    for registry, of in readers:
        for name, item in _declared_by(registry, of).items():
            before = known.get(name)
            if before is not None and not _same(before.item, item):
                raise UserError(
                    f"{registry.kind.capitalize()} '{of}' declares {name} differently from "
                    "others: give its option another name, or the default, range and meaning that "
                    "the others have."
                )
            names = {} if before is None else dict(before.readers)
            names[registry.kind] = (*names.get(registry.kind, ()), of)
            known[name] = _key(item, names)
    return known


def _declared_by(registry: Registry, name: str) -> dict[str, Field[Any]]:
    """Return the options that a registered object reads, by key."""
    options_type = registry.options_type(name)
    return {} if options_type is None else declared(options_type, registry.prefix(name))


# Cached: every client of a fleet asks for the same narrowed configuration and options.
@lru_cache(maxsize=256)
def _narrowed(config: RunConfig, attributes: tuple[str, ...]) -> RunConfig:
    part = RunConfig(**{name: getattr(config, name) for name in attributes})
    readers = part._readers(attributes)
    names = {name for registry, chosen in readers for name in _declared_by(registry, chosen)}
    return replace(part, options={k: v for k, v in config.options.items() if k in names})


@lru_cache(maxsize=256)
def _read(config: RunConfig, options_type: type[Any], prefix: str) -> Any:
    values = {}
    for name, item in declared(options_type, prefix).items():
        if name in config.options:
            values[item.name] = config.options[name]
            check_range(name, values[item.name], item)
    try:
        return options_type(**values)
    except UserError:
        raise
    # A plug-in's dataclass may raise anything.
    except Exception as error:
        where = f"{options_type.__module__}.{options_type.__qualname__}"
        raise UserError(
            f"{where} cannot be built from these options: {type(error).__name__}: {error}."
        ) from error


def _key(item: Field[Any], readers: Mapping[str, tuple[str, ...]] | None = None) -> Key:
    about = item.metadata
    unit = about.get("unit", "")
    default: Any = item.default
    return Key(written(default), about.get("help", ""), shown_type(item), unit, readers or {}, item)


def _same(one: Field[Any], other: Field[Any]) -> bool:
    """Return whether two readers of a key declare the same option."""
    return (one.default, one.type, one.metadata) == (other.default, other.type, other.metadata)
