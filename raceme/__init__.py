"""Raceme: asynchronous, clustered federated learning on Flower.

The public functions are `run`, `compare`, `reproduce`, `simulate`, `load` and `open`. Everything
else is private, except the names in ``docs/extending.md`` for users' methods and data.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from raceme.core.strategy import Method
    from raceme.datasets.source import ClientData
    from raceme.notebook import OpenComparison, OpenRun, OpenSimulation

__all__ = ["compare", "load", "open", "reproduce", "run", "simulate"]
__version__ = "0.2.0"

Data = Mapping[Any, Any] | Iterable[Any]
"""The samples of each client; see :func:`run`."""

_TURN = RLock()
"""Lock of a run or a comparison. Runs of other threads would draw from the same process-wide
generators, and could start worker processes while the user's script is hidden."""

# Imports are lazy, since most importers of this package call none of these functions.


def run(
    strategy: str | type[Method] | None = None,
    *,
    data: Data | None = None,
    model: str | Callable[..., Any] | None = None,
    **settings: Any,
) -> OpenRun:
    """Run a method on virtual time, as `raceme run` does, and open its results.

    Ctrl-C, or a notebook's stop button, ends the run early and keeps its results so far; a run that
    ends early by itself warns. Runs of several threads take turns, since torch has one random
    generator per process.

    Parameters
    ----------
    strategy : str or type[Method], optional
        A name of `raceme list`, ``module:Class``, or such a class; by default CASA.
    data : Mapping or Iterable, optional
        Each client's samples, in order or by name, instead of a dataset: ``(x, y)`` or
        ``(x_train, y_train, x_test, y_test)``, arrays or tensors; a torch Dataset of pairs, or two,
        the second for testing; or a mapping with the names of an .npz file: x, y, heldout, group,
        num_classes, unit. Inputs have shape (samples, ...) and are used as they are, bytes divided
        by 255.
    model : str or Callable, optional
        A name of `raceme list`, ``module:function``, or a function that returns a
        ``torch.nn.Module``. It is given ``input_shape`` and ``num_classes`` if it takes arguments.
    **settings
        Keys of a run, and hyper-parameters of the method: ``max_updates=100, gamma=0.2``. With
        ``resume=FOLDER``, all others are those of the earlier run; code of others that it names,
        ``module:Class``, is imported if it is named again, or with ``trust=FOLDER``.

    Returns
    -------
    OpenRun
        The finished run; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        There is no such name or key, or the run is impossible; raised before any work starts.
    """
    from raceme.core.config import RunConfig, keys_to_resume, with_prefixes
    from raceme.core.registry import STRATEGIES
    from raceme.core.signals import StopRequest
    from raceme.notebook import opened
    from raceme.reporting.console import RunProgress
    from raceme.runs.experiment import resolve, simulate

    typed = _keys(settings, data, model)
    if strategy is not None:
        typed["strategy"] = STRATEGIES.name_of(strategy)
    keys = {"strategy": "casa"} | keys_to_resume(settings.get("resume"), typed) | typed
    keys = with_prefixes(keys, [str(keys["strategy"])])
    with _TURN, _flower_silenced():
        config = resolve(RunConfig.from_mapping(keys))
        progress = RunProgress(config.expected_updates, console=_console())
        with StopRequest(signal.SIGINT) as stop, progress:
            return opened(simulate(config, progress.observe, stop=stop))


