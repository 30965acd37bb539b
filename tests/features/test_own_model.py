"""A client's own model beside the received one: training, the choice, cost, and what a run says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from nodes import CONFIG, INITIAL, SPEC, context, message, node_context
from scipy.stats import ttest_1samp

from raceme.client_app import app
from raceme.core.chain import Chain
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import from_array, to_array
from raceme.features.own_model.client import _chances_to_be_best
from raceme.features.own_model.server import OwnModel
from raceme.runs.experiment import simulate
from raceme.simulation.devices import training_cost

OWN = {"own-model": 0.25}
MIXED = {"completed-by": "own-mixture", **OWN}
FEATURES = Chain({"own-model": OwnModel()})


def moved(by: float) -> ArrayRecord:
    return SPEC.pack(SPEC.unpack(INITIAL) + np.float32(by))


def own_of(node: object) -> np.ndarray:
    return SPEC.unpack(node.state["own-line"])  # type: ignore[attr-defined]


def test_the_upload_stays_what_it_was_and_the_own_model_trains_on_fewer_samples() -> None:
    node, plain = context(0), context(0)
    for task, model in ((1, INITIAL), (2, moved(0.5))):
        upload = app(message("train", {"task": task, **OWN}, model), node).content["arrays"]
        alone = app(message("train", {"task": task}, model), plain).content["arrays"]
        assert upload == alone
        assert not np.array_equal(own_of(node), SPEC.unpack(upload))  # type: ignore[arg-type]
    assert "own-line" not in plain.state


def test_the_own_model_trains_for_an_ordinary_task_in_a_probe() -> None:
    probed, trained = context(0), context(0)
    short = {"local-steps": 1, "task-share": 0.2}
    upload = app(message("train", {"task": 1, **short, **OWN}), probed).content["arrays"]
    whole = app(message("train", {"task": 1, **OWN}), trained).content["arrays"]
    assert upload != whole
    assert np.array_equal(own_of(probed), own_of(trained))


def test_a_probe_meets_half_of_the_samples_and_the_own_model_all() -> None:
    settings, taught = {"local-epochs": 1, "task-share": 0.5}, []
    for half in (0, 1):
        node = context(0)
        asked = message("train", {"task": 1, **settings, "half": half, **OWN})
        taught.append((app(asked, node).content["arrays"], own_of(node)))
    (first, own), (second, same) = taught
    assert first != second
    assert np.array_equal(own, same)


def test_a_client_of_one_sample_trains_it_and_uses_what_it_receives(tmp_path: Path) -> None:
    path, x = tmp_path / "d.npz", np.ones((1, 1), np.float32)
    np.savez(path, x_train=x, y_train=[1], x_test=x, y_test=[1], num_classes=2)
    config = RunConfig(dataset="npz", model="mclr", lr=0.1).with_values(data_file=str(path))
    node = node_context({"device-id": "a"}, config)
    app(message("train", {"task": 1, **OWN}, line(1.0)), node)
    assert node.state["own-line"] != line(1.0)
    tested = app(message("evaluate", MIXED, line(1.0)), node).content["metrics"]
    assert tested["loss"] == pytest.approx(np.log1p(np.exp(-1.0)), rel=1e-5)


def test_a_training_that_diverges_leaves_the_own_model_as_it_was() -> None:
    node = context(0)
    app(message("train", {"task": 1, **OWN}), node)
    before = own_of(node).copy()
    app(message("train", {"task": 2, "lr": 1e20, **OWN}), node)
    assert np.array_equal(own_of(node), before)


# One feature x, 1 of class 1 and -1 of class 0: a line of a slope above 0 is right everywhere, with
# the loss log(1 + exp(-slope)).
def line(slope: float) -> ArrayRecord:
    values = {"weight": [[0.0], [slope]], "bias": [0.0, 0.0]}
    arrays = {f"output.{name}": to_array(np.array(v, np.float32)) for name, v in values.items()}
    return ArrayRecord(arrays)


def classes(count: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % 2
    return (2.0 * labels[:, None] - 1.0).astype(np.float32), labels


def node_with(path: Path, x: np.ndarray, y: np.ndarray, **further: str) -> Context:
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, **further)  # type: ignore[arg-type]
    config = RunConfig(dataset="npz", model="mclr", lr=0.1).with_values(data_file=str(path))
    return node_context({"device-id": "a"}, config)


@pytest.mark.parametrize(("received", "own"), [(-4.0, 4.0), (4.0, -4.0), (1.0, 3.0), (-3.0, -1.0)])
def test_a_client_uses_the_posterior_mean_of_mixtures(
    tmp_path: Path, received: float, own: float
) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    node.state["own-line"] = line(own)
    tested = app(message("evaluate", MIXED, line(received)), node).content["metrics"]
    # Two samples are kept, each of which has the loss log(1 + exp(-slope)).
    slopes = received + np.linspace(0.0, 1.0, 5) * (own - received)
    likelihood = (1.0 + np.exp(-slopes)) ** -2.0
    slope = slopes @ likelihood / likelihood.sum()
    assert tested["loss"] == pytest.approx(np.log1p(np.exp(-slope)), rel=1e-5)
    alone = app(message("evaluate", {}, line(received)), node).content["metrics"]
    assert alone["loss"] == pytest.approx(np.log1p(np.exp(-received)), rel=1e-5)
    # From there its own model continues: trained at a rate at which nothing changes.
    app(message("train", {"task": 1, "lr": 1e-9, **OWN}, line(received)), node)
    kept = from_array(node.state["own-line"]["output.weight"])  # type: ignore[index]
    assert kept[1, 0] == pytest.approx(slope, rel=1e-5)


def test_an_own_model_is_the_best_as_surely_as_samples_agree() -> None:
    losses = np.array([2.0, 1.6, 2.3, 1.9, 2.2])
    gains = np.array([0.1, 0.05, -0.04, 0.08, 0.0])
    lines = losses - np.linspace(0.0, 1.0, 5)[:, None] * gains

    def share(lines: np.ndarray) -> float:
        drawn = [_chances_to_be_best(lines, np.random.default_rng(seed)) for seed in range(100)]
        chances = np.mean(drawn, axis=0)
        assert chances.sum() == pytest.approx(1.0)
        return float(chances @ np.linspace(0.0, 1.0, 5))

    # Losses are linear in the share: only 0 and 1 are ever best, by Student's test of the gains.
    for samples in (2, 5):
        p_value = ttest_1samp(gains[:samples], 0.0).pvalue
        assert share(lines[:, :samples]) == pytest.approx(1 - p_value / 2, abs=0.01)
    assert share(lines * 0.01) == pytest.approx(share(lines))
    # Equal models are equally good, and one sample says nothing.
    for unknown in (lines[[0] * 5], lines[:, :1]):
        assert share(unknown) == pytest.approx(0.5)


def test_a_client_that_is_surely_better_off_alone_trains_a_copy_on_all_samples(
    tmp_path: Path,
) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    half = {"own-model": 0.5, "local-epochs": 1, "batch-size": 1}

    def train(task: int, slope: float) -> float:
        asked = message("train", {"task": task, **half}, line(slope))
        cost = training_cost(asked, node, 8, FEATURES)
        app(asked, node)
        assert cost is not None
        return cost.scale

    def slope(name: str) -> float:
        weights = from_array(node.state[name]["output.weight"])  # type: ignore[index]
        return float(weights[1, 0] - weights[0, 0])

    node.state["own-line"] = line(4.0)
    ordinary = [train(task, 3.0) for task in range(1, 6)]
    # Five tasks in a row were sure, and the sixth trains the copy, at a cost: eight steps on
    # samples that are all fitted alike, where the own model has four.
    assert len(set(ordinary)) == 1
    before = slope("own-line")
    assert slope("own-whole") == before
    assert train(6, 3.0) == ordinary[0] + 1.0
    gained = slope("own-line") - before
    assert slope("own-whole") - before == pytest.approx(2 * gained, rel=0.1)
    # It is used in place of the own model, and given up when the others' is as good.
    tested = app(message("evaluate", {**MIXED, **half}, line(-400.0)), node).content["metrics"]
    assert tested["loss"] == pytest.approx(np.log1p(np.exp(-slope("own-whole"))), rel=1e-3)
    train(7, 40.0)
    assert "own-whole" not in node.state
    assert train(8, 3.0) == ordinary[0]


def test_a_received_model_out_of_all_bounds_costs_the_own_one_no_precision(tmp_path: Path) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    node.state["own-line"] = line(4.0)
    tested = app(message("evaluate", MIXED, line(-1e9)), node).content["metrics"]
    assert tested["loss"] == pytest.approx(np.log1p(np.exp(-4.0)), rel=1e-5)
    app(message("train", {"task": 1, "lr": 1e-9, **OWN}, line(-1e9)), node)
    assert from_array(node.state["own-line"]["output.weight"])[1, 0] == 4.0  # type: ignore[index]


def test_a_client_that_trains_alone_keeps_its_model_where_the_likelihood_does(
    tmp_path: Path,
) -> None:
    x, y = classes(8)
    # Gains that differ by sample leave some doubt, and their sum, the likelihood, hardly any.
    node = node_with(tmp_path / "d.npz", x * np.geomspace(0.05, 4.0, 8)[:, None], y)
    node.state["own-line"], node.state["own-sure"] = line(4.0), ConfigRecord({"tasks": 5})
    app(message("train", {"task": 1, "own-model": 0.5, "lr": 1e-9}, line(-20.0)), node)
    assert "own-whole" in node.state
    kept = from_array(node.state["own-line"]["output.weight"])  # type: ignore[index]
    assert kept[1, 0] == pytest.approx(4.0, abs=0.2)


def test_a_client_that_trains_alone_takes_nothing_of_a_poisoned_model(tmp_path: Path) -> None:
    # It is right of two samples in three, and its losses vary too much for Student's t to be sure.
    x, labels = classes(20)
    x[::3] *= -1.0
    node = node_with(tmp_path / "d.npz", x, labels)
    node.state["own-line"] = line(2.2)
    node.state["own-sure"] = ConfigRecord({"tasks": 50})
    for task in range(1, 20):
        app(message("train", {"task": task, "lr": 1e-9, "own-model": 0.5}, line(1e5)), node)
        kept = from_array(node.state["own-line"]["output.weight"])  # type: ignore[index]
        assert kept[1, 0] - kept[0, 0] == pytest.approx(2.2, abs=0.01)


@pytest.mark.parametrize("unit", [1.0, 0.01])
def test_of_a_quantity_the_noise_is_unknown(tmp_path: Path, unit: float) -> None:
    x = np.array([-1.0, 1.0] * 4, np.float32)[:, None] * unit
    node = node_with(tmp_path / "d.npz", x, x[:, 0], unit="m")

    def slope(value: float) -> ArrayRecord:
        values = {"weight": [[value]], "bias": [0.0]}
        arrays = {f"output.{k}": to_array(np.array(v, np.float32)) for k, v in values.items()}
        return ArrayRecord(arrays)

    node.state["own-line"] = slope(0.8)
    tested = app(message("evaluate", MIXED, slope(0.0)), node).content["metrics"]
    # The true slope is 1: of two samples kept, each mixture has the likelihood 1 / error^2.
    errors = np.array([1.0, 0.8, 0.6, 0.4, 0.2])
    used = (1 - errors) @ errors**-2 / (errors**-2).sum()
    assert tested["loss"] == pytest.approx(unit**2 * (1 - used) ** 2 / 2, rel=1e-4)


def test_a_useless_own_model_is_not_mixed_in() -> None:
    node = context(0)
    # Not all weights alike: all classes would be equally likely, which is no bad guess.
    useless = 1e12 * np.random.default_rng(0).standard_normal(SPEC.size)
    node.state["own-line"] = SPEC.pack(useless.astype(np.float32))
    mixed = app(message("evaluate", MIXED), node).content["metrics"]
    assert mixed == app(message("evaluate"), node).content["metrics"]


def test_a_client_that_has_not_trained_uses_what_it_received() -> None:
    node = context(3)
    mixed = app(message("evaluate", MIXED), node).content["metrics"]
    assert mixed == app(message("evaluate"), node).content["metrics"]


def test_what_an_own_model_costs_is_charged() -> None:
    def scale(**settings: object) -> float:
        content = RecordDict({"arrays": INITIAL, "config": ConfigRecord(settings)})  # type: ignore[arg-type]
        asked = Message(content, dst_node_id=7, message_type="train")
        cost = training_cost(asked, context(0), 20, FEATURES)
        assert cost is not None
        return cost.scale

    # Three quarters of the samples again, and a forward pass of a quarter through five mixtures,
    # beside two passes over all samples of three forward passes each.
    own = 0.75 + 0.25 * 5 / 6
    assert scale() == 1.0
    assert scale(**OWN, **{"local-epochs": 2}) == pytest.approx(1.0 + own)
    assert scale(**OWN, **{"local-epochs": 2, "compute-scale": 0.25}) == pytest.approx(0.25 + own)
    assert scale(**OWN, **{"compute-scale": 0.25, "kind": "losses"}) == 0.25
    # A number of mini-batches is the same of fewer samples; of 20 samples 8 pass thrice.
    assert scale(**OWN, **{"local-steps": 2, "batch-size": 4}) == pytest.approx(2 + 0.25 * 5 / 1.2)
    # Two of five mini-batches of two passes: an own model trains for the other three as well.
    probe = {"local-epochs": 2, "batch-size": 4, "local-steps": 4, "task-share": 0.4}
    assert 0.4 * scale(**OWN, **probe) == pytest.approx(0.4 + own)


def test_panicle_has_it_by_default(tmp_path: Path) -> None:
    def ended(name: str, **keys: object) -> float:
        config = RunConfig(strategy="panicle", clients=4, max_updates=8, workers="0")
        result = simulate(config.with_values(out=str(tmp_path / name), **keys))
        return float(result.summary["virtual_time"])

    default = ended("default")
    assert default == ended("on", own_model=True)
    off = ended("off", own_model=False)
    assert off < default
    # Nothing to validate with.
    assert off == ended("none", validation_share=0.0)


def test_where_clients_have_nothing_in_common_none_is_worse_off_than_alone(
    tmp_path: Path,
) -> None:
    def accuracy(name: str, strategy: str, **keys: object) -> float:
        config = RunConfig(
            strategy=strategy,
            clients=4,
            max_updates=24,
            eval_every=24,
            validation_share=0.2,
            devices="uniform",
            workers="0",
            out=str(tmp_path / name),
        )
        return float(simulate(config.with_values(**keys)).summary["accuracy"])

    alone, shared = accuracy("alone", "standalone"), accuracy("shared", "fedasync")
    both = accuracy("both", "fedasync", own_model=True)
    assert shared < alone - 0.1
    assert both > alone - 0.02


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"validation_share": 0.0}, "own-model compares models on held-out samples"),
        ({"strategy": "apd"}, "own-model mixes whole models"),
        ({"strategy": "apfl"}, "own-model mixes whole models"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(keys: dict[str, object], problem: str) -> None:
    config = CONFIG.with_values(own_model=True, **keys)
    with pytest.raises(UserError, match=problem):
        simulate(config)
