from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from nodes import (
    CONFIG,
    INITIAL,
    SPEC,
    Settings,
    context,
    message,
    node_context,
    several,
    write_device,
)

from raceme import datasets
from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import ModelSpec, from_array, to_array
from raceme.core.registry import CLIENT_WORK, DATASETS
from raceme.datasets.source import DataShape
from raceme.training import models
from raceme.training.local import evaluate
from raceme.training.models import Network, Samples


def train(settings: Settings | None = None, client: int = 0, **keys: object) -> RecordDict:
    config = CONFIG.with_values(**keys)
    return app(message("train", settings), context(client, config)).content


def vector(content: RecordDict) -> np.ndarray:
    return SPEC.unpack(content.array_records["arrays"])


def start() -> np.ndarray:
    return SPEC.unpack(INITIAL)


# --- train --------------------------------------------------------------------------------------


def test_a_training_reply_holds_model_metrics_and_what_it_answers() -> None:
    content = train({"task": 12, "version": 34, "lr": 0.1})
    assert ModelSpec.of(content.array_records["arrays"]) == SPEC
    assert list(content.metric_records) == ["metrics"]
    metrics = content.metric_records["metrics"]
    assert metrics["num-examples"] == len(datasets.client_data(CONFIG, 0).y_train)
    assert 0 < metrics["train-loss"] < 5  # type: ignore[operator]
    assert set(metrics) == {"num-examples", "train-loss"}
    assert dict(content.config_records["config"]) == {"task": 12, "version": 34}
    assert not np.array_equal(vector(content), start())


def test_a_reply_depends_on_the_message_and_the_client_and_nothing_else() -> None:
    first = vector(train({"task": 1}))
    train({"task": 2, "lr": 0.9}, client=3)
    assert np.array_equal(first, vector(train({"task": 1})))
    others = [train({"task": 2}), train({"task": 1}, client=1), train({"task": 1}, seed=1)]
    assert not any(np.array_equal(first, vector(other)) for other in others)


def test_the_round_of_flowers_strategies_seeds_the_training() -> None:
    second, again = (train({"server-round": 2}) for _ in range(2))
    assert np.array_equal(vector(second), vector(again))
    assert not np.array_equal(vector(second), vector(train({"server-round": 3})))
    assert "config" not in second


def test_hyper_parameters_come_from_the_message_then_the_run_then_the_dataset() -> None:
    def moved(settings: Settings | None = None, **keys: object) -> float:
        return float(np.linalg.norm(vector(train(settings, **keys)) - start()))

    default = moved()
    assert default == moved({"lr": DATASETS["digits"].default_lr})
    assert moved(lr=0.001) == moved({"lr": 0.001}) < 0.1 * default
    assert moved({"lr": 0.001}, lr=5.0) == moved({"lr": 0.001})
    assert moved({"local-epochs": 3}) == moved(local_epochs=3) > default
    assert moved({"batch-size": 1000}) == moved(batch_size=1000) < default
    assert moved({"local-steps": 2}) == moved(local_steps=2) < default
    assert moved({"optimizer": "adam"}) == moved(optimizer="adam") != default
    strong = moved({"optimizer": "momentum", "momentum": 0.9})
    assert strong == moved(optimizer="momentum") > default
    assert moved({"weight-decay": 0.5}) == moved(weight_decay=0.5) != default


def test_proximal_mu_pulls_towards_the_received_model() -> None:
    settings: Settings = {"lr": 0.1, "local-epochs": 10}
    free, held = (vector(train({**settings, "proximal-mu": mu})) for mu in (0.0, 5.0))
    assert np.linalg.norm(held - start()) < 0.5 * np.linalg.norm(free - start())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"lr": 0.0}, "lr must be greater than 0"),
        ({"lr": -0.1}, "lr must be greater than 0"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"batch-size": 0}, "batch-size must be at least 1"),
        ({"local-epochs": 0}, "local-epochs must be at least 1"),
        ({"proximal-mu": -1.0}, "proximal-mu must be at least 0"),
        ({"optimizer": "lion"}, "value of optimizer 'lion'"),
        ({"momentum": 1.0}, "momentum must be below 1"),
        ({"weight-decay": -1.0}, "weight-decay must be at least 0"),
        ({"local-steps": -1}, "local-steps must be at least 0"),
    ],
)
def test_impossible_hyper_parameters_are_errors(settings: Settings, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        train(settings)


def test_a_message_without_a_model_or_with_another_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"no model: kind 'train' expects an ArrayRecord named 'arrays'"
    ):
        app(Message(RecordDict(), dst_node_id=7, message_type="train"), context())
    other = ArrayRecord({"w": to_array(np.zeros(3, np.float32))})
    with pytest.raises(ValueError, match=r"received model has the arrays \['w'\]"):
        app(message("train", arrays=other), context())
    turned = ArrayRecord(dict(INITIAL))
    turned["output.weight"] = to_array(from_array(INITIAL["output.weight"]).T)
    with pytest.raises(ValueError, match=r"'output.weight' is float32 of shape \(64, 10\)"):
        app(message("evaluate", arrays=turned), context())


