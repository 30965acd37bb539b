"""CDFL and FedSoft-Async: an upload by hand, late ones, newcomers, bad input, runs on a grid."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from clustered import plain
from fleets import MODEL, grid_of, pulled_app
from runs import of

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import NonFiniteModelError
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import ModelSpec, Vector, from_array
from raceme.core.requests import InFlight, InvalidReplyError, Update
from raceme.records.store import read_events
from raceme.runs.experiment import simulate
from raceme.simulation import Device
from raceme.strategies import CDFL, CDFLParameters, FedSoftAsync, Plan
from raceme.strategies.cdfl.fedsoft import FedSoftAsyncParameters, stated_shares


class Centres:
    """Losses on proxy sets: the distances from each set's centre."""

    def __init__(self, *centres: Sequence[float]) -> None:
        self.centres = [np.array(centre, np.float32) for centre in centres]
        self.sets = len(centres)
        self.asked: list[int] = []

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> np.ndarray:
        self.asked.append(proxy)
        far = [float(np.linalg.norm(vector - self.centres[proxy])) for vector in vectors]
        return np.array([[d, d] for d in far], np.float32)


class Level(Centres):
    """Constant losses, also for huge weights, as of a model whose biases are all equal."""

    def __call__(self, vectors: Sequence[Vector], proxy: int = 0) -> np.ndarray:
        return np.ones((len(vectors), 2), np.float32)


def method(clients: int = 3, **options: object) -> CDFL:
    """CDFL with two clusters that start at their centres, (0, 0) and (4, 0)."""
    made = CDFL(CDFLParameters(**{"loss_bar": "0", **options}))  # type: ignore[arg-type]
    made.probe = Centres([0, 0], [4, 0])
    made.starts = [np.zeros(2, np.float32), np.array([4, 0], np.float32)]
    made.initialize(np.zeros(2, np.float32))
    made.restored()
    for number in range(clients):
        made.on_join(Client(f"c{number}", 10))
    return made


def upload(client: str, *weights: float, shares: Sequence[float] = ()) -> Update:
    task = InFlight(0, client, 0, 0, 0, sent_at=0.0, bytes_down=0)
    return Update(
        task, np.array(weights, np.float32), 10, 0.0, numbers={"shares": np.array(shares)}
    )


@pytest.mark.parametrize(
    ("loss_bar", "high_bar", "exponent"),
    [
        # Losses 1 and 3, less 1.5: (−0.5, 1.5), the others' shares (1.5, −0.5), times A = 3.
        ("1.5", "keep", 6.0),
        # With the bar lowered to 1: (0, 2), so shares (1, 0).
        ("1.5", "lower", 3.0),
        # With the bar at half of the smallest loss: (0.5, 2.5), so shares (5/6, 1/6).
        ("50%", "lower", 2.0),
    ],
)
def test_the_bar_of_losses_by_its_reading(loss_bar: str, high_bar: str, exponent: float) -> None:
    cdfl = method(c1=1.0, c2=0.0, loss_bar=loss_bar, high_bar=high_bar)
    alpha = cdfl.estimate(np.array([1, 0], np.float32))
    assert alpha[0] == pytest.approx(1 / (1 + math.exp(-exponent)))


def test_a_newcomer_has_the_mean_of_the_clusters_and_the_present_epoch() -> None:
    cdfl = method()
    assert cdfl.state.received["c0"].tolist() == [2.0, 0.0]
    cdfl.progress.updates = 7
    cdfl.on_join(Client("late", 10))
    assert cdfl.state.since["late"] == 7
    assert cdfl.clusters.of("late") == {0: 0.5, 1: 0.5}
    # A client that comes back keeps its state.
    cdfl.on_join(Client("c0", 10))
    assert cdfl.state.since["c0"] == 0


def test_an_upload_by_hand() -> None:
    cdfl = method(c1=0.5, c2=0.25, sharpness="3")
    # v = (1, 0): l = d1 = d2 = (1, 3), the others' shares (3/4, 1/4): 3 (3/4 − 1/4) = 1.5.
    applied = cdfl.applied([upload("c0", 1.0, 0.0)])[0]
    alpha = 1 / (1 + np.exp(-1.5))
    # β1 = (1, 0), β2 = 1, β0 = 0.025: cluster 0 moves from 0 to 0.025, cluster 1 stays.
    assert cdfl.models[0].vector.tolist() == pytest.approx([0.025, 0.0])
    assert cdfl.models[1].version == 0
    assert (applied.cluster, applied.staleness, applied.weight) == (0, 0, 0.025)
    assert cdfl.clusters.of("c0")[0] == pytest.approx(alpha)
    expected = alpha * 0.025 + (1 - alpha) * 4
    assert cdfl.state.received["c0"].tolist() == pytest.approx([expected, 0.0], abs=1e-5)
    assert (cdfl.state.since["c0"], cdfl.state.renewed) == (1, {0: 1, 1: 0})


