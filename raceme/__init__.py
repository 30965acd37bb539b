"""Raceme: asynchronous, clustered federated learning on Flower.

`run`, `compare`, `load` and `open` are what a script or a notebook calls. Everything else is
private by its place, except what ``docs/extending.md`` names for a user's own methods and data.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raceme.core.strategy import Method
    from raceme.datasets.source import ClientData
    from raceme.notebook import OpenComparison, OpenRun

__all__ = ["compare", "load", "open", "run"]
__version__ = "0.2.0"

# What a function needs is imported when it is called: most of what imports this package calls none.


def run(strategy: str | type[Method] = "casa", **settings: Any) -> OpenRun:
    """Run a method on virtual time, as `raceme run` does, and open its results.

    Parameters
    ----------
    strategy : str or type[Method]
        A name of `raceme list`, ``module:Class``, or such a class.
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
    from raceme.notebook import OpenRun
    from raceme.runs.experiment import simulate

    name = STRATEGIES.name_of(strategy)
    keys = with_prefixes(_keys(settings), [name])
    config = RunConfig.from_mapping({**keys, "strategy": name})
    return OpenRun(simulate(config).out)


def compare(
    strategies: Iterable[str | type[Method]],
    *,
    seeds: Iterable[int] = (0,),
    out: str | Path | None = None,
    processes: int = 0,
    **settings: Any,
) -> OpenComparison:
    """Run several methods on the same clients, devices and seeds, as `raceme compare` does.

    Parameters
    ----------
    strategies : Iterable[str or type[Method]]
        Names of `raceme list`, ``module:Class``, or such classes.
    seeds : Iterable[int]
        Every method runs once with each.
    out : str or Path, optional
        Folder for the results; runs that are finished in it are kept.
    processes : int
        Runs at a time; 0: one per core.
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

    from rich.console import Console

    from raceme.core.config import with_prefixes
    from raceme.core.registry import STRATEGIES
    from raceme.experiments import compare as comparing
    from raceme.experiments.jobs import cores
    from raceme.experiments.suites import of_names
    from raceme.notebook import OpenComparison

    names = [STRATEGIES.name_of(strategy) for strategy in strategies]
    keys = with_prefixes(_keys(settings), names)
    suite = replace(of_names(names, keys), seeds=tuple(seeds))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{stamp}-compare-{suite.dataset}" if out is None else Path(out)
    plan = comparing.prepare(suite, folder)
    comparing.compare(plan, processes or cores(), Console(quiet=True))
    return OpenComparison(plan.out)


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


def _keys(settings: dict[str, Any]) -> dict[str, Any]:
    """Return keys as a person writes them: ``max_updates`` is ``max-updates``."""
    return {name.replace("_", "-"): value for name, value in settings.items()}
