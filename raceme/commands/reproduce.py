"""`raceme reproduce`: a paper's experiment, with the published numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raceme.commands.suites import Only, Out, Processes, Seeds, parts, run_suites, with_seeds
from raceme.config import Value
from raceme.config.errors import UserError


def reproduce(
    keys: Mapping[str, Value],
    name: Annotated[str, typer.Argument(help="e.g. casa-table1; without: show all")] = "",
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="e.g. mnist or cifar10", show_default=False),
    ] = None,
    only: Only = "",
    methods: Annotated[
        str, typer.Option("--methods", help="only these, e.g. casa,fedavg", show_default=False)
    ] = "",
    scale: Annotated[float, typer.Option("--scale", help="shorten the suite to this part")] = 1.0,
    seeds: Seeds = None,
    out: Out = None,
    processes: Processes = 0,
) -> None:
    """Run a paper's experiment, and show the published numbers beside ours."""
    from raceme.comparison.suites import all_shipped, load_suite

    if not name:
        for shown, variants in all_shipped().items():
            print(f"{shown}: {', '.join(variants)}")
        return
    planned = []
    chosen = _variants(name, dataset, only)
    for variant in chosen:
        suite = load_suite(variant)
        if methods:
            suite = suite.only([label.strip() for label in methods.split(",")])
        suite = with_seeds(suite.with_settings(keys), seeds).scaled(scale)
        folder = variant if scale == 1.0 else f"{variant}-scale-{scale:g}"
        if out is not None:
            folder_path = out / variant if len(chosen) > 1 else out
        else:
            folder_path = Path("runs") / folder
        planned.append((suite, folder_path))
    run_suites(planned, processes, workers=keys.get("workers", ""), out=out)


def _variants(name: str, dataset: str | None, only: str) -> list[str]:
    """Return the suites of a reproduction: the parts that are named, or all of one dataset."""
    from raceme.comparison.suites import load_suite, shipped
    from raceme.config.errors import unknown_name

    variants = parts(name, shipped(name), only)
    datasets = {part: load_suite(found).dataset for part, found in variants.items()}
    if dataset is not None:
        if dataset in variants:
            return [variants[dataset]]
        found = [variants[part] for part, used in datasets.items() if used == dataset]
        if not found:
            raise unknown_name(f"dataset of {name}", dataset, {*variants, *datasets.values()})
        return found
    if len(set(datasets.values())) > 1 and not only:
        raise UserError(
            f"{name} has several datasets: choose one with --dataset, or parts with --only "
            f"({', '.join(variants)})."
        )
    return list(variants.values())
