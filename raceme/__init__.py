"""Raceme: asynchronous, clustered federated learning on Flower.

`run`, `compare`, `reproduce`, `simulate`, `load` and `open` are what a script or a notebook calls.
Everything else is private by its place, except what ``docs/extending.md`` names for a user's own
methods and data.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
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

# What a function needs is imported when it is called: most of what imports this package calls none.


def run(
    strategy: str | type[Method] = "casa",
    *,
    data: Data | None = None,
    model: str | Callable[..., Any] | None = None,
    **settings: Any,
) -> OpenRun:
    """Run a method on virtual time, as `raceme run` does, and open its results.

    Ctrl-C, or a notebook's stop button, ends the run early, with what it has so far.

    Parameters
    ----------
    strategy : str or type[Method]
        A name of `raceme list`, ``module:Class``, or such a class.
    data : Mapping or Iterable, optional
        Each client's own samples, in place of a dataset: ``(x, y)`` or ``(x_train, y_train, x_test,
        y_test)``, arrays or tensors; a torch Dataset of pairs, or two, the second for testing; or a
        mapping with the names of an .npz file: x, y, heldout, group, num_classes, unit. Inputs have
        shape (samples, ...) and are used as they are, bytes divided by 255.
    model : str or Callable, optional
        A name of `raceme list`, ``module:function``, or a function that returns a
        ``torch.nn.Module``. It is given ``input_shape`` and ``num_classes`` if it takes arguments.
    **settings
        Keys of a run, and hyper-parameters of the method: ``max_updates=100, gamma=0.2``.

    Returns
    -------
    OpenRun
        The finished run; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        There is no such name or key, or the run cannot work; said before any work starts.
    """
    from raceme.core.config import RunConfig, with_prefixes
    from raceme.core.registry import STRATEGIES
    from raceme.core.signals import StopRequest
    from raceme.notebook import OpenRun
    from raceme.reporting.console import RunProgress
    from raceme.runs.experiment import resolve, simulate

    name = STRATEGIES.name_of(strategy)
    keys = with_prefixes(_keys(settings, data, model), [name])
    config = resolve(RunConfig.from_mapping({**keys, "strategy": name}))
    progress = RunProgress(config.planned_updates, console=_console())
    with StopRequest(signal.SIGINT) as stop, progress:
        return OpenRun(simulate(config, progress.observe, stop=stop).out)


def compare(
    strategies: str | type[Method] | Iterable[str | type[Method]],
    *,
    data: Data | None = None,
    model: str | Callable[..., Any] | None = None,
    seeds: Iterable[int] = (0,),
    out: str | Path | None = None,
    processes: int = 0,
    formats: Iterable[str] = (),
    **settings: Any,
) -> OpenComparison:
    """Run several methods on the same clients, devices and seeds, as `raceme compare` does.

    Ctrl-C, or a notebook's stop button, ends it early, with the runs that are finished.

    Parameters
    ----------
    strategies : Iterable[str or type[Method]]
        Names of `raceme list`, ``module:Class``, or such classes; or a single one.
    data, model : optional
        See :func:`run`.
    seeds : Iterable[int]
        Every method runs once with each.
    out : str or Path, optional
        Folder for the results; runs that are finished in it are kept.
    processes : int
        Runs at a time; 0: one per core.
    formats : Iterable[str]
        Some of ``"pdf"``, ``"svg"`` and ``"tex"``: what plots and tables are written as, too.
    **settings
        Keys of a run that all methods share, and hyper-parameters, which each method that has
        them reads; ``**{"casa.gamma": 0.2}`` is for one method.

    Returns
    -------
    OpenComparison
        The finished comparison; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        There is no such name or key, or a run cannot work; said before any work starts.
    """
    import time
    from dataclasses import replace

    from raceme.core.config import with_prefixes
    from raceme.core.registry import STRATEGIES
    from raceme.experiments.compare import checked_formats, prepare
    from raceme.experiments.suites import of_names
    from raceme.notebook import OpenComparison, compared

    written_as = checked_formats(formats)
    if isinstance(strategies, str | type):
        strategies = [strategies]
    names = [STRATEGIES.name_of(strategy) for strategy in strategies]
    keys = with_prefixes(_keys(settings, data, model), names)
    suite = replace(of_names(names, keys), seeds=_seeds(seeds))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{stamp}-compare-{suite.dataset}" if out is None else Path(out)
    plan = prepare(suite, folder)
    compared(plan, processes, _console(), written_as)
    return OpenComparison(plan.out)


def reproduce(
    name: str,
    *,
    dataset: str | None = None,
    only: Iterable[str] = (),
    methods: Iterable[str] = (),
    scale: float = 1.0,
    seeds: Iterable[int] | None = None,
    out: str | Path | None = None,
    processes: int = 0,
    formats: Iterable[str] = (),
    **settings: Any,
) -> dict[str, OpenComparison]:
    """Run a paper's experiment, as `raceme reproduce` does, beside the published numbers.

    Parameters
    ----------
    name : str
        Name of the experiment, as `raceme reproduce` lists them: ``"casa-table1"``.
    dataset : str, optional
        The dataset or the part that is wanted; of an experiment with several one has to be.
    only, methods : Iterable[str]
        Some of its parts and of its methods; all of them for none.
    scale : float
        Share of the experiment's updates that each run has, above 0 and at most 1.
    seeds : Iterable[int], optional
        Every method runs once with each; by default those of the experiment.
    out, processes, formats
        See :func:`compare`.
    **settings
        Keys of a run, which replace the paper's.

    Returns
    -------
    dict[str, OpenComparison]
        A finished comparison for each part, by its name.

    Raises
    ------
    UserError
        There is no such name or key, or a run cannot work; said before any work starts.
    """
    from dataclasses import replace

    from raceme.experiments.compare import checked_formats, prepare
    from raceme.experiments.suites import out_of, reproductions
    from raceme.notebook import OpenComparison, compared

    written_as, folder = checked_formats(formats), None if out is None else Path(out)
    suites = reproductions(name, dataset, only, methods, _keys(settings), scale)
    plans = {
        variant: prepare(
            suite if seeds is None else replace(suite, seeds=_seeds(seeds)),
            out_of(variant, folder, scale, len(suites)),
        )
        for variant, suite in suites.items()
    }
    found: dict[str, OpenComparison] = {}
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
    max_wall_time: float = math.inf,
    **parameters: Any,
) -> OpenSimulation:
    """Run any Flower app on virtual time, as `raceme simulate` does.

    Parameters
    ----------
    folder : str or Path
        Folder of the app, with its ``pyproject.toml``.
    strategy : str or type[Method], optional
        Method of Raceme's in the place of the app's strategy.
    clients : int
        Number of simulated SuperNodes.
    devices : str
        Device profile: a name, a TOML file, ``module:function`` or ``trace:FOLDER``.
    run_config, node_config : Mapping, optional
        What changes the app's run config, and what every node's config has besides its partition.
    workers : int or str
        Worker processes that do the clients' work; 0: none, ``"auto"``: one per core.
    seed : int
        Decides devices, losses, and what an app draws that does not seed itself.
    out : str or Path, optional
        Folder for the results; a new one in ``runs`` if left out.
    examples : int, optional
        Training examples of each client, for profiles with times per sample; by default what
        replies state.
    evaluation_share : float, optional
        Time of an evaluation as a share of a training task's; by default it takes none.
    max_time, max_wall_time : float
        Seconds of virtual time, and of this machine's, after which it ends.
    **parameters
        Hyper-parameters of `strategy`: ``gamma=0.2``.

    Returns
    -------
    OpenSimulation
        What it has shown; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        The app cannot be read or started, or a name or key does not exist.
    """
    import json

    from raceme.core.config import with_prefixes
    from raceme.core.registry import STRATEGIES
    from raceme.notebook import simulated
    from raceme.simulation.apps import Settings

    name = None if strategy is None else STRATEGIES.name_of(strategy)
    keys = _keys(parameters)

    def pairs(config: Mapping[str, Any] | None) -> tuple[str, ...]:
        return tuple(f"{key}={json.dumps(value)}" for key, value in (config or {}).items())

    return simulated(
        Settings(
            folder=Path(folder),
            clients=clients,
            devices=devices,
            run_config=pairs(run_config),
            strategy=name,
            parameters=keys if name is None else with_prefixes(keys, [name]),
            workers=workers,
            seed=seed,
            out=None if out is None else Path(out),
            max_time=max_time,
            max_wall_time=max_wall_time,
            examples=examples,
            evaluation_share=evaluation_share,
            node_config=pairs(node_config),
        )
    )


def load(dataset: str, **settings: Any) -> list[ClientData]:
    """Load a dataset as the clients of a run have it.

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
        There is no such name or key, or the data are missing or cannot be dealt out as asked.
    """
    from raceme import datasets
    from raceme.core.config import RunConfig

    config = RunConfig.from_mapping({**_keys(settings), "dataset": dataset})
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
        Its tables as pandas data frames, its figures, its models; see :mod:`raceme.notebook`.

    Raises
    ------
    UserError
        There is neither in the folder, or it is damaged.
    """
    from raceme.notebook import open_folder

    return open_folder(folder)


