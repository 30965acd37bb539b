"""`raceme compare`: several methods on the same clients, devices and seeds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raceme.commands.suites import (
    SHARED,
    Only,
    Out,
    Processes,
    Seeds,
    parts,
    run_suites,
    with_seeds,
)
from raceme.commands.watch import ADDRESS, Address, Watch, watched
from raceme.config import Value
from raceme.config.errors import UserError

SHOWN = ("dataset", "model", "partition", "target-accuracy", "workers", *SHARED)
"""Keys of a run that the help shows."""


def compare(
    keys: Mapping[str, Value],
    methods: Annotated[
        list[str] | None, typer.Argument(help="strategies, or methods of the suite")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="all strategies")] = False,
    suite: Annotated[
        Path | None,
        typer.Option(
            "--suite",
            help="TOML file, or one that comes along: panicle, poisoning",
            show_default=False,
        ),
    ] = None,
    only: Only = "",
    seeds: Seeds = None,
    out: Out = None,
    processes: Processes = 0,
    watch: Watch = False,
    watch_address: Address = ADDRESS,
) -> None:
    """Run several methods on the same clients, devices and seeds, and compare them.

    The target accuracy is recorded and does not end a run. Runs that are finished in --out are
    kept.
    """
    from raceme.comparison.regret import regret_table
    from raceme.comparison.suites import load_suite, of_names, variants

    if suite is not None and every:
        raise UserError("Give --suite or --all, not both.")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if suite is not None and (cases := variants(suite)):
        folder = out or Path("runs") / f"{stamp}-compare-{suite.name.removesuffix('.toml')}"
        planned = []
        for name, case in parts(str(suite), cases, only).items():
            loaded = load_suite(case)
            loaded = (loaded.only(methods) if methods else loaded).with_settings(keys)
            planned.append((with_seeds(loaded, seeds), folder / name))
        with watched(watch, folder, watch_address, comparison=True):
            run_suites(planned, processes, regret_table, keys.get("workers", ""), folder)
        return
    if only:
        raise UserError(
            "--only chooses parts of a suite with variants: give --suite panicle, or a file."
        )
    if suite is not None:
        chosen = load_suite(suite)
        chosen = (chosen.only(methods) if methods else chosen).with_settings(keys)
    else:
        chosen = of_names(_all_strategies() if every else methods or [], keys)
    chosen = with_seeds(chosen, seeds)
    folder = out or Path("runs") / f"{stamp}-compare-{chosen.dataset}"
    with watched(watch, folder, watch_address, comparison=True):
        run_suites([(chosen, folder)], processes, workers=keys.get("workers", ""), out=folder)


def _all_strategies() -> list[str]:
    from raceme.config.registry import STRATEGIES

    return list(STRATEGIES)