# --- kinds of work ------------------------------------------------------------------------------


def ask(
    settings: Settings, records: dict[str, ArrayRecord], kind: str = "train", client: int = 3
) -> RecordDict:
    content = RecordDict({**records, "config": ConfigRecord(dict(settings))})
    return app(Message(content, dst_node_id=7, message_type=kind), context(client)).content


def test_an_unknown_kind_of_work_is_one_line_that_lists_the_kinds() -> None:
    with pytest.raises(ValueError, match="no work of kind 'trian'; it knows train, ") as error:
        train({"kind": "trian"})
    assert "\n" not in str(error.value)
    assert all(f"{kind}" in str(error.value) for kind in CLIENT_WORK)
    with pytest.raises(ValueError, match="no work of kind 3"):
        train({"kind": 3})


def test_a_reply_repeats_what_it_was_asked_and_nothing_that_it_was_not() -> None:
    asked: Settings = {"kind": "train", "step": 0, "task": 5, "lr": 0.1}
    told = train(asked).config_records["config"]
    assert dict(told) == {"task": 5, "kind": "train", "step": 0}
    plain, named = train({"task": 5}), train({"task": 5, "kind": "train"})
    assert np.array_equal(vector(plain), vector(named))


@pytest.mark.parametrize("step", [-1, 0.5, "1"])
def test_an_invalid_step_is_an_error(step: int | float | str) -> None:
    with pytest.raises(ValueError, match="step must be a whole number of at least 0"):
        train({"step": step})


def test_of_several_models_the_one_with_the_least_loss_on_the_training_data_is_trained() -> None:
    settings: Settings = {"task": 4, "lr": 0.1, "kind": "train-best"}
    trained = ask({"task": 4, "lr": 0.1}, {"arrays": INITIAL}).array_records["arrays"]
    spoiled = SPEC.pack(np.zeros(SPEC.size, np.float32))
    nan = SPEC.pack(np.full(SPEC.size, np.nan, np.float32))
    reply = ask(settings, several(nan, INITIAL, trained, spoiled))
    assert dict(reply.config_records["config"]) == {"task": 4, "kind": "train-best", "chosen": 2}
    again = ask({"task": 4, "lr": 0.1}, {"arrays": trained})
    assert list(reply.array_records) == ["arrays"]
    assert np.array_equal(vector(reply), vector(again))


def test_of_equal_models_the_first_is_trained() -> None:
    reply = ask({"kind": "train-best"}, several(INITIAL, INITIAL))
    assert reply.config_records["config"]["chosen"] == 0
    only = ask({"kind": "train-best"}, {"arrays": INITIAL})
    assert only.config_records["config"]["chosen"] == 0


def test_several_models_are_not_chosen_from_unless_that_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"kind 'train' expects an ArrayRecord named 'arrays'"):
        ask({}, several(INITIAL, INITIAL))


@pytest.mark.parametrize("on", ["train", "test"])
def test_losses_are_those_of_every_sample_under_every_model(on: str) -> None:
    zero = SPEC.pack(np.zeros(SPEC.size, np.float32))
    reply = ask({"kind": "losses", "on": on, "task": 9}, several(zero, INITIAL))
    measured = from_array(reply.array_records["numbers"]["losses"])
    data = datasets.client_data(CONFIG, 3)
    x, y = (data.x_train, data.y_train) if on == "train" else (data.x_test, data.y_test)
    assert measured.shape == (2, len(y))
    assert measured.dtype == np.float32
    # All scores are equal, so that each of ten classes has the share 1/10.
    assert measured[0] == pytest.approx(np.log(10))
    network = Network(models.build("mlp", (1, 8, 8), 10, CONFIG.seed))
    assert measured[1].mean() == pytest.approx(evaluate(network, Samples(x, y))[1], rel=1e-5)
    assert list(reply.array_records) == ["numbers"]
    assert reply.metric_records["metrics"]["num-examples"] == len(y)
    assert dict(reply.config_records["config"]) == {"task": 9, "kind": "losses"}


