"""A regression end to end: loss and error, every executor, a run, its report, a comparison."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import message_to
from flwr.app import ConfigRecord, Context, RecordDict
from summaries import summarise

from raceme import client_app, datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.evaluation import score_from
from raceme.core.events import ACCURACY, Evaluated, Measure
from raceme.core.messages import InvalidReplyError
from raceme.core.progress import PRESENT, ClientScore, Evaluation, Plan
from raceme.datasets.source import DataShape, Target
from raceme.experiments.results import Comparison, Result, Run, best_of
from raceme.experiments.suites import ComparedMethod, Score, Suite
from raceme.experiments.tables import main_table, to_csv, to_json
from raceme.records.record import read_run
from raceme.records.summary import convergence_index, unrest
from raceme.reporting.console import summary_rows
from raceme.reporting.run_page import run_page
from raceme.runs import experiment
from raceme.simulation import InProcess
from raceme.simulation.stacked import Stacked
from raceme.training import models
from raceme.training.local import evaluate
from raceme.training.models import Network, Objective, Regression, Samples, objective_of

UNIT = "µg/m³"
ERROR = Measure(UNIT)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Three stations whose fine dust oscillates with a period of a day and a half."""
    for number in range(3):
        dust = np.sin(np.arange(24 * 40) / 6 + number).astype(np.float32)
        x = np.zeros((24 * 40 - 24, 13, 24), np.float32)
        x[:, 0] = 0.75 * np.lib.stride_tricks.sliding_window_view(dust, 24)[:-1]
        about = {"unit": np.array(UNIT), "y_mean": np.array(80.0), "y_std": np.array(80.0)}
        np.savez(tmp_path / f"s{number}.npz", x=x[::3], y=80 + 60 * dust[24::3], **about)
    return RunConfig(
        dataset="npz-folder", data_root=str(tmp_path), model="mlp", lr=0.05, workers="0"
    )


def test_hubers_loss_and_the_error_in_the_unit() -> None:
    objective = objective_of(DataShape((3,), 0, target=Target(UNIT, mean=80.0, std=10.0)))
    assert isinstance(objective, Regression)
    outputs, targets = torch.tensor([[1.0], [0.0], [4.0]]), torch.tensor([0.5, 0.0, 1.0])
    # Errors of 0.5, 0 and 3 deviations: 0.5²/2, 0, and 3 - 1/2.
    assert objective.loss(outputs, targets, "none").tolist() == [0.125, 0.0, 2.5]
    assert float(objective.loss(outputs, targets)) == pytest.approx(2.625 / 3)
    assert objective.scores(outputs, targets).tolist() == [5.0, 0.0, 30.0]
    assert objective.measure == ERROR
    classes = objective_of(DataShape((3,), 2))
    assert classes.measure == ACCURACY
    scores = classes.scores(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([1, 1]))
    assert scores.tolist() == [1.0, 0.0]


def test_a_test_measures_the_mean_absolute_error() -> None:
    network = Network(models.build("mclr", (2,), 1), Regression(Target(UNIT, std=10.0)))
    network.weights.zero_()
    y = np.array([1.0, -2.0, 0.0, 3.0], np.float32)
    error, loss = evaluate(network, Samples(np.zeros((4, 2), np.float32), y))
    assert error == pytest.approx(15.0)
    assert loss == pytest.approx((0.5 + 1.5 + 0.0 + 2.5) / 4)
    assert isinstance(network.objective, Objective)


def test_stacked_clients_learn_and_measure_what_they_do_alone(config: RunConfig) -> None:
    config = experiment.resolve(config)
    record = models.initial_arrays(config)
    replies: list[list[RecordDict]] = []
    for executor in (InProcess(client_app.app), Stacked(torch.device("cpu"))):
        messages = [
            message_to(node, kind, arrays=record, config=ConfigRecord({"task": node, "version": 0}))
            for kind in ("train", "evaluate")
            for node in range(3)
        ]
        for message in messages:
            node = message.metadata.dst_node_id
            own = {"partition-id": node, "num-partitions": 3}
            context = Context(1, node, own, RecordDict(), config.to_mapping())
            executor.submit(message, context, due=0.0)
        replies.append([executor.result(m.metadata.message_id).content for m in messages])
    for alone, stacked in zip(*replies, strict=True):
        assert alone["config"] == stacked["config"]
        assert alone["metrics"].keys() == stacked["metrics"].keys()
        for name, value in alone["metrics"].items():
            assert stacked["metrics"][name] == pytest.approx(value, rel=1e-4)
    tested = replies[0][-1]
    assert tested["config"]["unit"] == UNIT
    assert "accuracy" not in tested["metrics"]
    # The next hour's mean deviation from the mean is about 60 · 2/π.
    assert 20 < tested["metrics"]["mae"] < 80