def _keys(
    settings: dict[str, Any],
    data: Data | None = None,
    model: str | Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Return keys as a person writes them: ``max_updates`` is ``max-updates``.

    Classes and functions become names, and data the fingerprint of what is kept of them.
    """
    from raceme.core.config import registry_of
    from raceme.core.errors import UserError

    keys = {name.replace("_", "-"): value for name, value in settings.items()}
    if model is not None:
        keys["model"] = model
    for name, value in keys.items():
        registry = registry_of(name)
        if registry is not None and not isinstance(value, bool | int | float):
            keys[name] = registry.name_of(value)
    if data is not None:
        from raceme.datasets.npz import keep

        if "dataset" in keys:
            raise UserError("data replaces a dataset: leave one of them out.")
        keys |= {"dataset": "arrays", "data-fingerprint": keep(data)}
    return keys


def _seeds(seeds: Iterable[int]) -> tuple[int, ...]:
    """Return seeds, one at least."""
    from raceme.core.errors import UserError

    try:
        found = tuple(int(seed) for seed in seeds)
    except (TypeError, ValueError):
        found = ()
    if not found:
        raise UserError(f"seeds takes whole numbers, e.g. seeds=range(3); got {seeds!r}.")
    return found


def _console() -> Console:
    """Return where progress is shown: a terminal or a notebook, and nothing else."""
    from rich.console import Console

    console = Console(highlight=False)
    console.quiet = not (console.is_terminal or console.is_jupyter)
    return console