def test_a_clusters_own_loss_is_measured_once_per_version() -> None:
    cdfl = method(beta0=1.0, c1=0.0, c2=1.0)
    v = np.array([1, 0], np.float32)
    # Own losses 0 and 0: d1 = (|0 − 1|, |0 − 3|), the others' shares (3/4, 1/4), times A = 3.
    assert cdfl.estimate(v)[0] == pytest.approx(1 / (1 + math.exp(-1.5)))
    cdfl.applied([upload("c0", 1.0, 0.0)])
    # Cluster 0 is at (1, 0) now, with a loss of 1 of its own: d1 = (0, 3), (1, 0).
    assert cdfl.estimate(v)[0] == pytest.approx(1 / (1 + math.exp(-3.0)))
    measured = len(cdfl.probe.asked)
    cdfl.estimate(v)
    # Only the losses of v are measured, since the clusters' models have not changed.
    assert cdfl.probe.asked[measured:] == [0, 1]


def test_a_loss_evaluation_costs_a_third_of_an_epoch_per_model() -> None:
    cdfl = method()
    cdfl.progress.fleet.clients = {"c0": Client("c0", 10)}
    cdfl.train_config["local-epochs"] = 2
    # Two epochs have six passes: two forward, and two backward of twice the cost.
    assert cdfl._pass_cost("c0") == pytest.approx(1 / 6)
    assert cdfl._pass_cost("c0", models=2) == pytest.approx(2 / 6)


@pytest.mark.parametrize(("epoch", "is_stale"), [(3, False), (4, True)])
def test_a_late_upload_changes_no_cluster_and_is_answered(epoch: int, is_stale: bool) -> None:
    cdfl = method(clients=3)  # τ0 is the number of clients, 3.
    cdfl.progress.updates = epoch - 1
    applied = cdfl.applied([upload("c0", 1.0, 0.0)])[0]
    assert (applied.weight == 0) == is_stale
    assert (cdfl.models[0].version == 0) == is_stale
    # It still gets a model of its mixture, and its next upload counts from this epoch.
    assert cdfl.state.since["c0"] == epoch
    assert cdfl.clusters.of("c0")[0] > 0.5
    assert 0 < cdfl.state.received["c0"][0] < 2


def test_the_share_falls_when_the_cluster_was_renewed_after_the_client_received() -> None:
    for last_update, expected in (("before", 0.025), ("this", 0.025 / 61)):
        cdfl = method(clients=3, oldest=100, last_update=last_update)
        cdfl.progress.updates = 5
        # t = 6, τ = 0; cluster 0 has not been updated:
        # e_k = 0, or as printed 6, so 10 · 6 + 1 = 61.
        assert cdfl.applied([upload("c0", 1.0, 0.0)])[0].weight == pytest.approx(expected)
        cdfl.progress.updates = 11
        # t = 12, τ = 0; c0 updated it at 6: 1/(10 · 6 + 1), or as printed 1/(10 · 12 + 1).
        later = {"before": 0.025 / 61, "this": 0.025 / 121}[last_update]
        assert cdfl.applied([upload("c1", 1.0, 0.0)])[0].weight == pytest.approx(later)


def test_a_loss_that_is_no_number_leaves_everything_as_it_was() -> None:
    cdfl = method()
    before = plain(cdfl.state_dict())
    with pytest.raises(NonFiniteModelError, match="its loss on proxy set 0 is"):
        cdfl.applied([upload("c0", float("inf"), 0.0)])
    assert plain(cdfl.state_dict()) == before


def test_a_share_of_nothing_places_the_client_elsewhere() -> None:
    # With A = 1e4 the softmax of (3/4, 1/4) is (1, 0).
    cdfl = method(sharpness="1e4")
    cdfl.applied([upload("c0", 1.0, 0.0)])
    assert cdfl.clusters.of("c0") == {0: 1.0}
    assert cdfl.state.received["c0"].tolist() == cdfl.models[0].vector.tolist()


def test_weights_too_large_to_compare_leave_everything_as_it_was() -> None:
    cdfl = method()
    cdfl.probe = Level([0, 0], [4, 0])
    before = plain(cdfl.state_dict())
    with pytest.raises(NonFiniteModelError, match="its weights are too large"):
        cdfl.applied([upload("c0", 1e25, 0.0)])
    assert plain(cdfl.state_dict()) == before


