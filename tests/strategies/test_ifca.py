"""IFCA: different starts, the clients' choice, K models in a message, groups on a grid."""

from pathlib import Path

import numpy as np
import pytest
from clustered import (
    CENTRES,
    NUMBERS,
    at_version,
    check_it_can_be_restored,
    found,
    last_accuracy,
    placed,
    run_on,
    three_groups,
    with_clients,
)
from fleets import MODEL, Change, grid_of, pulled_app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from raceme.client_app import app
from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import Model
from raceme.core.config import RunConfig
from raceme.core.events import ClusterChange
from raceme.core.messages import LABEL_COUNTS, ModelSpec
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Update
from raceme.flower.messages import identify_process
from raceme.runs.experiment import simulate
from raceme.simulation import Device
from raceme.strategies import IFCA, IFCAAsync, IFCAAsyncParameters, IFCAParameters
from raceme.training import models

DIGITS = RunConfig(clients=20, partition="iid", model="mclr")
STARTS = models.initial_arrays(DIGITS)
SPEC = ModelSpec.of(STARTS)


def test_the_first_model_is_the_initial_one_and_the_seed_decides_the_others() -> None:
    def starts(seed: int) -> list[bytes]:
        strategy = IFCA(seed=seed)
        strategy.initialize(np.arange(20, dtype=np.float32))
        return [model.vector.tobytes() for model in strategy.models.values()]

    first = starts(1)
    assert first[0] == np.arange(20, dtype=np.float32).tobytes()
    assert len(set(first)) == 4
    assert starts(1) == first
    assert starts(2) != first


def chose(
    client: str, cluster: int, *values: float, examples: int = 10, version: int = 0
) -> Update:
    task = InFlight(next(NUMBERS), client, cluster, version, 0, sent_at=0.0, bytes_down=0)
    return Update(task, np.array(values, np.float32), examples, 0.0)


@pytest.mark.parametrize(("by_examples", "expected"), [(False, 2.0), (True, 2.5)])
def test_a_round_by_hand(by_examples: bool, expected: float) -> None:
    strategy = with_clients(IFCA(IFCAParameters(k=3, by_examples=by_examples)), 3)
    # No client has chosen yet, so all are tested with the first model.
    assert [strategy.clusters.main(f"c{i}") for i in range(3)] == [0, 0, 0]
    applied = strategy.applied(
        [
            chose("c0", 1, 1.0, 0.0),
            chose("c1", 2, 5.0, 5.0),
            chose("c2", 1, 3.0, 0.0, examples=30),
        ]
    )
    # Model 1: (1 + 3) / 2, or (10 · 1 + 30 · 3) / 40.
    assert strategy.models[1].vector.tolist() == [expected, 0.0]
    assert strategy.models[2].vector.tolist() == [5.0, 5.0]
    assert [strategy.models[k].version for k in range(3)] == [0, 1, 1]
    assert [a.cluster for a in applied] == [1, 2, 1]
    assert [strategy.clusters.main(f"c{i}") for i in range(3)] == [1, 2, 1]


def asked_of(strategy: IFCA, client: str, kind: str, **numbers: np.ndarray) -> Answer:
    models = {0: 3, 1: 2}
    task = InFlight(9, client, 0, 0, 0, sent_at=0.0, bytes_down=0, candidates=models, kind=kind)
    return Answer(task, 20, {}, numbers)


def test_a_client_whose_data_have_changed_chooses_anew() -> None:
    strategy = with_clients(IFCA(IFCAParameters(k=2, detect="label-counts")), 3)
    strategy.progress.fleet.clients = {f"c{i}": Client(f"c{i}", 20) for i in range(3)}

    def counts(client: str, *values: int) -> None:
        numbers = {LABEL_COUNTS: np.array(values, np.int64)}
        strategy.on_answer(asked_of(strategy, client, LABEL_COUNTS, **numbers))

    counts("c0", 20, 0)
    counts("c2", 20, 0)
    strategy.applied([chose("c0", 0, 1.0, 0.0), chose("c1", 1, 5.0, 5.0)])
    # τ = 0.2 / 2 · 20 = 2: two replaced samples are a mean difference of 2, three are one of 3. A
    # client without a choice has none to repeat.
    counts("c0", 18, 2)
    counts("c2", 0, 20)
    assert strategy.state.cold == {}
    counts("c0", 17, 3)
    assert strategy.state.cold == {"c0": True}
    request = strategy._choice_of("c0")
    assert (request.kind, request.models) == ("scores", (0, 1))
    with pytest.raises(InvalidReplyError, match="a loss for each of 2 models"):
        strategy.on_answer(asked_of(strategy, "c0", "scores", losses=np.zeros((3, 1))))
    strategy.on_answer(asked_of(strategy, "c0", "scores", losses=np.array([[0.7], [0.2]])))
    assert strategy.clusters.main("c0") == 1
    counts("c0", 17, 3)
    assert strategy.state.cold == {}


def test_a_migration_sends_all_models_and_brings_none(tmp_path: Path) -> None:
    keys = {
        **{"strategy": "ifca", "clients": 20, "max-updates": "auto", "max-rounds": 6},
        **{"ifca.k": 2, "ifca.fraction": 0.2, "ifca.sampling": "in-turn"},
        **{"ifca.detect": "label-counts", "drift": "swap-all", "drift-at": "every round"},
        **{"swap-chance": 0.5, "workers": 0, "eval-every": 100, "model": "mclr"},
        "out": str(tmp_path / "run"),
    }
    sent = simulate(RunConfig.from_mapping(keys)).summary["bytes_by_phase"]
    trained, chosen = sent["train-best"], sent["scores"]
    # Six rounds of four clients.
    assert trained["messages"] == 24
    assert chosen["messages"] > 0
    assert chosen["down"] / chosen["messages"] == trained["down"] / 24
    assert chosen["up"] < chosen["down"] / 10


