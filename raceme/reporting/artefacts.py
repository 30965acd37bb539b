"""What a run leaves besides its database: summary, models, similarities and plots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from raceme.core.errors import UserError
from raceme.core.files import atomic_write
from raceme.records.folder import model_file, saved_in
from raceme.records.positions import Similarity
from raceme.records.record import RunRecord, read_run
from raceme.records.summary import write_summary
from raceme.reporting.plots import (
    accuracy_figure,
    clusters_figure,
    devices_figure,
    has_scores,
    measure_figure,
    mixtures_figure,
    similarity_figure,
    tasks_figure,
    uploads_figure,
    why_no_mixtures,
)
from raceme.reporting.style import CLOCK, save_figure

log = logging.getLogger("raceme")

Arrays = Mapping[str, NDArray[np.generic]]
Similarities = tuple[list[str], NDArray[np.floating]]


def write_all(
    out: Path,
    *,
    summary: Mapping[str, Any],
    models: Mapping[int, Arrays],
    clients: Iterable[tuple[str, Arrays]] = (),
    similarity: Similarities | None = None,
    target: float | None = None,
    clock: str = CLOCK,
) -> dict[str, str]:
    """Write a run's artefacts beside its database. What fails is logged and holds nothing else up.

    Parameters
    ----------
    out : Path
        The run's folder, with its ``run.sqlite``.
    summary : Mapping
        Numbers of the run, written as ``summary.json``.
    models : Mapping[int, Arrays]
        Cluster to its model's arrays by name.
    clients : Iterable
        Clients, each with the arrays of the model that it uses; taken one after the other.
    similarity : tuple, optional
        Client ids and the matrix of their similarities. Of large fleets a part is kept and drawn.
    target : float, optional
        Target accuracy, for the plot.
    clock : str
        What the axes of time are called.

    Returns
    -------
    dict[str, str]
        Names of what could not be written, and why.
    """
    failed = _attempt("summary.json", lambda: write_summary(out / "summary.json", summary))
    for cluster, arrays in models.items():
        path = model_file(out, cluster)
        note = f"cluster {cluster} of {summary['strategy']} on {summary['dataset']}"
        failed |= _attempt(
            f"{path.parent.name}/{path.name}",
            lambda p=path, a=arrays, t=note: save_model(p, a, t),  # type: ignore[misc]
        )
    failed |= _attempt("clients/", lambda: _save_client_models(out, clients, summary))
    kept = None if similarity is None else Similarity.thinned(*similarity)
    if kept is not None:
        failed |= _attempt("similarity.npz", lambda: kept.save(out))
    try:
        record = read_run(out)
    except UserError as error:
        return failed | {"plots": str(error)}
    title = f"{summary['strategy']} on {summary['dataset']}, seed {summary['seed']}"
    figures = figures_of(record, similarity=kept, target=target, title=title, clock=clock)
    if why := why_no_mixtures(record):
        log.warning("mixtures.png is left out: %s", why)
    for name, draw in figures.items():
        path = out / f"{name}.png"
        failed |= _attempt(path.name, lambda p=path, d=draw: save_figure(d(), p))  # type: ignore[misc]
    return failed


def figures_of(
    record: RunRecord,
    *,
    similarity: Similarity | None,
    target: float | None = None,
    title: str = "",
    clock: str = CLOCK,
) -> dict[str, Callable[[], Figure]]:
    """Return what draws the figures of a run, by the names of their files.

    Figures that not every run has are left out where there is nothing to draw. The parameters are
    those of :func:`raceme.reporting.plots.accuracy_figure`.
    """
    figures: dict[str, Callable[[], Figure]] = {
        "accuracy": partial(accuracy_figure, record, target=target, title=title, clock=clock),
        "clusters": partial(clusters_figure, record, clock=clock),
        "devices": partial(devices_figure, record, clock=clock),
    }
    if similarity is not None and similarity.clients:
        figures["similarity"] = partial(draw_similarity, record, similarity)
    for name, draw, has_data in (
        ("uploads", uploads_figure, has_scores(record)),
        ("mixtures", mixtures_figure, bool(record.uploads.divergences())),
        ("tasks", tasks_figure, bool(record.task_tests)),
    ):
        if has_data:
            figures[name] = partial(draw, record)
    for schema in record.drawn_measures:
        figures[schema.file] = partial(measure_figure, record, schema, clock=clock)
    return figures


def _save_client_models(
    out: Path, clients: Iterable[tuple[str, Arrays]], summary: Mapping[str, Any]
) -> None:
    for client, arrays in clients:
        note = f"{client} of {summary['strategy']} on {summary['dataset']}"
        save_model(model_file(out, client), arrays, note)


def save_model(path: Path, arrays: Arrays, description: str) -> None:
    """Write a model as safetensors, atomically, with a description in its header.

    The same model gives the same bytes: safetensors writes several header entries in any order,
    so there is one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    with atomic_write(path) as file:
        save_file(plain, file, metadata={"description": description})


def draw_similarity(record: RunRecord, similarity: Similarity | None) -> Figure:
    """Draw what a run knows of its clients' similarities, which may be nothing."""
    if similarity is None:
        similarity = Similarity((), np.empty((0, 0), np.float32), 0)
    return similarity_figure(
        similarity.clients, similarity.matrix, record.assignment(), of=similarity.of
    )


def _attempt(name: str, write: Callable[[], None]) -> dict[str, str]:
    """Write one artefact; if that fails, log it and return its name and the reason."""
    try:
        write()
    except (OSError, SafetensorError) as error:
        # A full disk; its place in this program is no help.
        reason = getattr(error, "strerror", None) or str(error)
        log.error("%s could not be written: %s", name, reason)
        return {name: " ".join(reason.split())}
    except Exception as error:
        log.exception("%s could not be written", name)
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return {name: " ".join(reason.split())}
    return {}


def missing_line(out: Path, unwritten: Mapping[str, str]) -> str:
    """Say in one line what of a run could not be written, why, and what is there."""
    reasons = dict.fromkeys(unwritten.values())
    saved = ", ".join(saved_in(out)) or "nothing"
    return (
        f"{', '.join(unwritten)} could not be written ({'; '.join(reasons)}). Saved in {out}: "
        f"{saved}."
    )