@contextmanager
def _flower_silenced() -> Iterator[None]:
    """Keep Flower's lines about every round off a notebook, as the commands do."""
    # Flower configures its logger on import.
    import flwr.serverapp  # noqa: F401

    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def compare(
    strategies: str | type[Method] | Iterable[str | type[Method]],
    *,
    data: Data | None = None,
    model: str | Callable[..., Any] | None = None,
    seeds: Iterable[int] = (0,),
    sweep: Mapping[str, Iterable[Any]] | None = None,
    budget: str = "",
    out: str | Path | None = None,
    processes: int = 0,
    formats: str | Iterable[str] = (),
    **settings: Any,
) -> OpenComparison:
    """Run several methods on the same clients, devices and seeds, as `raceme compare` does.

    Ctrl-C, or a notebook's stop button, ends it early and keeps the finished runs. Calls of several
    threads take turns.

    Parameters
    ----------
    strategies : Iterable[str or type[Method]]
        Names of `raceme list`, ``module:Class``, or classes; or a single one.
    data, model : optional
        See :func:`run`.
    seeds : Iterable[int]
        Every method runs once per seed.
    sweep : Mapping[str, Iterable], optional
        Values of keys to try with the first seed, ``{"lr": [0.01, 0.1]}``, for each method that has
        the key. The best ones on held-out training samples run with all seeds.
    budget : str
        The limit of every run: ``"time=20s"``, ``"updates=500"`` or ``"compute=900s"``, the time
        at work of all clients.
    out : str or Path, optional
        Folder for the results; finished runs in it are kept.
    processes : int
        Runs at a time; 0: one per core.
    formats : str or Iterable[str]
        Additional formats of plots and tables: ``"pdf"``, ``"svg"``, ``"tex"``.
    **settings
        Keys of a run for all methods, and hyper-parameters, for each method that has them;
        ``**{"casa.gamma": 0.2}`` is for one method.

    Returns
    -------
    OpenComparison
        The finished comparison; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        There is no such name or key, or a run is impossible; raised before any work starts.
    """
    from dataclasses import replace

    from raceme.core.config import with_prefixes
    from raceme.core.registry import STRATEGIES
    from raceme.experiments.compare import checked_formats, prepare
    from raceme.experiments.suites import of_names
    from raceme.notebook import OpenComparison, compared
    from raceme.records.folder import dated_folder

    written_as = checked_formats(formats)
    if isinstance(strategies, str) or not isinstance(strategies, Iterable):
        strategies = [strategies]
    names = [STRATEGIES.name_of(strategy) for strategy in strategies]
    keys = with_prefixes(_keys(settings, data, model), names)
    tried = {key: [_plain(value) for value in values] for key, values in _items(sweep)}
    suite = replace(of_names(names, keys), seeds=_seeds(seeds)).with_sweep(tried)
    suite = suite.with_budget(budget) if budget else suite
    with _TURN:
        folder = dated_folder(f"compare-{suite.dataset}") if out is None else _path(out)
        plan = prepare(suite, folder)
        compared(plan, processes, _console(), written_as)
        return OpenComparison(plan.out)


def reproduce(
    name: str,
    *,
    dataset: str | None = None,
    only: str | Iterable[str] = (),
    methods: str | Iterable[str] = (),
    scale: float = 1.0,
    seeds: Iterable[int] | None = None,
    out: str | Path | None = None,
    processes: int = 0,
    formats: str | Iterable[str] = (),
    **settings: Any,
) -> dict[str, OpenComparison]:
    """Run a paper's experiment, as `raceme reproduce` does, beside the published numbers.

    Parameters
    ----------
    name : str
        Name of the experiment, as `raceme reproduce` lists them: ``"casa-table1"``.
    dataset : str, optional
        The dataset or part; required for experiments with several.
    only, methods : str or Iterable[str]
        Its parts and methods to run; by default all.
    scale : float
        Share of the experiment's updates per run, above 0 and at most 1.
    seeds : Iterable[int], optional
        Every method runs once per seed; by default the experiment's seeds.
    out, processes, formats
        See :func:`compare`.
    **settings
        Keys of a run that replace the paper's.

    Returns
    -------
    dict[str, OpenComparison]
        A finished comparison per part, by name.

    Raises
    ------
    UserError
        There is no such name or key, or a run is impossible; raised before any work starts.
    """
    from dataclasses import replace

    from raceme.experiments.compare import checked_formats, prepare
    from raceme.experiments.suites import out_of, reproductions
    from raceme.notebook import OpenComparison, compared

    written_as, folder = checked_formats(formats), None if out is None else _path(out)
    suites = reproductions(name, dataset, only, methods, _keys(settings), scale)
    found: dict[str, OpenComparison] = {}
    with _TURN:
        plans = {
            variant: prepare(
                suite if seeds is None else replace(suite, seeds=_seeds(seeds)),
                out_of(variant, folder, scale, len(suites)),
            )
            for variant, suite in suites.items()
        }
        for variant, plan in plans.items():
            finished = compared(plan, processes, _console(), written_as)
            found[variant] = OpenComparison(plan.out)
            if not finished:
                break
    return found


