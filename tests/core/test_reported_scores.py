"""Scores of uploads and of clusters, from the clients to the store."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fleets import Change, grid_of, pulled_app
from flwr.app import Message
from runs import ONES, devices, half, of, run

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.clusters import Model
from raceme.core.config import RunConfig
from raceme.core.messages import Vector
from raceme.core.strategy import Needs
from raceme.records.record import read_run
from raceme.records.store import read_events
from raceme.runs.experiment import build_grid, execute, resolve, score_clusters, simulate
from raceme.strategies import FedAsync, Standalone


class Mirror(Standalone):
    """Sends every client the model that it has uploaded."""

    needs = Needs(pretrained=True)


def config(out: Path, **keys: object) -> RunConfig:
    base = RunConfig(strategy="fedasync", clients=6, partition="label-groups", drift="mixture")
    return base.with_values(out=str(out), max_updates=24, eval_every=12, workers="0", **keys)


def test_scores_change_nothing_else_in_a_run(tmp_path: Path) -> None:
    plain, scored = (
        simulate(config(tmp_path / name, score_uploads=value))
        for name, value in (("plain", False), ("scored", True))
    )
    without, found = read_events(tmp_path / "plain"), read_events(tmp_path / "scored")
    unknown = {"accuracy_before": None, "accuracy_after": None, "passes": None}
    assert without == [
        replace(event, **unknown) if isinstance(event, events.UpdateApplied) else event
        for event in found
    ]
    updates = read_run(tmp_path / "scored").updates
    assert np.isfinite(updates.accuracy_before).all()
    # A client's first upload has no previous one whose answer could be tested.
    first = [client not in updates.client[:index] for index, client in enumerate(updates.client)]
    assert np.isnan(updates.accuracy_after).tolist() == first
    assert plain.summary["accuracy_before"] is None
    assert 0 < scored.summary["accuracy_before"] < 1
    assert scored.summary["sample_passes"] == updates.passes.sum() > 0


def test_the_second_score_is_of_the_sent_model_on_the_data_of_the_previous_upload(
    tmp_path: Path,
) -> None:
    # A client is sent its own upload, so that "after" equals the previous "before".
    own = resolve(config(tmp_path / "own", strategy="standalone", score_uploads=True))
    method = Mirror(seed=0)
    method.features = Chain.of(own)
    execute(own, method, build_grid(own))
    rows = read_run(tmp_path / "own").summary.uploads.rows
    known = [row for row in rows if row.after is not None]
    assert len(known) == len(rows) - 6
    assert all(row.after == row.before for row in known)
    assert len({row.before for row in known}) > 6


def test_without_uploads_there_are_no_scores(tmp_path: Path) -> None:
    alone = config(tmp_path / "alone", strategy="standalone", score_uploads=True)
    summary = simulate(alone).summary
    assert summary["accuracy_before"] > 0
    assert summary["accuracy_after"] is None


def stating(**values: float | list[float]) -> Change:
    def change(reply: Message, index: int) -> Message:
        for name, value in values.items():
            reply.content["metrics"][name.replace("_", "-")] = value
        return reply

    return change


def applied(**values: float | list[float]) -> events.UpdateApplied:
    grid = grid_of(pulled_app([ONES], change=stating(**values)), devices(1.0))
    return of(events.UpdateApplied, run(half(), grid, 1))[0]


def test_clients_statements_are_in_the_report() -> None:
    update = applied(
        accuracy_before=0.25, accuracy_after=1.0, sample_passes=30, mixture=[0.25, 0.75]
    )
    assert (update.accuracy_before, update.accuracy_after, update.passes) == (0.25, 1.0, 30)
    assert update.mixture == (0.25, 0.75)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_an_invalid_accuracy_is_not_reported(value: float) -> None:
    update = applied(accuracy_before=value, accuracy_after=value)
    assert (update.accuracy_before, update.accuracy_after) == (None, None)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e30])
def test_an_invalid_number_of_passes_is_not_reported(value: float) -> None:
    assert applied(sample_passes=value).passes is None


@pytest.mark.parametrize(
    "shares", [[0.5, 0.6], [1.5, -0.5], [math.nan, 1.0], [math.inf], [], 1.0, [1 / 2000] * 2000]
)
def test_an_invalid_mixture_is_not_reported(shares: float | list[float]) -> None:
    assert applied(mixture=shares).mixture == ()


class Sets:
    """Three test sets, on which a model's accuracy is the weight of the set's index."""

    tests = 3

    def accuracy(self, vector: Vector, k: int) -> float:
        return float(vector[k])


def test_each_cluster_is_tested_on_its_own_set() -> None:
    numbers = np.array([0.25, 0.5, 0.75, 1.0], np.float32)
    models = {k: Model(numbers * scale) for k, scale in ((3, 1.0), (2, 1.0), (0, 0.5))}
    found = score_clusters(models, Sets(), time=2.0, updates=7)
    # Cluster 3 has no distribution.
    assert found == events.ClustersScored(2.0, 7, {0: 0.125, 2: 0.75})
    assert found.mean == 0.4375
    assert score_clusters({5: models[3]}, Sets(), 2.0, 7) is None


class Following(FedAsync):
    """A method whose only cluster follows the first distribution."""

    has_distributions = True


@pytest.mark.parametrize("method", [Following, FedAsync])
def test_clusters_are_tested_beside_every_evaluation(
    method: type[FedAsync], tmp_path: Path
) -> None:
    chosen = resolve(config(tmp_path / "run", partition="rotation-groups", proxy="60"))
    seen: list[events.Event] = []
    outcome = execute(chosen, method(seed=0), build_grid(chosen), seen.append)
    evaluated, found = (of(kind, seen) for kind in (events.Evaluated, events.ClustersScored))
    if method is FedAsync:
        assert found == []
        assert outcome.summary["cluster_accuracy"] is None
        return
    assert [(e.time, e.updates) for e in found] == [(e.time, e.updates) for e in evaluated]
    assert all(seen[seen.index(e) + 1] in found for e in evaluated)
    assert [e for e in read_events(tmp_path / "run") if e in found] == found
    assert outcome.summary["cluster_accuracy"] == found[-1].accuracies[0]