@pytest.mark.parametrize(
    ("options", "sets", "told"),
    [
        ({}, 0, "--proxy"),
        ({"k": 3}, 2, "cdfl.k is 3, and there are 2 proxy sets"),
    ],
)
def test_without_a_proxy_set_for_each_cluster(options: dict, sets: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        CDFL(CDFLParameters(**options)).check_server(sets, pretrains=True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"c1": 0.7, "c2": 0.4}, r"c1 \+ cdfl.c2 is 1.1"),
        ({"sharpness": "sharp"}, "cdfl.sharpness must be a number above 0"),
        ({"sharpness": "3, 0"}, "cdfl.sharpness"),
        (
            {"loss_bar": "max"},
            "cdfl.loss-bar must be a number of at least 0, a share such as 80%, or min",
        ),
        ({"loss_bar": "101%"}, "got '101%'"),
        ({"distance_bar": "-1"}, "cdfl.distance-bar"),
    ],
)
def test_options_that_cannot_be(options: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        CDFL(CDFLParameters(**options))


def test_on_virtual_time_clients_go_to_their_distribution() -> None:
    centres = [np.zeros(8), 4 * np.ones(8)]
    cdfl = CDFL(CDFLParameters(request_seconds=5.0, beta0=0.2, sharpness="10"), seed=1)
    seen: list[events.Event] = []
    grid = grid_of(pulled_app([centres[i % 2] for i in range(6)]), [Device()] * 6)
    probe = Centres(*(centre.tolist() for centre in centres))
    starts = [np.full(8, 1, np.float32), np.full(8, 3, np.float32)]
    cdfl.run(
        grid, MODEL, 60, plan=Plan(eval_every=60), observe=seen.append, probe=probe, starts=starts
    )
    assert {cdfl.clusters.main(f"c{i}") for i in (0, 2, 4)} == {0}
    assert {cdfl.clusters.main(f"c{i}") for i in (1, 3, 5)} == {1}
    # A client uploads after waits of 5 s on average and a second of work.
    assert 30 < seen[-1].time < 120
    assert max(event.staleness for event in of(events.UpdateApplied, seen)) > 5


def digits(out: Path, strategy: str, **keys: object) -> RunConfig:
    return RunConfig(
        strategy=strategy,
        clients=6,
        partition="rotation-groups",
        drift="mixture",
        model="mclr",
        max_updates=24,
        eval_every=24,
        workers="0",
        out=str(out),
        options={"groups": "2", **keys.pop("options", {})},  # type: ignore[dict-item]
    ).with_values(**keys)


@pytest.mark.parametrize("strategy", ["cdfl", "fedsoft-async", "fedsoft"])
def test_a_run_with_the_server_s_own_samples(tmp_path: Path, strategy: str) -> None:
    config = digits(tmp_path / "run", strategy, proxy="30", pretrain=60, score_uploads=True)
    outcome = simulate(config)
    assert outcome.complete
    summary = outcome.summary
    assert summary["cluster_accuracy"] > 0.5
    assert (
        set(summary["cluster_accuracies"]) == {"0", "1"} or len(summary["cluster_accuracies"]) == 2
    )
    assert 0 < summary["accuracy_before"] <= 1
    assert summary["mixture_divergence"] >= 0
    applied = [e for e in read_events(tmp_path / "run") if isinstance(e, events.UpdateApplied)]
    # FedSoft ends with a complete round of at least three clients.
    assert len(applied) == 24 if strategy != "fedsoft" else 24 <= len(applied) < 30
    # FedSoft-Async sends two models, the other methods one.
    down = sum(e.bytes_down for e in applied) / sum(e.bytes_up for e in applied)
    assert down == pytest.approx(2.0 if strategy == "fedsoft-async" else 1.0, rel=0.05)


def test_cdfl_without_proxies_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cdfl estimates clients' mixtures"):
        simulate(digits(tmp_path / "run", "cdfl"))
    assert not (tmp_path / "run").exists()


def test_a_method_that_does_not_start_from_pretrained_models_reports_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pretrain: CASA does not start from pre-trained models"):
        simulate(digits(tmp_path / "run", "casa", pretrain=20))
    assert not (tmp_path / "run").exists()
    assert simulate(digits(tmp_path / "run", "standalone", pretrain=20)).complete


def test_fedsoft_async_takes_only_shares_that_are_a_mixture() -> None:
    assert stated_shares(upload("c0", 1.0, shares=[0.25, 0.75]), 2).tolist() == [0.25, 0.75]
    for shares in ([], [1.0], [0.5, 0.6], [-0.5, 1.5]):
        with pytest.raises(InvalidReplyError, match="the weights of 2 models"):
            stated_shares(upload("c0", 1.0, shares=shares), 2)


def soft_async(**options: object) -> FedSoftAsync:
    """FedSoft-Async with three clients and two clusters, at (0, 0) and (4, 0)."""
    soft = FedSoftAsync(FedSoftAsyncParameters(**options))  # type: ignore[arg-type]
    soft._spec = ModelSpec(("weights",), ((2,),), ("float32",))
    soft.starts = [np.zeros(2, np.float32), np.array([4, 0], np.float32)]
    soft.initialize(np.zeros(2, np.float32))
    for number in range(3):
        client = soft.progress.fleet.clients[f"c{number}"] = Client(f"c{number}", 10)
        soft.on_join(client)
    return soft


def test_fedsoft_async_evaluates_losses_only_if_clients_wait_for_them() -> None:
    assert soft_async().needs.kinds == {"train-mixed"}
    assert soft_async(requests="loss").needs.kinds == {"train-mixed", "losses"}


def test_fedsoft_async_starts_from_pretrained_models() -> None:
    assert soft_async().needs.pretrained
    assert soft_async().has_distributions


def test_fedsoft_async_sends_all_models_with_the_shares_last_stated() -> None:
    soft = soft_async(rho=0.3)
    work = soft.request_for("c0")
    sent = {name: soft.spec.unpack(record).tolist() for name, record in work.arrays.items()}
    assert sent == {"arrays-0": [0.0, 0.0], "arrays-1": [4.0, 0.0]}
    # Two passes without gradients beside one with them, which costs three.
    assert work.settings == {"proximal-mu": 0.3, "compute-scale": pytest.approx(1 + 2 / 3)}
    soft.applied([upload("c0", 0.0, 0.0, shares=[0.75, 0.25])])
    record = soft.request_for("c0").arrays["shares"]
    assert from_array(record["shares"]).tolist() == [0.75, 0.25]


def test_fedsoft_async_compares_an_upload_with_the_mixture_of_the_models_sent() -> None:
    soft = soft_async()
    one = upload("c0", 1.0, 0.0, shares=[0.75, 0.25])
    soft.bases.open(one.task, soft.models, {}, [np.zeros(2), np.array([4, 0])])
    assert soft.base_of(one).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("shares", "mixture"), [((), 2.0), ((0.75, 0.25), 1.0)])