def simulate(
    folder: str | Path = ".",
    *,
    strategy: str | type[Method] | None = None,
    clients: int = 10,
    devices: str = "slow30x5",
    run_config: Mapping[str, Any] | None = None,
    node_config: Mapping[str, Any] | None = None,
    workers: int | str = "auto",
    seed: int = 0,
    out: str | Path | None = None,
    examples: int | None = None,
    evaluation_share: float | None = None,
    max_time: float = math.inf,
    **parameters: Any,
) -> OpenSimulation:
    """Run any Flower app on virtual time, as `raceme simulate` does.

    Parameters
    ----------
    folder : str or Path
        Folder of the app, with its ``pyproject.toml``.
    strategy : str or type[Method], optional
        Method of Raceme that replaces the app's strategy.
    clients : int
        Number of simulated SuperNodes.
    devices : str
        Device profile: a name, a TOML file, ``module:function`` or ``trace:FOLDER``.
    run_config, node_config : Mapping, optional
        Overrides of the app's run config, and additions to every node's config.
    workers : int or str
        Number of worker processes; 0: none, ``"auto"``: one per core.
    seed : int
        Seed of devices, losses and the app's unseeded random numbers.
    out : str or Path, optional
        Folder for the results; a new one in ``runs`` if left out.
    examples : int, optional
        Training examples of each client, for profiles with times per sample; by default from
        replies.
    evaluation_share : float, optional
        Time of an evaluation as a share of a training task's; by default it takes none.
    max_time : float
        Limit of virtual time, in seconds.
    **parameters
        Hyper-parameters of `strategy`: ``gamma=0.2``.

    Returns
    -------
    OpenSimulation
        The results; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        The app cannot be read or started, or a name or key does not exist.
    """
    import json

    from raceme.core.config import with_prefixes
    from raceme.core.errors import UserError
    from raceme.core.registry import STRATEGIES
    from raceme.notebook import simulated
    from raceme.simulation.apps import Settings

    name = None if strategy is None else STRATEGIES.name_of(strategy)
    keys = _keys(parameters)

    def pairs(config: Mapping[str, Any] | None) -> tuple[str, ...]:
        try:
            return tuple(f"{key}={json.dumps(value)}" for key, value in (config or {}).items())
        except (AttributeError, TypeError):
            raise UserError(
                "run_config and node_config are mappings of texts, numbers and truth values, got "
                f"{config!r}."
            ) from None

    with _TURN:
        return simulated(
            Settings(
                folder=_path(folder),
                clients=_plain(clients),
                devices=_plain(devices),
                run_config=pairs(run_config),
                strategy=name,
                parameters=keys if name is None else with_prefixes(keys, [name]),
                workers=_plain(workers),
                seed=_plain(seed),
                out=None if out is None else _path(out),
                max_time=_plain(max_time),
                examples=_plain(examples),
                evaluation_share=_plain(evaluation_share),
                node_config=pairs(node_config),
            )
        )