def test_errors_are_better_the_smaller_they_are() -> None:
    assert ERROR.reaches(20.0, 20.0)
    assert not ERROR.reaches(20.1, 20.0)
    assert not ERROR.reaches(math.nan, 20.0)
    assert ACCURACY.reaches(0.95, 0.95)
    assert not ACCURACY.reaches(0.94, 0.95)
    assert (ERROR.better(3.0, 2.0), ACCURACY.better(3.0, 2.0)) == (2.0, 3.0)
    # Within 1 % of 10, from the third on; an accuracy would have to be within 0.01.
    errors = [30.0, 10.2, 10.1, 9.9, 10.0]
    assert convergence_index(errors, ERROR) == 2
    assert convergence_index(errors) == 4
    # Above the best so far by 0, 0, 0, 0 and 0.1.
    assert unrest(errors, ERROR) == pytest.approx(0.02)
    plan = Plan(target_accuracy=20.0, stop_at_target=True)
    for error, reached in ((19.0, True), (21.0, False)):
        report = Evaluated(1.0, 1, error, 0.1, 1, {"a": (0, error, 0.1)}, 1, measure=ERROR)
        assert plan.is_reached(report) is reached


def test_an_evaluation_is_of_errors_if_the_clients_say_so() -> None:
    scores = {
        name: score_from({"mae": mae, "loss": 0.5, "num-examples": count}, 0, measure=ERROR)
        for name, mae, count in (("a", 10.0, 1), ("b", 30.0, 3))
    }
    assert all(isinstance(score, ClientScore) for score in scores.values())
    evaluation = Evaluation(0.0, 4, 1, cells={name: [(PRESENT, 0)] for name in scores})
    evaluation.scores = {name: [score] for name, score in scores.items() if score is not None}
    report = evaluation.report()
    assert isinstance(report, Evaluated)
    assert (report.accuracy, report.weighted_accuracy, report.measure) == (20.0, 25.0, ERROR)
    # A diverged model has an infinite error; a negative error is invalid, like a negative accuracy.
    diverged = score_from({"mae": math.nan, "loss": math.nan}, 0, measure=ERROR)
    assert diverged is not None
    assert diverged.accuracy == math.inf
    with pytest.raises(InvalidReplyError, match="from 0 on"):
        score_from({"mae": -1.0}, 0, measure=ERROR)
    assert score_from({"accuracy": 0.5}, 0, measure=ERROR) is None


def test_a_summary_of_errors_by_hand() -> None:
    events = [
        Evaluated(t, t, value, 1.0, 1, {"a": (0, value, 1.0)}, 1, {}, value, measure=ERROR)
        for t, value in ((0, 50.0), (1, 19.0), (2, 18.0), (3, 18.1))
    ]
    summary = summarise(events, strategy="s", dataset="d", seed=0, wall_time=1.0, target=18.0)
    assert {name: summary[name] for name in ("measure", "unit", "mae", "best_mae")} == {
        **{"measure": "mae", "unit": UNIT, "mae": 18.1, "best_mae": 18.0}
    }
    assert "accuracy" not in summary
    assert summary["time_to_target"]["updates"] == 2
    assert summary["time_to_convergence"]["updates"] == 2
    assert summary["unrest"] == pytest.approx(0.025)
    assert Measure.of(summary) == ERROR
    assert Measure.of({"accuracy": 0.5}) == ACCURACY


