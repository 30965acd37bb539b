"""A comparison as its ``compare.json`` has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raceme.comparison.results import Comparison, Result, Run
from raceme.comparison.suites import NEVER, Method, Published, Score, Scored, Suite, Timing
from raceme.config.errors import UserError
from raceme.config.reading import ReadingError, parse_json, read_text
from raceme.protocol.measure import Measure
from raceme.records.record import RunRecord, read_run

FILE_NAME = "compare.json"


def read_comparison(folder: Path) -> Comparison:
    """Read what `raceme compare` left in a folder.

    The suite has what its tables show; how long its runs were to be is not in it.

    Raises
    ------
    UserError
        The file is missing or damaged.
    """
    path = folder / FILE_NAME
    try:
        tree = parse_json(read_text(path))
        timing = Timing(tree.get("timing", Timing.TARGET))
        score = Score(tree.get("score", Score.FINAL))
        results = tuple(_result(entry, timing, score) for entry in tree["methods"])
        suite = Suite(
            title=str(tree["title"]),
            methods=tuple(
                Method(result.label, result.method.strategy, published=result.method.published)
                for result in results
            ),
            settings=dict(tree["settings"]),
            seeds=tuple(int(seed) for seed in tree["seeds"]),
            sweep_scale=float(tree.get("sweep-scale", 1.0)),
            validation_fraction=tree.get("validation-fraction"),
            timing=timing,
            score=score,
            shows_unrest=bool(tree.get("shows-unrest", False)),
            shows_forgetting=bool(tree.get("shows-forgetting", False)),
            shows_clusters=bool(tree.get("shows-clusters", False)),
            shows_traffic=bool(tree.get("shows-traffic", False)),
            scores=tuple(Scored(name) for name in tree.get("scores", [])),
            shows_mixtures=bool(tree.get("shows-mixtures", False)),
            shows_work=bool(tree.get("shows-work", False)),
            reference=tree["reference"],
            notes=tuple(str(note) for note in tree.get("notes", [])),
            scale=float(tree["scale"]),
        )
        sweeps = {
            str(label): tuple(_result(entry, timing, score) for entry in entries)
            for label, entries in tree.get("sweeps", {}).items()
        }
    except ReadingError as error:
        raise UserError(f"Cannot read {path}: {error}.") from None
    except (OverflowError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not what `raceme compare` writes: {type(error).__name__} {error}."
        ) from None
    return Comparison(suite, results, sweeps)


def read_first_runs(folder: Path, comparison: Comparison) -> tuple[dict[str, RunRecord], list[str]]:
    """Read each method's run with its first seed: one line each is as much as a plot can show.

    Returns
    -------
    tuple[dict[str, RunRecord], list[str]]
        The runs by their methods' labels, and the labels of those whose events cannot be read.
    """
    records, missing = {}, []
    for result in comparison.results:
        if not result.runs:
            continue
        try:
            records[result.label] = read_run(folder / result.runs[0].folder)
        except UserError:
            missing.append(result.label)
    return records, missing


def _result(entry: Mapping[str, Any], timing: Timing, score: Score) -> Result:
    method = Method(
        label=str(entry.get("variant", entry["label"])),
        strategy=str(entry["strategy"]),
        options=dict(entry["options"]),
        published=_published(entry["published"]),
    )
    runs = []
    for summary in entry["runs"]:
        # Numbers that tables calculate with.
        measure = Measure.of(summary)
        names = [measure.name, "purity", "updates", "virtual_time", score.key(measure)]
        if score is Score.HONEST and names[-1] not in summary:
            # A run without attackers.
            names.pop()
        for name in names:
            if not isinstance(summary[name], int | float | None):
                raise ValueError(f"{name} is {summary[name]!r}")
        runs.append(Run(int(summary["seed"]), str(summary["folder"]), summary, timing, score))
    errors = {int(seed): str(error) for seed, error in entry["errors"].items()}
    return Result(method, str(entry["label"]), tuple(runs), errors)


def _published(entry: Mapping[str, Any] | None) -> tuple[Published, ...]:
    if entry is None:
        return ()
    time = entry["time"]
    time = math.inf if time == NEVER else time
    numbers: dict[str, Any] = {
        name: entry.get(name) for name in ("traffic", "clusters", *map(str, Scored))
    }
    remark = str(entry.get("remark") or "")
    return (Published(entry["accuracy"], time, remark=remark, **numbers),)
