"""Raceme: asynchronous, clustered federated learning on Flower.

`run`, `compare`, `load` and `open` are what a script or a notebook calls. Everything else is
private by its place, except what ``docs/extending.md`` names for a user's own methods and data.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from raceme.core.strategy import Method
    from raceme.datasets.source import ClientData
    from raceme.notebook import OpenComparison, OpenRun

__all__ = ["compare", "load", "open", "run"]
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
    strategies: Iterable[str | type[Method]],
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
        Names of `raceme list`, ``module:Class``, or such classes.
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
    names = [STRATEGIES.name_of(strategy) for strategy in strategies]
    keys = with_prefixes(_keys(settings, data, model), names)
    suite = replace(of_names(names, keys), seeds=tuple(seeds))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{stamp}-compare-{suite.dataset}" if out is None else Path(out)
    plan = prepare(suite, folder)
    compared(plan, processes, _console(), written_as)
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


def _console() -> Console:
    """Return where progress is shown: a terminal or a notebook, and nothing else."""
    from rich.console import Console

    console = Console(highlight=False)
    console.quiet = not (console.is_terminal or console.is_jupyter)
    return console