def test_a_client_of_fedsoft_async_evaluates_its_mixture_or_the_mean_before_it_states_one(
    shares: tuple[float, ...], mixture: float
) -> None:
    soft = soft_async(requests="loss")
    one = upload("c0", 0.0, 0.0, shares=shares)
    soft.scheduling.accept(one, 0.0)
    if shares:
        soft.applied([one])
    work = soft.request_for("c0")
    assert (work.kind, work.settings) == ("losses", {"compute-scale": pytest.approx(1 / 3)})
    assert soft.spec.unpack(work.arrays["arrays"]).tolist() == pytest.approx([mixture, 0.0])


def test_a_cluster_of_fedsoft_async_without_updates_so_far_takes_the_first_one_fully() -> None:
    # e_k − τ = 0, below b.
    soft = soft_async(b=1.0)
    applied = soft.applied([upload("c0", 1.0, 0.0, shares=[1.0, 0.0])])[0]
    assert applied.weight == 0.025


def test_fedsoft_async_takes_a_share_of_nothing() -> None:
    soft = soft_async()
    soft.applied([upload("c0", 1.0, 0.0, shares=[1.0, 0.0])])
    assert soft.clusters.of("c0") == {0: 1.0}
    assert soft.state.shares["c0"] == [1.0, 0.0]


def test_fedsoft_async_keeps_each_held_version_once() -> None:
    soft = soft_async()
    assert sorted(soft.bases.vectors) == ["0/0", "1/0"]
    applied = soft.applied([upload("c0", 1.0, 0.0, shares=[0.8, 0.2])])[0]
    assert (applied.cluster, applied.weight) == (0, 0.025)
    # Cluster 0 has a second version now, which c0 holds; the others still have the first.
    assert sorted(soft.bases.vectors) == ["0/0", "0/1", "1/0"]
    for client in ("c1", "c2"):
        soft.applied([upload(client, 1.0, 0.0, shares=[0.2, 0.8])])
    assert "0/0" not in soft.bases.vectors