def load(dataset: str, **settings: Any) -> list[ClientData]:
    """Load the clients' data of a run.

    Parameters
    ----------
    dataset : str
        A name of `raceme list`, or ``module:function``.
    **settings
        Keys of a run: ``clients=8, partition="dirichlet"``.

    Returns
    -------
    list[ClientData]
        Each client's training and test samples, and its true group.

    Raises
    ------
    UserError
        There is no such name or key, or the data are missing or cannot be partitioned.
    """
    from raceme import datasets
    from raceme.core.config import RunConfig

    config = RunConfig.from_mapping(_keys({**settings, "dataset": dataset}))
    config.check_options()
    return datasets.all_clients(datasets.with_fitting_groups(config))


def open(folder: str | Path) -> OpenRun | OpenComparison:
    """Open the results of `raceme run`, `compare`, `reproduce` or `serve`, e.g. in a notebook.

    Parameters
    ----------
    folder : str or Path
        The folder of a run or of a comparison.

    Returns
    -------
    OpenRun or OpenComparison
        Tables as pandas data frames, figures and models; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        The folder has neither, or is damaged.
    """
    from raceme.notebook import open_folder

    return open_folder(_path(folder))


def _keys(
    settings: dict[str, Any],
    data: Data | None = None,
    model: str | Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Convert Python names to keys: ``max_updates`` is ``max-updates``.

    Paths become text, classes and functions names, data a fingerprint.
    """
    from dataclasses import fields

    from raceme.core.config import registry_of
    from raceme.core.errors import UserError
    from raceme.core.installation import check_versions
    from raceme.core.options import key_of

    check_versions()
    keys: dict[str, Any] = {}
    for name, value in settings.items():
        keys[name.replace("_", "-")] = _plain(value)
    if model is not None:
        keys["model"] = model
    for name, value in keys.items():
        registry = registry_of(name)
        if registry is not None and not isinstance(value, bool | int | float):
            keys[name] = registry.name_of(value)
    if data is not None:
        from raceme.datasets.given import ColumnRoles, keep

        if "dataset" in keys:
            raise UserError("data replaces a dataset: leave one of them out.")
        named = {
            item.name: keys.pop(key_of(item.name), item.default) for item in fields(ColumnRoles)
        }
        keys |= {"dataset": "arrays", "data-fingerprint": keep(data, ColumnRoles(**named))}
    return keys


def _plain(value: Any) -> Any:
    """Convert numpy's numbers to Python's, and paths to text."""
    import numpy as np

    plain = value.item() if isinstance(value, np.generic) else value
    return str(plain) if isinstance(plain, Path) else plain


def _path(given: str | Path) -> Path:
    """Return the path of a folder."""
    from raceme.core.errors import UserError

    try:
        return Path(given)
    except TypeError:
        raise UserError(f"A folder is a text or a path, e.g. 'runs/mine'; got {given!r}.") from None


def _items(sweep: Mapping[str, Iterable[Any]] | None) -> list[tuple[str, Iterable[Any]]]:
    """Return the keys of a sweep with their values."""
    from raceme.core.errors import UserError

    found = [] if sweep is None else list(sweep.items()) if isinstance(sweep, Mapping) else [None]
    for item in found:
        if item is None or isinstance(item[1], str) or not isinstance(item[1], Iterable):
            raise UserError(f"sweep takes values by key, {{'lr': [0.01, 0.1]}}; got {sweep!r}.")
    return [(key.replace("_", "-"), values) for key, values in found]


def _seeds(seeds: Iterable[int]) -> tuple[int, ...]:
    """Return seeds, one at least."""
    from raceme.core.errors import UserError

    try:
        found = tuple(index(seed) for seed in seeds)
    except TypeError:
        found = ()
    if not found:
        raise UserError(f"seeds takes whole numbers, e.g. seeds=range(3); got {seeds!r}.")
    return found


def _console() -> Console:
    """Return the console for progress: a terminal or a notebook, else none."""
    from rich.console import Console

    console = Console(highlight=False)
    console.quiet = not (console.is_terminal or console.is_jupyter)
    return console