def test_losses_are_of_training_samples_if_nothing_is_said_and_of_no_others_than_these() -> None:
    said, unsaid = (
        ask({"kind": "losses", **on}, {"arrays": INITIAL}) for on in ({"on": "train"}, {})
    )
    assert said["numbers"] == unsaid["numbers"]
    with pytest.raises(ValueError, match="on these samples: train, test; not on 'dev'"):
        ask({"kind": "losses", "on": "dev"}, {"arrays": INITIAL})


def test_label_counts_are_of_all_classes() -> None:
    content = RecordDict({"config": ConfigRecord({"kind": "label-counts"})})
    config = RunConfig()
    asked = Message(content, dst_node_id=7, message_type="query")
    reply = app(asked, context(2, config)).content
    counts = from_array(reply.array_records["numbers"]["label-counts"])
    labels = datasets.client_data(config, 2).y_train.tolist()
    assert counts.dtype == np.int64
    assert counts.tolist() == [labels.count(label) for label in range(10)]
    assert 0 in counts


def test_a_client_whose_data_are_released_states_how_many_there_will_be() -> None:
    content = RecordDict({"config": ConfigRecord({"kind": "label-counts", "step": 0})})
    node = context(2, RunConfig(drift="incremental"))
    reply = app(Message(content, dst_node_id=7, message_type="query"), node).content
    (metrics,) = reply.metric_records.values()
    whole = len(datasets.client_data(RunConfig(), 2).y_train)
    assert metrics == {"num-examples": round(0.25 * whole), "all-examples": whole}


@pytest.mark.parametrize("own", [0, 1])
def test_a_client_finds_the_direction_that_its_training_takes(own: int) -> None:
    node, settings = context(2, CONFIG), {"lr": 0.1, "local-steps": 3, "task": 4}
    spec = ModelSpec.of(INITIAL)

    def asked(kind: str, **records: ArrayRecord) -> RecordDict:
        config = ConfigRecord({"kind": kind, **settings})
        content = RecordDict({"config": config, "arrays": INITIAL, **records})
        return app(Message(content, dst_node_id=7, message_type="train"), node).content

    change = spec.unpack(asked("train").array_records["arrays"]) - spec.unpack(INITIAL)
    directions = [-change, change] if own else [3 * change, np.ones_like(change)]
    record = ArrayRecord({str(i): to_array(one) for i, one in enumerate(directions)})
    reply = asked("nearest-direction", directions=record)
    # The model stays on the client.
    assert not reply.array_records
    (metrics,) = reply.metric_records.values()
    assert metrics["chosen"] == own
    with pytest.raises(ValueError, match="directions must have the model's"):
        asked("nearest-direction", directions=ArrayRecord({"0": to_array(change[1:])}))


def test_a_client_works_on_the_data_of_the_step_that_it_is_told() -> None:
    node = context(2, CONFIG.with_values(drift="label-shift"))

    def counts(**step: int) -> list[int]:
        content = RecordDict({"config": ConfigRecord({"kind": "label-counts", **step})})
        reply = app(Message(content, dst_node_id=7, message_type="query"), node).content
        assert reply.config_records["config"].get("step") == step.get("step")
        return list(from_array(reply.array_records["numbers"]["label-counts"]))

    # Labels y become y + s mod 10.
    assert counts(step=3) == counts()[-3:] + counts()[:-3]
    assert counts(step=0) == counts() != counts(step=3)
    tested = [
        app(message("evaluate", {"step": step}), node).content["metrics"]["loss"]
        for step in (1, 0, 1, 10)
    ]
    assert tested[0] == tested[2] != tested[1] == tested[3]


# --- evaluate and query -------------------------------------------------------------------------