def test_async_by_hand() -> None:
    strategy = with_clients(IFCAAsync(IFCAAsyncParameters(k=2)), 1)
    strategy.models[1].replace(np.zeros(2, np.float32))
    at_version(strategy, 10, cluster=1)
    # τ = 10 − 1 = 9, hinge with a = 1 and b = 4: 0.3 / (9 − 4 + 1) = 0.05.
    applied = strategy.applied([chose("c0", 1, 2.0, 4.0, version=1)])[0]
    assert (applied.cluster, applied.staleness, applied.weight) == (1, 9, pytest.approx(0.05))
    assert strategy.models[1].vector.tolist() == pytest.approx([0.1, 0.2])
    assert strategy.models[0].vector.tolist() == [0.0, 0.0]


# The client half.


@pytest.fixture
def node() -> Context:
    identify_process()
    config = {"partition-id": 3, "num-partitions": 20}
    return Context(1, 7, config, RecordDict(), DIGITS.to_mapping())  # type: ignore[arg-type]


def candidates(*records: ArrayRecord, **settings: float) -> Message:
    content = RecordDict({f"arrays-{index}": record for index, record in enumerate(records)})
    content["config"] = ConfigRecord({"task": 4, "kind": "train-best", "lr": 0.02, **settings})
    return Message(content=content, dst_node_id=7, message_type="train")


def alone(record: ArrayRecord) -> Message:
    content = RecordDict({"arrays": record, "config": ConfigRecord({"task": 4, "lr": 0.02})})
    return Message(content=content, dst_node_id=7, message_type="train")


def test_a_client_trains_the_model_with_the_least_loss_on_its_training_data(node: Context) -> None:
    trained = app(alone(STARTS), node).content.array_records["arrays"]
    spoiled = SPEC.pack(-SPEC.unpack(trained))
    nan = SPEC.pack(np.full(SPEC.size, np.nan, np.float32))
    reply = app(candidates(nan, STARTS, trained, spoiled), node).content
    assert dict(reply.config_records["config"]) == {"task": 4, "kind": "train-best", "chosen": 2}
    again = app(alone(trained), node).content
    assert list(reply.array_records) == ["arrays"]
    answers = [SPEC.unpack(content.array_records["arrays"]) for content in (reply, again)]
    assert np.array_equal(*answers)


def test_of_equal_models_it_trains_the_first(node: Context) -> None:
    reply = app(candidates(STARTS, STARTS), node).content
    assert reply.config_records["config"]["chosen"] == 0


# On a grid.


def distinct(strategy: IFCA | IFCAAsync) -> IFCA | IFCAAsync:
    """Start near different centres, because shuffling a model of zeros gives zeros."""
    initialize = strategy.initialize

    def near(vector: np.ndarray) -> None:
        initialize(vector)
        for cluster, centre in enumerate(CENTRES):
            strategy.clusters.models[cluster] = Model(np.float32(0.3) * centre)

    strategy.initialize = near  # type: ignore[method-assign]
    return strategy


@pytest.mark.parametrize(
    "strategy",
    [
        distinct(IFCA(IFCAParameters(k=3))),
        distinct(IFCAAsync(IFCAAsyncParameters(k=3, decay="constant"))),
    ],
    ids=["rounds", "async"],
)
def test_the_groups_are_found_and_reported(strategy: IFCA | IFCAAsync) -> None:
    seen = run_on(strategy, three_groups(), 240)
    assert found(strategy) == [4, 4, 4]
    assert last_accuracy(seen) > 0.9
    updates = [event for event in seen if isinstance(event, events.UpdateApplied)]
    size = MODEL.count_bytes()
    assert {(u.bytes_down, u.bytes_up) for u in updates} == {(3 * size, size)}
    assigned = [client for one in placed(seen, ClusterChange.ASSIGN) for client in one.memberships]
    assert sorted(assigned) == sorted(f"c{index}" for index in range(12))
    assert not placed(seen, ClusterChange.MOVE)


def says(chosen: object) -> Change:
    def change(reply: Message, index: int) -> Message:
        if chosen is None:
            del reply.content["config"]["chosen"]
        else:
            reply.content["config"]["chosen"] = chosen
        return reply

    return change


@pytest.mark.parametrize("chosen", [None, 3, -1, 0.5, "1"])
@pytest.mark.parametrize("method", [IFCA, IFCAAsync])
def test_a_reply_must_say_which_model_was_trained(
    method: type[IFCA | IFCAAsync], chosen: object
) -> None:
    parameters = method.parameters_type(k=3)
    grid = grid_of(pulled_app(change=says(chosen)), [Device()])
    seen = run_on(method(parameters), grid, 2)
    rejected = [event for event in seen if isinstance(event, events.UpdateRejected)]
    assert "which of the 3 models" in rejected[0].reason
    assert not any(isinstance(event, events.UpdateApplied) for event in seen)


def test_choosing_can_be_made_to_cost_time() -> None:
    grid = grid_of(pulled_app(), [Device(seconds_per_round=2.0)])
    seen = run_on(IFCA(IFCAParameters(k=3, choosing_cost=0.1)), grid, 1)
    (applied,) = [event for event in seen if isinstance(event, events.UpdateApplied)]
    assert applied.time == pytest.approx(2.0 * 1.3)


@pytest.mark.parametrize("method", [IFCA, IFCAAsync])
def test_it_can_be_restored(method: type[IFCA | IFCAAsync]) -> None:
    check_it_can_be_restored(method)
