"""The commands that run suites: `raceme compare`, `raceme reproduce`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from raceme.command_keys import KeyCommand, with_keys
from raceme.config import Value
from raceme.errors import UserError

_SHARED = ("data-root", "download", "clients", "devices", "max-updates", "max-time", "eval-every")
_COMPARED = ("dataset", "model", "partition", "target-accuracy")

_Out = Annotated[
    Path | None,
    typer.Option("--out", help="folder for the results; the same folder again goes on from there"),
]
_Seeds = Annotated[
    str | None, typer.Option("--seeds", help="seeds, e.g. 0,1,2", show_default=False)
]
_Processes = Annotated[
    int, typer.Option("--processes", help="runs at a time (0: one per core)", min=0)
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command(cls=KeyCommand)(with_keys(compare, (*_COMPARED, *_SHARED)))
    app.command(cls=KeyCommand)(with_keys(reproduce, _SHARED))


def compare(
    keys: Mapping[str, Value],
    methods: Annotated[
        list[str] | None, typer.Argument(help="strategies, or methods of the suite")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="all strategies")] = False,
    suite: Annotated[
        Path | None, typer.Option("--suite", help="TOML file with a suite", show_default=False)
    ] = None,
    seeds: _Seeds = None,
    out: _Out = None,
    processes: _Processes = 0,
) -> None:
    """Run several methods on the same clients, devices and seeds, and compare them.

    The target accuracy is recorded and does not end a run. Runs that are finished in --out are
    kept.
    """
    from raceme.comparison.suite_file import load_suite
    from raceme.comparison.suites import of_names

    if suite is not None and every:
        raise UserError("Give --suite or --all, not both.")
    if suite is not None:
        chosen = load_suite(suite)
        chosen = (chosen.only(methods) if methods else chosen).with_settings(keys)
    else:
        chosen = of_names(_all_strategies() if every else methods or [], keys)
    chosen = _with_seeds(chosen, seeds)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    _run([(chosen, out or Path("runs") / f"{stamp}-compare-{chosen.dataset}")], processes)


def reproduce(
    keys: Mapping[str, Value],
    name: Annotated[str, typer.Argument(help="e.g. casa-table1; without: show all")] = "",
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="variant, e.g. mnist or cifar10", show_default=False),
    ] = None,
    methods: Annotated[
        str, typer.Option("--methods", help="only these, e.g. casa,fedavg", show_default=False)
    ] = "",
    scale: Annotated[float, typer.Option("--scale", help="shorten the suite to this part")] = 1.0,
    seeds: _Seeds = None,
    out: _Out = None,
    processes: _Processes = 0,
) -> None:
    """Run a paper's experiment, and show the published numbers beside ours."""
    from raceme.comparison.suite_file import all_shipped, load_suite

    if not name:
        for shown, variants in all_shipped().items():
            print(f"{shown}: {', '.join(variants)}")
        return
    planned = []
    chosen = _variants(name, dataset)
    for path in chosen:
        suite = load_suite(path)
        if methods:
            suite = suite.only([label.strip() for label in methods.split(",")])
        suite = _with_seeds(suite.with_settings(keys), seeds).scaled(scale)
        folder = path.stem if scale == 1.0 else f"{path.stem}-scale-{scale:g}"
        if out is not None:
            folder_path = out / path.stem if len(chosen) > 1 else out
        else:
            folder_path = Path("runs") / folder
        planned.append((suite, folder_path))
    _run(planned, processes)


def _variants(name: str, dataset: str | None) -> list[Path]:
    """Return the suites of a reproduction: one variant, or all that use the same dataset."""
    from raceme.comparison.suite_file import load_suite, shipped
    from raceme.errors import unknown_name

    variants = shipped(name)
    if dataset is not None:
        if dataset in variants:
            return [variants[dataset]]
        found = [path for path in variants.values() if load_suite(path).dataset == dataset]
        if not found:
            raise unknown_name(f"dataset of {name}", dataset, variants)
        return found
    if len({load_suite(path).dataset for path in variants.values()}) > 1:
        raise UserError(
            f"{name} has several datasets: choose one with --dataset ({', '.join(variants)})."
        )
    return list(variants.values())


def _run(planned: Sequence[tuple[Any, Path]], processes: int) -> None:
    """Run suites one after another, after all of them were checked, and print their tables."""
    from raceme.comparison.compare import compare as run_suite
    from raceme.comparison.compare import prepare
    from raceme.comparison.runner import cores
    from raceme.comparison.table import main_table, sweep_table

    logging.getLogger("flwr").setLevel(logging.ERROR)
    console = Console(highlight=False)
    prepared = [prepare(suite, out) for suite, out in planned]
    failed = False
    for plan in prepared:
        suite = plan.suite
        if suite.scale != 1.0:
            console.print(f"{suite.title}: SHORTENED, --scale {suite.scale:g}", markup=False)
        try:
            comparison = run_suite(plan, processes or cores(), console)
        except KeyboardInterrupt:
            console.print(
                f"\nInterrupted. Finished runs are kept; to go on, the same command with "
                f"--out {plan.out}",
                markup=False,
                soft_wrap=True,
            )
            raise typer.Exit(130) from None
        for text in (main_table(comparison), sweep_table(comparison)):
            if text is not None:
                console.print()
                console.print(text.rich())
                for line in text.lines:
                    console.print(line, markup=False, soft_wrap=True)
        console.print(f"\nTables, plots and runs: {plan.out}", markup=False, soft_wrap=True)
        failed = failed or any(result.errors for result in comparison.results)
    if failed:
        raise typer.Exit(1)


def _all_strategies() -> list[str]:
    from raceme.strategies import STRATEGIES

    return list(STRATEGIES)


def _with_seeds(suite: Any, text: str | None) -> Any:
    from dataclasses import replace

    if text is None:
        return suite
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--seeds takes numbers with commas, e.g. 0,1,2; got '{text}'.") from None
    return replace(suite, seeds=seeds)