def test_an_evaluation_tests_the_received_model_on_the_clients_own_test_samples() -> None:
    trained = train({"lr": 0.3, "local-epochs": 20}).array_records["arrays"]
    content = app(message("evaluate", arrays=trained), context()).content
    metrics = content.metric_records["metrics"]
    data = datasets.client_data(CONFIG, 0)
    assert metrics["num-examples"] == len(data.y_test)
    assert metrics["accuracy"] > 0.6  # type: ignore[operator]
    assert set(metrics) == {"accuracy", "loss", "num-examples"}
    assert list(content) == ["metrics"]


def query(context: Context) -> tuple[MetricRecord, ConfigRecord]:
    content = app(Message(RecordDict(), dst_node_id=7, message_type="query"), context).content
    return content.metric_records["metrics"], content.config_records["config"]


def test_a_client_states_who_it_is_and_what_it_has() -> None:
    config = RunConfig()
    metrics, told = query(context(20, config))
    data = datasets.client_data(config, 20)
    assert told["client-id"] == "client-20"
    assert dict(metrics) == {
        "num-examples": len(data.y_train),
        "num-test-examples": len(data.y_test),
        "group": 2,
    }
    assert query(context(20, config, **{"device-id": "attic"}))[1]["client-id"] == "attic"


def test_a_client_without_a_true_group_says_minus_one() -> None:
    assert query(context())[0]["group"] == -1


def test_the_number_of_partitions_of_the_node_wins_over_the_runs() -> None:
    both = [query(node_context({"partition-id": i, "num-partitions": 2}))[0] for i in (0, 1)]
    total = sum(m["num-examples"] + m["num-test-examples"] for m in both)  # type: ignore[operator]
    assert total == 1797


def test_all_clients_of_a_process_are_served_and_share_no_data() -> None:
    config = RunConfig(clients=150, partition="iid")
    sizes = [query(context(client, config))[0] for client in range(150)]
    assert sum(m["num-examples"] + m["num-test-examples"] for m in sizes) == 1797  # type: ignore[operator]


def test_a_node_that_does_not_say_which_client_it_is_is_an_error() -> None:
    with pytest.raises(ValueError, match='--node-config "partition-id=0 num-partitions=2"'):
        query(node_context({}))
    with pytest.raises(UserError, match="no client 20: clients are numbered 0 to 19"):
        query(context(20))


def test_a_device_with_its_own_file_needs_only_a_name(tmp_path: Path) -> None:
    write_device(tmp_path / "kitchen.npz")
    config = RunConfig(dataset="npz", model="mclr").with_values(data_file="elsewhere.npz")
    node = {"device-id": "kitchen", "data-file": str(tmp_path / "kitchen.npz")}
    own = node_context(node, config)
    metrics, told = query(own)
    assert told["client-id"] == "kitchen"
    assert (metrics["num-examples"], metrics["num-test-examples"]) == (12, 4)
    initial = models.initial_arrays(config, DataShape((4,), 3))
    reply = app(message("train", {"task": 1}, initial), own)
    assert ModelSpec.of(reply.content.array_records["arrays"]) == ModelSpec.of(initial)


def test_a_model_for_more_classes_than_the_devices_own_is_an_error_that_shows_both(
    tmp_path: Path,
) -> None:
    write_device(tmp_path / "own.npz", classes=2)
    config = RunConfig(dataset="npz", model="mclr")
    config = config.with_values(data_file=str(tmp_path / "own.npz"))
    initial = models.initial_arrays(config, DataShape((4,), 3))
    with pytest.raises(ValueError, match=r"shape \(3, 4\); .* has shape \(2, 4\)"):
        app(message("train", {"task": 1}, initial), node_context({"device-id": "a"}, config))


def test_the_data_root_of_the_node_wins_over_the_runs(tmp_path: Path) -> None:
    config = RunConfig(dataset="mnist", data_root="/nowhere")
    with pytest.raises(UserError, match=f"mnist is not under '{tmp_path}'"):
        query(context(0, config, **{"data-root": str(tmp_path)}))


def test_a_client_that_is_refused_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    reason = ConfigRecord({"reason": "'kitchen' is already online\nas node 7"})
    told = Message(RecordDict({"config": reason}), 7, "query.refused")
    reply = app(told, context(0, CONFIG))
    assert not reply.has_error()
    assert not reply.content
    assert "No work for this client: 'kitchen' is already online as node 7" in caplog.messages