def test_the_best_point_of_a_sweep_has_the_smallest_error() -> None:
    def point(label: str, mae: float | None) -> Result:
        summary = {"measure": "mae", "unit": UNIT, "mae": mae, "best_weighted_mae": 1.0}
        return Result(ComparedMethod(label, "fedasync"), label, (Run(0, label, summary),))

    tried = [point("a", 30.0), point("b", 20.0), point("c", None)]
    assert best_of(tried).label == "b"
    assert Run(0, "", tried[0].runs[0].summary, score=Score.BEST_WEIGHTED).accuracy == 1.0


def test_a_comparison_shows_errors_in_their_unit() -> None:
    summary = {
        **{"measure": "mae", "unit": UNIT, "mae": 18.1, "best_mae": 17.9, "target": 20.0},
        **{"time_to_target": {"virtual_time": 5.0}, "virtual_time": 9.0, "updates": 40},
        **{"purity": None, "unrest": 0.25},
    }
    method = ComparedMethod("a", "fedasync")
    result = Result(method, "a", (Run(0, "a/seed-0", summary),))
    suite = Suite("Air", (method,), {"dataset": "npz-folder"}, (0,), shows_unrest=True)
    comparison = Comparison(suite, (result,))
    table = main_table(comparison)
    assert table.title == "Air (seed 0, target 20 µg/m³)"
    shown = dict(zip(table.columns, table.rows[0], strict=True))
    assert (shown["MAE (µg/m³)"], shown["unrest"]) == ("18.10", "0.25")
    assert any("µg/m³ by which the MAE is above" in line for line in table.lines)
    assert to_csv(comparison).splitlines()[0].count("mae") == 7
    entry = json.loads(to_json(comparison))
    assert (entry["measure"], entry["methods"][0]["mae"]["mean"]) == ("mae", 18.1)


@pytest.mark.pictures
def test_a_run_ends_at_its_target_error_and_says_so_everywhere(
    config: RunConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = config.with_values(
        out=str(out),
        strategy="fedasync",
        max_updates=60,
        local_epochs=4,
        target_accuracy=30.0,
        eval_every=6,
    )
    outcome = experiment.simulate(config)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["reason"] == "the target MAE of 30 was reached"
    assert summary["mae"] <= 30.0 == summary["target"]
    assert outcome.unwritten == {}
    record = read_run(out)
    assert record.measure == ERROR
    errors = record.evaluations.accuracy
    assert errors[-1] <= 30.0 < errors[-2]
    rows = dict(summary_rows(summary))
    assert rows["MAE"].endswith("µg/m³), mean over clients")
    page = run_page(out, "")
    assert "Mean absolute error" in page
    assert "µg/m³" in page
    # Only the visible text counts; the live part's labels are chosen by its script.
    assert "Accuracy" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)


@pytest.mark.parametrize(
    ("strategy", "option", "value"),
    [
        ("flexcfl", "detect", "direction"),
        ("flexcfl-async", "detect", "direction"),
        ("feddrift", "measure", "loss"),
        ("feddrift-async", "measure", "loss"),
        ("flux", "warmup", "20"),
    ],
)
def test_methods_that_need_classes_say_how_to_do_without(
    config: RunConfig, strategy: str, option: str, value: str
) -> None:
    keys = {**config.to_mapping(), "strategy": strategy}
    with pytest.raises(UserError, match=rf"are quantities, and {strategy} .* unless {option}="):
        experiment.build_strategy(RunConfig.from_mapping(keys))
    keys[f"{strategy}.{option}"] = value
    assert not experiment.build_strategy(RunConfig.from_mapping(keys)).needs.classes


def test_labels_that_are_quantities_cannot_be_counted(config: RunConfig) -> None:
    keys = {**config.to_mapping(), "strategy": "fedrc"}
    with pytest.raises(UserError, match="fedrc has clients count their labels"):
        experiment.build_strategy(RunConfig.from_mapping(keys))


def test_an_accuracy_above_1_is_still_refused(config: RunConfig) -> None:
    assert experiment.resolve(config).target_accuracy == 20.0
    with pytest.raises(UserError, match=r"target-accuracy must be at most 1, got 1.5"):
        experiment.resolve(RunConfig(target_accuracy=1.5))
    assert datasets.data_shape(RunConfig()).outputs == 10
