"""FedSoft: importance, client sampling, a round by hand, a client's own model."""

import logging

import numpy as np
import pytest
from clustered import NUMBERS, with_clients
from flwr.app import Context, RecordDict
from supported import SupportBench

from raceme.client_app import app
from raceme.core.config import RunConfig
from raceme.core.messages import ModelSpec, to_array
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Request, Update
from raceme.flower.messages import array_record, identify_process
from raceme.strategies import FedSoft, FedSoftParameters
from raceme.strategies.cdfl.fedsoft import importance_of
from raceme.training import models


def losses(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_importance_is_the_share_of_the_samples_that_a_model_fits_best() -> None:
    told = losses([1, 1, 3, 2], [2, 2, 1, 2])
    # The first has two of four samples, and wins the tie: three.
    assert importance_of(told, 1e-4).tolist() == [0.75, 0.25]
    # A share of 0 is replaced by σ: 1 and 0.01, divided by 1.01.
    assert importance_of(losses([1, 1], [2, 2]), 0.01) == pytest.approx([1 / 1.01, 0.01 / 1.01])


def soft(clients: int = 3, **options: object) -> FedSoft:
    made: FedSoft = with_clients(FedSoft(FedSoftParameters(k=2, **options)), clients)  # type: ignore[arg-type]
    for number, share in enumerate([0.9, 0.5, 0.1][:clients]):
        name = f"c{number}"
        made.state.importance[name] = [share, 1 - share]
        made.progress.fleet.clients[name] = _client(name, 10)
    return made


def _client(name: str, examples: int):  # type: ignore[no-untyped-def]
    from raceme.core.clients import Client

    return Client(name, examples)


def trained(client: str, *weights: float) -> Update:
    task = InFlight(next(NUMBERS), client, 0, 0, 0, sent_at=0.0, bytes_down=0)
    return Update(task, np.array(weights, np.float32), 10, 0.0)


def test_a_round_of_those_drawn_by_hand() -> None:
    made = soft()
    made.state.drawn = {"c0": [0], "c1": [0, 1], "c2": [1]}
    applied = made.applied([trained("c0", 1, 0), trained("c1", 3, 0), trained("c2", 5, 2)])
    # Unweighted means over the clients that each cluster has drawn.
    assert made.models[0].vector.tolist() == [2.0, 0.0]
    assert made.models[1].vector.tolist() == [4.0, 1.0]
    assert [what.weight for what in applied] == [0.5, 0.5, 0.5]


def test_a_round_of_all_by_hand() -> None:
    made = soft(selection="all")
    made.state.drawn = {name: [0, 1] for name in ("c0", "c1", "c2")}
    made.applied([trained("c0", 1, 0), trained("c1", 3, 0), trained("c2", 5, 2)])
    # v of cluster 0: 0.9, 0.5, 0.1 over 1.5: (0.9 + 1.5 + 0.5) / 1.5; of cluster 1 reversed.
    assert made.models[0].vector.tolist() == pytest.approx([2.9 / 1.5, 0.2 / 1.5])
    assert made.models[1].vector.tolist() == pytest.approx([6.1 / 1.5, 1.8 / 1.5])


def test_a_round_of_all_counts_examples() -> None:
    made = soft(selection="all")
    made.state.drawn = {name: [0, 1] for name in ("c0", "c1", "c2")}
    for name, examples in (("c0", 10), ("c1", 20), ("c2", 30)):
        made.progress.fleet.clients[name] = _client(name, examples)
    made.applied([trained("c0", 1, 0), trained("c1", 3, 0), trained("c2", 5, 2)])
    # u n of cluster 0: 9, 10 and 3 of 22; of cluster 1: 1, 10 and 27 of 38.
    assert made.models[0].vector.tolist() == pytest.approx([54 / 22, 6 / 22])
    assert made.models[1].vector.tolist() == pytest.approx([166 / 38, 54 / 38])


def test_a_client_without_a_known_number_of_examples_counts_as_one_sample() -> None:
    made = soft(clients=2, selection="all")
    made.state.drawn = {"c0": [0, 1], "c1": [0, 1]}
    made.progress.fleet.clients["c0"] = _client("c0", 0)
    made.applied([trained("c0", 1, 0), trained("c1", 3, 0)])
    # u n of cluster 0: 0.9 · 1 and 0.5 · 10; of cluster 1: 0.1 · 1 and 0.5 · 10.
    assert made.models[0].vector.tolist() == pytest.approx([15.9 / 5.9, 0.0])
    assert made.models[1].vector.tolist() == pytest.approx([15.1 / 5.1, 0.0])


def play(bench: SupportBench) -> list[Request]:
    """Play a round in which the first model fits all samples; return its requests."""
    done: list[Request] = []
    while work := bench.hand_out():
        for one in work:
            done.append(one)
            task = bench.open_task(one)
            if one.kind == "losses":
                bench.answer(task, {"losses": losses([1, 1], [2, 2])})
            elif bench.finish([task], {}):
                return done
    return done


def test_all_clients_evaluate_the_clusters_before_every_second_round() -> None:
    bench = SupportBench(FedSoft(FedSoftParameters(k=2)), 4)
    bench.method.train_config["local-epochs"] = 5
    asked = [[one for one in play(bench) if one.kind == "losses"] for _ in range(3)]
    everyone = {"c0", "c1", "c2", "c3"}
    assert [{one.client for one in each} for each in asked] == [everyone, set(), everyone]
    # Two forward passes beside five with gradients, which cost three each.
    costs = {(one.models, one.settings["compute-scale"]) for one in asked[0]}
    assert costs == {((0, 1), 2 / 15)}


def test_only_the_drawn_clients_train_in_a_round() -> None:
    bench = SupportBench(FedSoft(FedSoftParameters(k=2, drawn=1, strength=0.3)), 4)
    work = [one for one in play(bench) if one.kind == "train-own"]
    # Both clusters draw one of the four clients, possibly the same.
    assert {one.client for one in work} == set(bench.method.state.drawn)
    assert 1 <= len(work) <= 2
    assert work[0].settings == {"proximal-mu": 0.3}


def test_clusters_draw_by_importance_and_examples() -> None:
    made = soft(drawn=1)
    clients = [_client(f"c{number}", 10) for number in range(3)]
    counts = dict.fromkeys(("c0", "c1", "c2"), 0)
    for seed in range(300):
        made._draw(clients, np.random.default_rng(seed))
        for name, clusters in made.state.drawn.items():
            counts[name] += 0 in clusters
    # Shares of cluster 0's 300 draws are 0.9, 0.5, 0.1 over 1.5: 180, 100, 20; five deviations.
    assert abs(counts["c0"] - 180) < 43
    assert abs(counts["c2"] - 20) < 22
    assert sum(counts.values()) == 300


@pytest.mark.parametrize(
    ("clients", "draws"), [(1, 1), (3, 1), (8, 4), (15, 7), (29, 14), (30, 15), (1000, 15)]
)
def test_a_cluster_draws_half_of_the_clients_and_the_papers_number_at_most(
    clients: int, draws: int
) -> None:
    assert FedSoftParameters().draws(clients) == draws
    assert FedSoftParameters(drawn=20).draws(clients) == 20
    assert FedSoftParameters(k=3).participants(clients) == min(clients, 3 * draws)


def after_a_round(made: FedSoft, clients: int) -> float:
    """Return the distance between the two models after a round in which all clients differ."""
    known = [_client(f"c{number}", 10) for number in range(clients)]
    for number, client in enumerate(known):
        made.progress.fleet.clients[client.client_id] = client
        share = 0.9 if number % 2 else 0.1
        made.state.importance[client.client_id] = [share, 1 - share]
    drawn = made._draw(known, np.random.default_rng(0))
    made.applied([trained(c.client_id, float(c.client_id[1:]), 0) for c in drawn])
    return float(np.abs(made.models[0].vector - made.models[1].vector).max())


def test_in_a_small_fleet_clusters_draw_different_clients() -> None:
    # With the paper's number, each cluster draws all clients, so both get the same mean.
    assert after_a_round(soft(15, drawn=15), 15) == 0.0
    assert after_a_round(soft(15), 15) > 0.0


def test_drawing_all_clients_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    soft(drawn=15).check(16)
    soft().check(5)
    soft(drawn=15, selection="all").check(15)
    assert not caplog.messages
    soft(drawn=15).check(15)
    (said,) = caplog.messages
    assert said.startswith("Each cluster draws 15 of 15 clients")
    assert said.endswith("Lower fedsoft.drawn to 7, or set fedsoft.selection to all.")


def test_losses_of_another_number_of_models_are_refused() -> None:
    made = soft()
    task = InFlight(0, "c0", 0, 0, 0, sent_at=0.0, bytes_down=0, kind="losses")
    with pytest.raises(InvalidReplyError, match="the loss of each sample under 2 models"):
        made.on_answer(Answer(task, 3, numbers={"losses": losses([1, 2, 3])}))
    made.on_answer(Answer(task, 3, numbers={"losses": losses([1, 2, 3], [2, 1, 1])}))
    assert made.clusters.of("c0") == pytest.approx({0: 1 / 3, 1: 2 / 3})


def test_a_client_keeps_its_own_model_and_is_pulled_to_the_received_one() -> None:
    identify_process()
    config = RunConfig(clients=20, partition="iid", model="mclr", lr=0.05)
    start = models.initial_arrays(config)
    spec = ModelSpec.of(start)
    node = Context(
        1, 7, {"partition-id": 3, "num-partitions": 20}, RecordDict(), config.to_mapping()
    )

    def train(centre: np.ndarray, task: int, strength: float) -> np.ndarray:
        from flwr.app import ConfigRecord, Message

        settings = ConfigRecord({"task": task, "kind": "train-own", "proximal-mu": strength})
        content = RecordDict({"arrays": spec.pack(centre.astype(np.float32)), "config": settings})
        reply = app(Message(content, 7, "train"), node)
        return np.asarray(spec.unpack(reply.content["arrays"]))

    zeros = np.zeros(sum(spec.sizes))
    first = train(zeros, 1, 0.0)
    # Without a pull it continues from its own model, not from the received one.
    free = train(100 + zeros, 2, 0.0)
    assert np.linalg.norm(free - first) < 1.0
    # λ pulls it to the received model: lr λ = 0.5 halves the distance in every step.
    pulled = train(100 + zeros, 3, 10.0)
    assert np.abs(pulled - 100).max() < 5.0


def test_a_mixture_is_trained_from_the_models_that_fit() -> None:
    identify_process()
    config = RunConfig(clients=20, partition="iid", model="mclr", lr=1e-9)
    start = models.initial_arrays(config)
    spec = ModelSpec.of(start)
    node = Context(
        1, 7, {"partition-id": 3, "num-partitions": 20}, RecordDict(), config.to_mapping()
    )
    from flwr.app import ConfigRecord, Message

    good = spec.unpack(start)
    bad = good + np.random.default_rng(0).normal(0, 50, len(good)).astype(np.float32)
    settings = ConfigRecord({"task": 1, "kind": "train-mixed"})
    content = RecordDict(
        {"arrays-0": spec.pack(bad), "arrays-1": spec.pack(good), "config": settings}
    )
    reply = app(Message(content, 7, "train"), node).content
    shares = next(iter(reply["numbers"].values())).numpy()
    assert shares.sum() == pytest.approx(1.0)
    assert shares[1] > shares[0] > 0
    mixture = shares[0] * bad + shares[1] * good
    assert spec.unpack(reply["arrays"]) == pytest.approx(mixture, abs=1e-3)
    # The shares that the server repeats from the client's last report must have the right shape.
    content["shares"] = array_record({"shares": to_array(np.ones(3))})
    settings["scored"], settings["former-step"] = True, 0
    with pytest.raises(ValueError, match=r"shares must have shape \(2,\)"):
        app(Message(content, 7, "train"), node)


def test_a_model_that_fits_no_sample_has_the_share_of_one() -> None:
    identify_process()
    config = RunConfig(clients=20, partition="iid", model="mclr", lr=1e-9)
    start = models.initial_arrays(config)
    node = Context(
        1, 7, {"partition-id": 3, "num-partitions": 20}, RecordDict(), config.to_mapping()
    )
    from flwr.app import ConfigRecord, Message

    settings = ConfigRecord({"task": 1, "kind": "train-mixed"})
    # With equal models, the first one fits every sample.
    content = RecordDict({"arrays-0": start, "arrays-1": start, "config": settings})
    reply = app(Message(content, 7, "train"), node).content
    examples = int(reply["metrics"]["num-examples"])
    shares = reply["numbers"]["shares"].numpy()
    assert shares == pytest.approx([examples / (examples + 1), 1 / (examples + 1)])
