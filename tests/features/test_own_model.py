"""A client's own model beside the received one: training, choice, cost and summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from nodes import CONFIG, INITIAL, SPEC, context, message, node_context
from scipy.stats import ttest_1samp

from raceme.client_app import app
from raceme.core.chain import Chain
from raceme.core.clusters import Clusters, Model
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import from_array, to_array
from raceme.core.requests import InFlight, Request, Update
from raceme.features.own_model.client import _moved
from raceme.features.own_model.server import ModelComparison, OwnModel, chance_above_zero
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


def test_the_changes_of_two_probes_make_a_clients_first_own_model() -> None:
    node, probed = context(0), {"task-share": 0.2, "local-steps": 1, **OWN, "own-rule": "probed"}

    def change(task: int) -> np.ndarray:
        upload = app(message("train", {"task": task, **probed}), node).content["arrays"]
        return SPEC.unpack(upload) - SPEC.unpack(INITIAL)  # type: ignore[arg-type]

    first = change(1)
    assert own_of(node) == pytest.approx(SPEC.unpack(INITIAL) + first, abs=1e-6)
    skipped = {"task": 2, **OWN, "own-rule": "skipped"}
    app(message("train", skipped, moved(0.5)), node)
    both = first + change(3)
    assert own_of(node) == pytest.approx(SPEC.unpack(INITIAL) + both, abs=1e-6)
    # A third probe trains on samples of the first or the second.
    change(4)
    assert own_of(node) == pytest.approx(SPEC.unpack(INITIAL) + both, abs=1e-6)


def test_of_two_probes_the_second_gives_statistics_of_batch_normalisation(tmp_path: Path) -> None:
    x, y = np.array([[5.0, 1.0], [1.0, 3.0]], np.float32), [0, 1]
    np.savez(tmp_path / "pair.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = RunConfig(dataset="npz", model="networks:batch_norm_only", lr=1.0)
    config = config.with_values(data_file=str(tmp_path / "pair.npz"))
    node = node_context({"device-id": "a"}, config)
    arrays = {
        "weight": np.ones(2, np.float32),
        "bias": np.zeros(2, np.float32),
        "running_mean": np.zeros(2, np.float32),
        "running_var": np.ones(2, np.float32),
        "num_batches_tracked": np.array(0),
    }
    initial = ArrayRecord({name: to_array(values) for name, values in arrays.items()})
    probed = {"task-share": 0.2, "local-steps": 1, "batch-size": 2, **OWN, "own-rule": "probed"}
    for task in (1, 2):
        app(message("train", {"task": task, **probed}, initial), node)
    own = {name: from_array(array) for name, array in node.state["own-line"].items()}  # type: ignore[union-attr]
    # A step moves γ by 1 - 1 / (1 + exp(-2)) = 0.1192 on both samples, by twice that in the sum.
    assert own["weight"] == pytest.approx(1 + 2 * 0.1192, abs=1e-3)
    assert own["running_var"] == pytest.approx([0.9 + 0.1 * 8.0, 0.9 + 0.1 * 2.0], rel=1e-5)
    assert own["num_batches_tracked"] == 1


def test_a_probe_adds_nothing_to_an_own_model_that_has_been_trained() -> None:
    node, probed = context(0), {"task-share": 0.2, "local-steps": 1, **OWN, "own-rule": "probed"}
    app(message("train", {"task": 1, **probed}), node)
    app(message("train", {"task": 2, **OWN, "own-rule": "joint"}), node)
    trained = own_of(node).copy()
    app(message("train", {"task": 3, **probed}), node)
    assert np.array_equal(own_of(node), trained)


def test_a_task_without_own_model_gives_a_client_its_first() -> None:
    node, skipped = context(0), {**OWN, "own-rule": "skipped"}
    upload = app(message("train", {"task": 1, **skipped}), node).content["arrays"]
    assert np.array_equal(own_of(node), SPEC.unpack(upload))  # type: ignore[arg-type]
    app(message("train", {"task": 2, **skipped}, moved(0.5)), node)
    probed = {"task": 3, "task-share": 0.2, "local-steps": 1, **OWN, "own-rule": "probed"}
    app(message("train", probed), node)
    assert np.array_equal(own_of(node), SPEC.unpack(upload))  # type: ignore[arg-type]


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
    before, base = own_of(node).copy(), node.state["own-base"]
    app(message("train", {"task": 2, "lr": 1e20, **OWN}, moved(0.5)), node)
    assert np.array_equal(own_of(node), before)
    assert node.state["own-base"] == base


# One feature x, 1 for class 1 and -1 for class 0: a line with a positive slope classifies all
# samples correctly, with the loss log(1 + exp(-slope)).
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
    # Two samples are held out, each with the loss log(1 + exp(-slope)).
    slopes = received + np.linspace(0.0, 1.0, 5) * (own - received)
    likelihood = (1.0 + np.exp(-slopes)) ** -2.0
    slope = slopes @ likelihood / likelihood.sum()
    assert tested["loss"] == pytest.approx(np.log1p(np.exp(-slope)), rel=1e-5)
    alone = app(message("evaluate", {}, line(received)), node).content["metrics"]
    assert alone["loss"] == pytest.approx(np.log1p(np.exp(-received)), rel=1e-5)
    # The own model continues from the mixture: the learning rate is too small to change it.
    app(message("train", {"task": 1, "lr": 1e-9, **OWN}, line(received)), node)
    kept = from_array(node.state["own-line"]["output.weight"])  # type: ignore[index]
    assert kept[1, 0] == pytest.approx(slope, rel=1e-5)


def slope_of(record: ArrayRecord) -> float:
    weights = from_array(record["output.weight"])
    return float(weights[1, 0] - weights[0, 0])


def test_a_client_on_trial_trains_from_itself_and_scores_both_models(tmp_path: Path) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    tried = {**OWN, "own-rule": "tried", "validation-share": 0.25, "lr": 1e-9}
    first = app(message("train", {"task": 1, **tried}, line(-4.0)), node).content["metrics"]
    # The first own model is the received one, so that there is nothing to compare.
    assert "own-score" not in first
    node.state["own-line"] = line(4.0)
    reply = app(message("train", {"task": 2, **tried}, line(-4.0)), node).content
    assert slope_of(node.state["own-line"]) == pytest.approx(4.0)  # type: ignore[arg-type]
    # A positive slope classifies all samples correctly, a negative one none.
    names = ("own-score", "common-score", "received-score")
    assert [reply["metrics"][name] for name in names] == [1.0, 0.0, 0.0]
    assert reply["metrics"]["num-examples"] == 6
    # A step of 20 on six samples moves the received slope from -4.0 to 15.6.
    steps = {"local-steps": 1, "batch-size": 6, "lr": 20.0}
    reply = app(message("train", {"task": 3, **tried, **steps}, line(-4.0)), node).content
    assert [reply["metrics"][name] for name in names] == [1.0, 1.0, 0.0]


def test_a_joint_training_moves_the_mixture_and_uploads_its_change(tmp_path: Path) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    node.state["own-line"] = line(40.0)
    steps = {"local-steps": 1, "batch-size": 6, "lr": 0.1}
    joint = {**OWN, "own-rule": "joint", "validation-share": 0.25, **steps}
    reply = app(message("train", {"task": 1, **joint}, line(-4.0)), node).content
    # Of the shares 0, 1/4, ..., 1 the slopes -4, 7, 18, 29, 40 have, by two kept samples, the
    # likelihoods 0.0003, 0.998, 1, 1, 1: their mean is 23.5, and a step from there moves nothing.
    slopes = np.array([-4.0, 7.0, 18.0, 29.0, 40.0])
    likelihood = (1.0 + np.exp(-slopes)) ** -2.0
    mixture = slopes @ likelihood / likelihood.sum()
    assert slope_of(node.state["own-line"]) == pytest.approx(mixture)  # type: ignore[arg-type]
    assert slope_of(reply["arrays"]) == pytest.approx(-4.0, abs=1e-5)  # type: ignore[arg-type]
    assert reply["metrics"]["num-examples"] == 6
    # From the slope 0 a step of 0.1 with a gradient of 1/2 for each class moves it by 0.1.
    node = node_with(tmp_path / "d.npz", *classes(8))
    node.state["own-line"] = line(0.0)
    reply = app(message("train", {"task": 2, **joint}, line(0.0)), node).content
    assert slope_of(node.state["own-line"]) == pytest.approx(0.1)  # type: ignore[arg-type]
    assert slope_of(reply["arrays"]) == pytest.approx(0.1)  # type: ignore[arg-type]


def test_a_client_alone_uploads_the_change_of_its_own_model(tmp_path: Path) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    node.state["own-line"] = line(0.0)
    asked = {"task": 1, **OWN, "own-rule": "alone", "local-steps": 1, "batch-size": 8, "lr": 0.1}
    reply = app(message("train", asked, line(-7.0)), node).content
    assert slope_of(node.state["own-line"]) == pytest.approx(0.1)  # type: ignore[arg-type]
    # From -7.0 itself a step would move the slope by almost 0.2.
    assert slope_of(reply["arrays"]) == pytest.approx(-6.9)  # type: ignore[arg-type]
    assert reply["metrics"]["num-examples"] == 8


def test_a_client_alone_trains_on_all_samples_and_takes_nothing_of_others(tmp_path: Path) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    node.state["own-line"] = line(4.0)
    steps = {"local-epochs": 1, "batch-size": 1, "own-model": 0.5, "lr": 0.01}
    for rule in ("tried", "alone"):
        before = slope_of(node.state["own-line"])  # type: ignore[arg-type]
        asked = {"task": 1, **steps, "own-rule": rule}
        reply = app(message("train", asked, line(-1e5)), node).content["metrics"]
        moves = slope_of(node.state["own-line"]) - before  # type: ignore[arg-type]
        if rule == "tried":
            fewer = moves
    # Eight steps instead of four, on samples that are all fitted alike; no comparison is made.
    assert moves == pytest.approx(2 * fewer, rel=0.05)
    assert "own-score" not in reply
    tested = app(message("evaluate", MIXED, line(-400.0)), node).content["metrics"]
    own = slope_of(node.state["own-line"])  # type: ignore[arg-type]
    assert tested["loss"] == pytest.approx(np.log1p(np.exp(-own)), rel=1e-5)


def test_a_received_model_out_of_all_bounds_costs_the_own_one_no_precision(tmp_path: Path) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    node.state["own-line"] = line(4.0)
    tested = app(message("evaluate", MIXED, line(-1e9)), node).content["metrics"]
    assert tested["loss"] == pytest.approx(np.log1p(np.exp(-4.0)), rel=1e-5)
    app(message("train", {"task": 1, "lr": 1e-9, **OWN}, line(-1e9)), node)
    assert from_array(node.state["own-line"]["output.weight"])[1, 0] == 4.0  # type: ignore[index]


@pytest.mark.parametrize("unit", [1.0, 0.01])
def test_of_a_quantity_the_noise_is_unknown(tmp_path: Path, unit: float) -> None:
    node = quantity(tmp_path / "d.npz", unit)
    node.state["own-line"] = slope(0.8)
    tested = app(message("evaluate", MIXED, slope(0.0)), node).content["metrics"]
    # The true slope is 1: by two held-out samples, each mixture has the likelihood 1 / error^2.
    errors = np.array([1.0, 0.8, 0.6, 0.4, 0.2])
    used = (1 - errors) @ errors**-2 / (errors**-2).sum()
    assert tested["loss"] == pytest.approx(unit**2 * (1 - used) ** 2 / 2, rel=1e-4)


def quantity(path: Path, unit: float = 1.0) -> Context:
    """A client whose quantity is its only input: the true slope is 1."""
    x = np.array([-1.0, 1.0] * 4, np.float32)[:, None] * unit
    return node_with(path, x, x[:, 0], unit="m")


def slope(value: float) -> ArrayRecord:
    values = {"weight": [[value]], "bias": [0.0]}
    return ArrayRecord(
        {f"output.{k}": to_array(np.array(v, np.float32)) for k, v in values.items()}
    )


STILL = {**OWN, "lr": 1e-9, "validation-share": 0.25}


@pytest.mark.parametrize("rule", ["skipped", "joint", "mixed", "tried", "probed"])
def test_an_own_model_moves_with_the_received_one_beside_which_it_was_trained(
    tmp_path: Path, rule: str
) -> None:
    node = quantity(tmp_path / "d.npz")
    for number, asked in enumerate(["probed"] if rule == "probed" else ["skipped", rule]):
        settings = {"task": number, **STILL, "own-rule": asked}
        app(message("train", settings, slope(0.8)), node)
    tested = app(message("evaluate", MIXED, slope(0.3)), node).content["metrics"]
    if rule in ("tried", "probed"):
        # By two kept samples a mixture has the likelihood 1 / error^2.
        errors = np.array([0.7, 0.575, 0.45, 0.325, 0.2])
        error = errors @ errors**-2 / (errors**-2).sum()
    else:
        # What others have made of the received model, 0.3, they have made of the own one. As it
        # was it has 71 % of all likelihoods: 25 of 25 + 5 * 2.04.
        error = 0.7
    assert tested["loss"] == pytest.approx(error**2 / 2, rel=1e-4)


@pytest.mark.parametrize("rule", ["joint", "mixed"])
def test_the_moved_own_model_is_what_is_mixed_and_trained_further(
    tmp_path: Path, rule: str
) -> None:
    node = quantity(tmp_path / "d.npz")
    node.state["own-line"], node.state["own-base"] = slope(0.8), slope(0.5)
    # The own model moves to 0.5. As it was it has 66 % of the likelihoods.
    errors = np.array([0.8, 0.725, 0.65, 0.575, 0.5])
    error = errors @ errors**-2 / (errors**-2).sum()
    tested = app(message("evaluate", MIXED, slope(0.2)), node).content["metrics"]
    assert tested["loss"] == pytest.approx(error**2 / 2, rel=1e-4)
    app(message("train", {"task": 1, **STILL, "own-rule": rule}, slope(0.2)), node)
    trained = from_array(node.state["own-line"]["output.weight"]).item()  # type: ignore[index]
    assert trained == pytest.approx(1 - error, rel=1e-4)


def test_a_spoiled_received_model_does_not_move_the_own_one(tmp_path: Path) -> None:
    node = quantity(tmp_path / "d.npz")
    app(message("train", {"task": 1, **STILL, "own-rule": "skipped"}, slope(0.8)), node)
    # With an error of 2 mixtures have likelihoods of 1/4: 25 of 25 + 5 / 4 are more than 90 %.
    for received in (-1.0, 1e9):
        tested = app(message("evaluate", MIXED, slope(received)), node).content["metrics"]
        assert tested["loss"] == pytest.approx(0.2**2 / 2, rel=1e-4)


def test_statistics_of_batch_normalisation_do_not_move() -> None:
    names = ("weight", "bias", "running_mean", "running_var")

    def layer(*values: float) -> ArrayRecord:
        arrays = (to_array(np.array([value], np.float32)) for value in values)
        return ArrayRecord(dict(zip(names, arrays, strict=True)))

    own = layer(1, 2, 5, 6)
    found = _moved(own, layer(0.5, 0, 1, 1), layer(0.75, 1, 9, 9), statistics=own)
    assert [from_array(array).item() for array in found.values()] == [1.25, 3.0, 5.0, 6.0]


def test_a_useless_own_model_is_not_mixed_in() -> None:
    node = context(0)
    # Random weights: with equal ones all classes would be equally likely, which is a decent guess.
    useless = 1e12 * np.random.default_rng(0).standard_normal(SPEC.size)
    node.state["own-line"] = SPEC.pack(useless.astype(np.float32))
    mixed = app(message("evaluate", MIXED), node).content["metrics"]
    assert mixed == app(message("evaluate"), node).content["metrics"]


def test_a_client_that_has_not_trained_uses_what_it_received() -> None:
    node = context(3)
    mixed = app(message("evaluate", MIXED), node).content["metrics"]
    assert mixed == app(message("evaluate"), node).content["metrics"]


@pytest.mark.parametrize("values", [[0.3, 0.1], [0.1, 0.05, -0.04, 0.08, 0.0]])
def test_the_chance_of_a_mean_above_zero_is_students(values: list[float]) -> None:
    p_value = ttest_1samp(values, 0.0, alternative="greater").pvalue
    assert chance_above_zero(values) == pytest.approx(1 - p_value)


def test_of_one_value_or_of_zeros_nothing_is_known() -> None:
    assert chance_above_zero([0.7]) == chance_above_zero([0.0, 0.0, 0.0]) == 0.5
    assert (chance_above_zero([0.1, 0.1]), chance_above_zero([-0.1, -0.1])) == (1.0, 0.0)


class Seen:
    """The interface that the feature uses: clients of a cluster, and their models."""

    def __init__(self, clients: int, outputs: int) -> None:
        self.clusters = Clusters({0: Model(np.zeros(1, np.float32))})
        self.spec, self.updates = SimpleNamespace(outputs=outputs), 0
        self.names, self.away = [f"c{number}" for number in range(clients)], set[str]()
        for name in self.names:
            self.clusters.join(name)

    def examples(self, client: str) -> int:
        return int(client[1:])

    def is_online(self, client: str) -> bool:
        return client not in self.away


class Fleet:
    """Clients that are sent requests, and report scores."""

    def __init__(self, clients: int, outputs: int = 10, **keys: Any) -> None:
        config = RunConfig().with_values(**keys)
        self.feature, self.seen = OwnModel(config=config), Seen(clients, outputs)
        self.feature.on_start({}, {})

    def asked(self, client: str, **settings: float) -> Mapping[str, Any]:
        request = Request(client, settings=settings)
        return self.feature.on_request(request, self.seen).settings  # type: ignore[arg-type]

    def rules(self, tasks: int) -> list[Any]:
        return [self.asked("c0")["own-rule"] for _ in range(tasks)]

    def rule(self) -> str:
        """The rule of a cluster: mixtures are trained from with every second or third task."""
        return next((rule for rule in self.rules(3) if rule != "skipped"), "skipped")

    def round(self, *better: float, received: float = 0.0) -> None:
        """Let all clients train once, and report these differences in turn (NaN: none).

        The received model scores less by `received` than after a task.
        """
        for name, by in zip(self.seen.names, cycle(better), strict=False):
            self.asked(name)
            task = InFlight(1, name, self.seen.clusters.main(name), 0, 0, 0.0, 0)
            scores = {"common-score": 0.5, "received-score": 0.5 - received}
            told = {} if math.isnan(by) else {"own-score": 0.5 + by, **scores}
            update = Update(task, np.zeros(1, np.float32), 9, 0.0, told)
            self.feature.on_update(update, self.seen)  # type: ignore[arg-type]


def test_clients_train_alone_once_that_is_better_for_six_tasks() -> None:
    fleet = Fleet(6)
    assert fleet.asked("c0") == {"own-rule": "tried", "validation-share": 0.2}
    for _ in range(5):
        fleet.round(0.1, 0.2, 0.15)
    assert fleet.rule() == "tried"
    fleet.round(0.1, 0.2, 0.15)
    assert fleet.asked("c0") == fleet.asked("c5") == {"own-rule": "alone"}


def test_a_received_model_that_is_as_good_only_after_a_task_is_behind() -> None:
    # Of four clients on trial two are ahead and two behind, after a task; before it, all are ahead
    # by 0.4 and 0.2 (with a probability of 0.993), or two of them by 0.15.
    alone, together = Fleet(6), Fleet(6)
    for _ in range(6):
        alone.round(0.1, -0.1, received=0.3)
        together.round(0.1, -0.1, received=0.05)
    assert (alone.rule(), together.rule()) == ("alone", "tried")


def test_a_received_model_that_is_surely_better_after_a_task_is_not_behind() -> None:
    fleet = Fleet(6)
    for _ in range(4):
        fleet.round(-0.1, -0.2, received=0.5)
    assert fleet.rule() == "tried"
    fleet.round(-0.1, -0.2, received=0.5)
    assert fleet.rule() == "mixed"


@pytest.mark.parametrize(("lead", "rule"), [(0.25, "alone"), (0.15, "mixed")])
def test_trials_end_with_what_is_likely(lead: float, rule: str) -> None:
    # Leads of 0.3, 0.2, 0.4 and -0.01 over the received model have a probability of 0.96, by
    # Student's t of 3 degrees; less 0.1, of 0.87.
    fleet = Fleet(6)
    for _ in range(8):
        fleet.round(0.05, -0.05, 0.15, -0.26, received=lead)
    assert fleet.rule() == "tried"
    fleet.round(0.05, -0.05, 0.15, -0.26, received=lead)
    assert fleet.rule() == rule


def test_half_of_the_clients_are_on_trial_and_four_at_least() -> None:
    for clients, tried in ((3, 3), (6, 4), (8, 4), (9, 5), (24, 12)):
        fleet = Fleet(clients)
        for others in ("skipped", "joint", "skipped", "joint"):
            rules = [fleet.asked(name)["own-rule"] for name in fleet.seen.names]
            assert (rules.count("tried"), rules.count(others)) == (tried, clients - tried)
    fleet.asked("c5")
    assert fleet.asked("c5") == {"own-rule": "joint", "validation-share": 0.2}
    # Reports of the others do not count.
    for _ in range(5):
        fleet.round(-0.2, -0.1, -0.2, -0.1, *4 * [0.9], *8 * [-0.1, 0.9])
    assert fleet.rule() == "mixed"


def test_clients_do_not_train_alone_while_the_received_model_catches_up() -> None:
    fleet = Fleet(6)
    for task in range(8):
        fleet.round(0.5 - 0.04 * task, 0.51 - 0.04 * task)
    assert fleet.rule() == "tried"
    # From 0.5 the lead has come to 0.22, and its mean over few tasks is below that over more.
    fleet.round(0.18, 0.19)
    assert fleet.rule() == "mixed"
    # Only the lead over the adapted model shrinks, or only that over the received one.
    adapted, received = Fleet(6), Fleet(6)
    for task in range(8):
        adapted.round(0.5 - 0.04 * task, 0.51 - 0.04 * task, received=0.04 * task)
        received.round(0.3, 0.31, received=0.4 - 0.04 * task)
    assert (adapted.rule(), received.rule()) == ("tried", "tried")
    stopped = Fleet(6)
    for task in range(3):
        stopped.round(0.5 - 0.04 * task, 0.51 - 0.04 * task)
    for _ in range(4):
        stopped.round(0.5, 0.51)
    assert stopped.rule() == "alone"


def test_an_own_model_that_has_learned_from_the_kept_samples_is_given_up(tmp_path: Path) -> None:
    node = node_with(tmp_path / "d.npz", *classes(8))
    asked = {"lr": 1e-9, **OWN}
    for rule in ("mixed", "tried", "joint"):
        node.state["own-line"] = line(4.0)
        app(message("train", {"task": 1, **asked, "own-rule": "alone"}, line(-2.0)), node)
        assert slope_of(node.state["own-line"]) == pytest.approx(4.0)  # type: ignore[arg-type]
        shared = {"task": 2, **asked, "own-rule": rule, "validation-share": 0.25}
        told = app(message("train", shared, line(-2.0)), node).content["metrics"]
        assert slope_of(node.state["own-line"]) == pytest.approx(-2.0)  # type: ignore[arg-type]
        assert "own-score" not in told


def test_means_of_comparisons_by_hand() -> None:
    known = ModelComparison(0)
    known.add(0.4, 0.8)
    known.add(0.0, 0.2)
    # The newest counts half, in the longer means a fifth.
    longer = (known.adapted_longer, known.received_longer)
    assert (known.adapted, known.received, *longer) == pytest.approx((0.2, 0.5, 0.32, 0.68))
    known.add(math.nan, math.nan)
    assert (known.adapted, known.received, known.count) == pytest.approx((0.2, 0.5, 3))


def test_a_task_without_own_model_is_no_comparison() -> None:
    # The means begin with the first scores: with 0 the lead would seem to grow until then.
    known = ModelComparison(0)
    known.add(math.nan, math.nan)
    known.add(0.4, 0.8)
    assert (known.adapted, known.adapted_longer) == (0.4, 0.4)
    assert (known.received, known.received_longer, known.count) == (0.8, 0.8, 2)


def test_what_is_only_probable_decides_nothing_during_a_trial() -> None:
    # Four values of mean -0.0825 are below 0 with a probability of 0.914.
    probably = (-0.1, -0.2, 0.02, -0.05)
    behind = Fleet(6)
    for _ in range(8):
        behind.round(*probably)
    assert behind.rule() == "tried"
    # At its end that is enough to mix, though leads over the received model before a task, of 0.11
    # in the mean, have a probability of 0.95.
    ended = Fleet(6)
    for _ in range(9):
        ended.round(*probably, received=0.19)
    assert ended.rule() == "mixed"
    # A lead of 0.5 that has probably shrunk.
    ahead = Fleet(6)
    for _ in range(5):
        ahead.round(0.5)
    ahead.round(*(0.5 + change for change in probably))
    assert ahead.rule() == "alone"


def test_the_newest_comparisons_count_most() -> None:
    fleet = Fleet(6)
    for _ in range(3):
        fleet.round(0.01, 0.02)
    # Means over few tasks of 0.01 and 0.02 become -0.145 and -0.14 after the next task, -0.22 after
    # another: alone would have been decided on with the plain means, 0.009 and 0.019, before.
    fleet.round(-0.3, -0.3)
    assert fleet.rule() == "tried"
    fleet.round(-0.3, -0.3)
    assert fleet.rule() == "mixed"


def test_no_trial_ends_with_mixtures_before_five_tasks() -> None:
    fleet = Fleet(6)
    for _ in range(4):
        fleet.round(-0.1, -0.2)
    assert fleet.rule() == "tried"
    fleet.round(-0.1, -0.2)
    assert fleet.rule() == "mixed"


@pytest.mark.parametrize("better", [(0.1, -0.1), (math.nan,), (0.02, 0.3, -0.25)])
def test_without_a_clear_difference_trials_end_with_mixtures(better: tuple[float, ...]) -> None:
    fleet = Fleet(6)
    for _ in range(8):
        fleet.round(*better)
    assert fleet.rule() == "tried"
    fleet.round(*better)
    assert fleet.rule() == "mixed"


def test_three_clients_are_too_few_to_train_alone() -> None:
    fleet = Fleet(3)
    for _ in range(12):
        fleet.round(0.1, 0.2, 0.15)
    assert fleet.rule() == "mixed"


def test_smaller_errors_are_better() -> None:
    fleet = Fleet(6, outputs=1)
    for _ in range(6):
        fleet.round(-0.1, -0.2, received=-0.1)
    assert fleet.rule() == "alone"


def test_in_a_single_cluster_own_models_are_trained_with_every_other_task() -> None:
    fleet = Fleet(6)
    for _ in range(5):
        fleet.round(-0.1, -0.2)
    assert fleet.rules(6) == 3 * ["skipped", "mixed"]


def test_with_a_protection_all_are_on_trial_for_longer_and_train_with_every_task() -> None:
    fleet = Fleet(12, protection="trust")
    for _ in range(7):
        fleet.round(0.1, 0.2, 0.15)
        assert {fleet.asked(name)["own-rule"] for name in fleet.seen.names} == {"tried"}
    fleet.round(0.1, 0.2, 0.15)
    assert fleet.rule() == "alone"
    other = Fleet(12, protection="trust")
    for _ in range(5):
        other.round(-0.1, -0.2)
    assert other.rule() == "tried"
    other.round(-0.1, -0.2)
    assert other.rules(3) == ["mixed"] * 3
    halves = [other.seen.names[:6], other.seen.names[6:]]
    other.seen.clusters.split(0, halves, score=1.0, threshold=0.5)
    assert other.rules(3) == ["mixed"] * 3
    unclear = Fleet(12, protection="trust")
    for _ in range(11):
        unclear.round(0.1, -0.1)
    assert unclear.rule() == "tried"
    unclear.round(0.1, -0.1)
    assert unclear.rule() == "mixed"


def test_a_trial_whose_clients_have_all_left_begins_anew() -> None:
    fleet = Fleet(12)
    rules = [fleet.asked(name)["own-rule"] for name in fleet.seen.names]
    assert rules == 4 * ["tried"] + 4 * ["skipped"] + ["tried", "skipped", "tried", "skipped"]
    fleet.seen.away = {"c0", "c1", "c2", "c3", "c8"}
    assert fleet.asked("c4")["own-rule"] == "joint"
    fleet.seen.away.add("c10")
    fleet.seen.names = ["c4", "c5", "c6", "c7", "c9", "c11"]
    for _ in range(6):
        fleet.round(0.1, 0.2, 0.15, 0.1, -0.9)
    assert fleet.asked("c11") == {"own-rule": "alone"}


def test_groups_that_have_been_found_need_no_trial() -> None:
    fleet = Fleet(12)
    for _ in range(8):
        fleet.round(0.1, 0.2)
    assert fleet.rule() == "alone"
    parts = [fleet.seen.names[:6], fleet.seen.names[6:]]
    fleet.seen.clusters.split(0, parts, score=1.0, threshold=0.5)
    assert fleet.rules(6) == 2 * ["skipped", "skipped", "mixed"]


def test_clients_that_are_all_excluded_decide_nothing() -> None:
    fleet = Fleet(3)
    for name in fleet.seen.names:
        fleet.seen.clusters.leave(name)
    for _ in range(12):
        fleet.round(-0.1)
    assert fleet.rule() == "tried"


def test_probes_are_told_from_tasks() -> None:
    assert Fleet(6).asked("c0", **{"task-share": 0.1}) == {"task-share": 0.1, "own-rule": "probed"}


def test_what_an_own_model_costs_is_charged() -> None:
    def scale(**settings: object) -> float:
        content = RecordDict({"arrays": INITIAL, "config": ConfigRecord(settings)})  # type: ignore[arg-type]
        asked = Message(content, dst_node_id=7, message_type="train")
        cost = training_cost(asked, context(0), 20, FEATURES)
        assert cost is not None
        return cost.scale

    epochs, mixed = {**OWN, "local-epochs": 2}, {"own-rule": "mixed"}
    # Three quarters of the samples again, and forward passes of a quarter through six models,
    # beside two passes over all samples of three forward passes each.
    own = 0.75 + 0.25 * 6 / 6
    assert scale() == 1.0
    assert scale(**epochs, **mixed) == pytest.approx(1.0 + own)
    assert scale(**epochs, **mixed, **{"compute-scale": 0.25}) == pytest.approx(0.25 + own)
    assert scale(**epochs, **mixed, **{"compute-scale": 0.25, "kind": "losses"}) == 0.25
    # On trial, both models train on three quarters of the samples, and both are tested.
    assert scale(**epochs, **{"own-rule": "tried"}) == pytest.approx(2 * 0.75 + 0.25 * 7 / 6)
    assert scale(**epochs, **{"own-rule": "joint"}) == pytest.approx(0.75 + 0.25 * 6 / 6)
    assert scale(**epochs, **{"own-rule": "alone"}) == 1.0
    assert scale(**epochs, **{"own-rule": "skipped"}) == 1.0
    assert scale(**epochs, **{"own-rule": "probed"}) == 1.0
    # A number of mini-batches costs the same with fewer samples: 8 of 20 pass thrice, or 1.2.
    steps = {**OWN, "local-steps": 2, "batch-size": 4}
    assert scale(**steps, **mixed) == pytest.approx(2 + 0.25 * 6 / 1.2)


def test_panicle_has_it_by_default(tmp_path: Path) -> None:
    def ended(name: str, **keys: object) -> float:
        config = RunConfig(strategy="panicle", clients=4, max_updates=8, workers="0")
        result = simulate(config.with_values(out=str(tmp_path / name), **keys))
        return float(result.summary["virtual_time"])

    default = ended("default")
    assert default == ended("on", own_model=True)
    off = ended("off", own_model=False)
    assert off < default
    # Without validation samples there is no own model.
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
