"""Central privacy: ε by hand and by other formulas, noise, clipping, bounds, refusals."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app
from runs import devices, of
from scipy.stats import chi2, norm

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.feature import Feature, FeatureContext, Refusal
from raceme.core.gaussian import clipped, gaussian_mu
from raceme.core.messages import Vector
from raceme.core.progress import Plan
from raceme.core.requests import Outcome, Request, Update
from raceme.core.strategy import Method, Needs
from raceme.features.central_privacy.server import CentralPrivacy, epsilon_of
from raceme.features.central_privacy.tree import cost, renewed
from raceme.runs.experiment import (
    build_grid,
    build_strategy,
    plan,
    resolve,
    training_settings,
)
from raceme.simulation import VirtualGrid
from raceme.strategies import (
    FedAsync,
    FedAsyncParameters,
    FedAvg,
    FedBuff,
    FedBuffParameters,
    FedProx,
)
from raceme.training.models import initial_arrays

ONES = np.ones(8, np.float32)
TARGETS = [3 * ONES, -ONES, 2 * ONES]
half = partial(FedAsync, FedAsyncParameters(alpha=0.5, decay="constant"))
buffer = partial(FedBuff, FedBuffParameters(k=3))


class Seen(Feature):
    """Records the model after each aggregation, and the updates in it."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[Vector] = []
        self.versions: list[int] = []
        self.parts: list[tuple[float, Update]] = []

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        (model,) = context.clusters.models.values()
        self.models.append(model.vector.copy())
        self.versions.append(model.version)
        for update, outcome in zip(updates, outcomes, strict=True):
            self.parts.append((outcome.weight, update))


class Compared(Method):
    """Takes over each client's model: an aggregation that is not a sum."""

    needs = Needs(one_model=True)

    def on_update(self, update: Update) -> Outcome:
        """Replace the model."""
        self.models[0].replace(update.vector)
        return Outcome(0, update.staleness, 1.0)


def private_of(keys: dict[str, Any]) -> CentralPrivacy:
    features = Chain.of(RunConfig.from_mapping(keys))
    return next(feature for feature in features if isinstance(feature, CentralPrivacy))


def private(method: Method, noise: float, **keys: Any) -> Seen:
    """Give a method central privacy, and return the feature that records its models."""
    seen, privacy = Seen(), private_of({"privacy-central": noise, **keys})
    method.features = Chain({"central-privacy": privacy, "seen": seen})
    return seen


def ran(
    method: Method, grid: VirtualGrid, updates: int, stop: Any = lambda: ""
) -> list[events.Event]:
    seen: list[events.Event] = []
    method.run(
        grid,
        MODEL,
        updates,
        timeout=60.0,
        plan=Plan(eval_every=1000),
        observe=seen.append,
        stop_check=stop,
    )
    return seen


def fleet(*seconds: float) -> VirtualGrid:
    return grid_of(pulled_app(TARGETS), devices(*(seconds or (1.0, 1.0, 1.0))))


# Privacy accounting.


@pytest.mark.parametrize(
    ("participations", "noise", "delta", "rho"),
    # k Gaussian mechanisms are ρ-zCDP with ρ = k / (2 z²).
    [(1, 1.0, 1e-5, 0.5), (20, 4.0, 1e-5, 0.625), (200, 10.0, 1e-6, 1.0)],
)
def test_epsilon_by_hand_and_by_other_formulas(
    participations: int, noise: float, delta: float, rho: float
) -> None:
    epsilon = epsilon_of(participations, noise, delta)
    # The exact δ(ε) of Gaussian noise (Balle and Wang 2018), with scipy's Φ.
    mu = math.sqrt(2 * rho)
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert exact == pytest.approx(delta, rel=1e-6)
    # ρ-zCDP, and Rényi DP at its best order 1 +
    # √(log(1/δ) / ρ), give the bound ρ + 2 √(ρ log(1/δ)).
    bound = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert 0.75 * bound < epsilon < bound
    # A composition of single mechanisms, by privacy loss distributions and by Rényi DP.
    for kind, within in (
        (dp_accounting.pld.PLDAccountant, 0.01),
        (dp_accounting.rdp.RdpAccountant, 0.12),
    ):
        other = kind().compose(dp_accounting.GaussianDpEvent(noise), participations)
        assert epsilon <= other.get_epsilon(delta) <= (1 + within) * epsilon


@pytest.mark.parametrize(("budget", "noise"), [(8.0, 3.0), (1.0, 20.0), (50.0, 0.5), (4.0, 1.0)])
def test_the_most_updates_within_a_budget(budget: float, noise: float) -> None:
    keys = {"privacy-central": noise, "privacy-delta": 1e-5}

    def most(budget: float) -> int:
        feature, count = private_of({**keys, "privacy-budget": budget}), 0
        while not feature.holds("c0", None):  # type: ignore[arg-type]
            count += 1
            feature.state.participations["c0"] = count
        return count

    count = most(budget)
    assert count == 0 or epsilon_of(count, noise, 1e-5) <= budget
    assert epsilon_of(count + 1, noise, 1e-5) > budget
    # The budget may be used up exactly.
    assert most(epsilon_of(7, noise, 1e-5)) == 7


def test_clipping_keeps_short_changes_and_shortens_long_ones() -> None:
    assert clipped(ONES, 3.0) is ONES  # Its length is √8 = 2.83.
    short = clipped(4 * ONES, 2.0)
    assert np.linalg.norm(short) == pytest.approx(2.0)
    assert short[0] == short[7] > 0


# Sums: weights of updates, and noise in versions of the model.


@pytest.mark.parametrize(
    ("make", "whole"), [(half, 1), (buffer, 3), (FedAvg, 3), (FedProx, 3)], ids=str
)
def test_methods_of_sums_move_by_the_weighted_sum_of_changes(make: Any, whole: int) -> None:
    method = make()
    seen = private(method, 1e-9, **{"privacy-clip": 2.0})
    ran(method, fleet(), 3)
    first = next(m for m, version in zip(seen.models, seen.versions, strict=True) if version)
    # All start from zeros, and move half-way: by 1.5, 0.5 and 1 times √8, clipped to 2.
    lengths = [np.linalg.norm(update.vector) for _, update in seen.parts]
    assert sorted(lengths) == pytest.approx([math.sqrt(2), 2.0, 2.0])
    moved = sum(weight * update.vector.astype(float) for weight, update in seen.parts[:whole])
    assert method.needs.sums
    assert first == pytest.approx(moved, abs=1e-6)
    # Numbers of examples do not affect the weights.
    assert len({weight for weight, _ in seen.parts[:whole]}) == 1


@pytest.mark.parametrize(
    ("make", "seconds", "moved"),
    [
        (half, [1.0], 0.5),
        (buffer, [1.0] * 3, 1 / 3),
        # Two, or all three, of the updates in a buffer come from the same client.
        (buffer, [1.0, 2.0], 2 / 3),
        (buffer, [1.0], 1.0),
        (FedAvg, [1.0] * 3, 1 / 3),
        (Compared, [1.0], 1.0),
    ],
)
def test_the_noise_has_the_stated_variance(make: Any, seconds: list[float], moved: float) -> None:
    method = make()
    seen = private(method, 2.0, **{"privacy-clip": 0.7})
    # Clients echo the model, so that it only moves by noise.
    ran(method, grid_of(pulled_app(), devices(*seconds)), 900)
    versions = dict(zip(seen.versions, seen.models, strict=True))
    steps = np.diff([np.zeros(8), *(versions[v] for v in sorted(versions) if v)], axis=0)
    # A client can move a version by its clip times this share; the noise has twice that deviation.
    total = float(np.square(steps / (2.0 * 0.7 * moved)).sum())
    assert steps.size >= 2400
    # Fails by chance for one of 10,000 seeds; 6 % of the variance at 2,400 numbers.
    assert chi2.ppf(5e-5, steps.size) < total < chi2.ppf(1 - 5e-5, steps.size)


def test_noise_is_secret_outside_of_simulations() -> None:
    first, second = (
        private_of({"privacy-central": 1.0})._noise(8, 1.0, context)
        for context in [SimpleNamespace(is_simulated=False)] * 2
    )
    assert not np.array_equal(first, second)
    first, second = (
        private_of({"privacy-central": 1.0})._noise(8, 1.0, context)
        for context in [SimpleNamespace(is_simulated=True)] * 2
    )
    assert np.array_equal(first, second)


def test_a_method_sees_nothing_but_the_update() -> None:
    method = Compared()
    seen = private(method, 1.0)
    ran(method, fleet(), 3)
    for _, update in seen.parts:
        assert update.num_examples == 1
        assert math.isnan(update.train_loss)
        assert (update.metrics, update.numbers, update.mixture) == ({}, {}, ())


class Curious(Compared):
    """Requests losses without having declared it."""

    def request_for(self, client: str) -> Request:
        """Return the query."""
        return Request(client, kind="losses")


def test_a_method_asks_for_nothing_but_training() -> None:
    method = Curious()
    private(method, 1.0)
    with pytest.raises(UserError, match="work of kind 'losses', whose answer gets none"):
        ran(method, fleet(), 3)


# Cohorts: the noisy mean of several updates of a cluster replaces each of them.


class Means(Compared):
    """Aggregates sums of updates, in clusters."""

    needs = Needs(bases=True, sum_weight=lambda update: 1.0)


@pytest.mark.parametrize(("cohort", "members"), [(2, 2), (3, 3), (20, 3)])
def test_members_of_a_cohort_bring_their_mean(cohort: int, members: int) -> None:
    method = Means()
    seen = private(method, 1e-9, **{"privacy-clip": 2.0, "privacy-cohort": cohort})
    ran(method, fleet(1.0, 1.1, 1.2), members)
    # Clients move half-way from zeros: by 1.5, −0.5 and 1, times √8, clipped to 2.
    expected = np.mean([2 / math.sqrt(8), -0.5, 2 / math.sqrt(8)][:members])
    vectors = [update.vector for _, update in seen.parts]
    assert len(vectors) == members
    assert np.stack(vectors) == pytest.approx(np.full((members, 8), expected), abs=1e-6)


def test_the_noise_of_a_cohort_has_the_stated_variance() -> None:
    method = Means()
    seen = private(method, 2.0, **{"privacy-clip": 0.7, "privacy-cohort": 3})
    ran(method, grid_of(pulled_app(), devices(1.0, 1.0, 1.0)), 450)
    (privacy, _), models = method.features, [np.zeros(8), *seen.models]
    # A round of three replaces the model by the former
    # one, plus noise that the three have in common.
    steps = np.diff(np.array(models[::3]), axis=0)
    assert privacy.state.draws == len(steps) == 150
    total = float(np.square(steps / (2.0 * 0.7 / 3)).sum())
    assert chi2.ppf(5e-5, steps.size) < total < chi2.ppf(1 - 5e-5, steps.size)


def test_a_cluster_that_is_much_smaller_than_a_cohort_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    method = Means()
    private(method, 1.0, **{"privacy-cohort": 12})
    ran(method, fleet(1.0, 1.0, 1.0), 9)
    said = "Cluster 0 has 3 clients online: the noise in its model is 4.0 times that of a cohort of"
    assert caplog.text.count(said) == 1


def test_few_updates_wait_when_the_others_have_spent_their_budget() -> None:
    method = Means()
    private(method, 1.0, **{"privacy-updates": 5, "privacy-cohort": 3})
    grid = grid_of(pulled_app(), devices(1.0, 1.0, 1.0, 1.0, 1.0, 30.0))
    seen = ran(method, grid, 1000)
    taken = [one.client for one in of(events.UpdateApplied, seen)]
    # The slow client takes part once or twice; then it is alone, less than half a cohort.
    assert [taken.count(f"c{i}") for i in range(5)] == [5] * 5
    assert taken.count("c5") < 5
    assert not of(events.UpdateRejected, seen)
    assert seen[-1].ending is events.Ending.LIMIT
    assert seen[-1].reason == (
        "5 clients may contribute no more, and the others wait for cohorts of 3 updates "
        "(privacy-cohort)"
    )


def test_noisy_sketches_are_part_of_the_account() -> None:
    keys = {"strategy": "panicle", "clients": 8, "panicle.sketch-epsilon": 50.0, "workers": "0"}
    keys |= {"model": "mclr", "max-updates": 24, "privacy-central": 2.0, "privacy-cohort": 4}

    def epsilon(**more: Any) -> tuple[float, int]:
        seen: list[events.Event] = []
        method = simulated({**keys, **more}, seen)
        privacy = next(one for one in method.features if isinstance(one, CentralPrivacy))
        losses = [e for e in of(events.Measured, seen) if e.schema.name == "privacy"]
        return losses[-1].values["epsilon"], max(privacy.state.participations.values())

    known, updates = epsilon(**{"privacy-known-groups": True})
    assert known == pytest.approx(epsilon_of(updates, 2.0, 1e-5))
    both, updates = epsilon()
    # Two sketches together have the μ of ε = 50, at the same δ.
    mu = math.sqrt(gaussian_mu(50.0, 1e-5) ** 2 + updates / 4)
    assert both == pytest.approx(epsilon_of(1, 1 / mu, 1e-5), rel=1e-6)
    with pytest.raises(UserError, match="with a client's two sketches it costs ε = 5"):
        epsilon(**{"privacy-budget": 40.0})


def simulated(keys: dict[str, Any], seen: list[events.Event]) -> Method:
    """Run a configuration in this process."""
    config = resolve(RunConfig.from_mapping(keys))
    method = build_strategy(config)
    method.run(
        build_grid(config),
        initial_arrays(config),
        config.max_updates or 0,
        train_config=training_settings(config),
        plan=plan(config),
        observe=seen.append,
    )
    return method


# Trees.


def test_a_sum_is_made_of_a_node_for_each_1_of_the_binary_number() -> None:
    # Two trees of four leaves, by hand: nodes are (level, number).
    expected = [
        {(0, 0)},
        {(1, 0)},
        {(1, 0), (0, 2)},
        {(2, 0)},
        {(2, 0), (0, 4)},
        {(2, 0), (1, 2)},
        {(2, 0), (1, 2), (0, 6)},
        {(2, 0), (2, 1)},
    ]
    held: set[tuple[int, int]] = set()
    for leaf, nodes in enumerate(expected):
        new, former = renewed(leaf, 2)
        assert held.issuperset(former)
        held = held - set(former) | {new}
        assert held == nodes
        # The nodes cover each leaf so far exactly once.
        covered = [i for level, at in held for i in range(at << level, (at + 1) << level)]
        assert sorted(covered) == list(range(leaf + 1))


@pytest.mark.parametrize(
    ("leaves", "height", "expected"),
    [
        ({3: 1.0}, 0, 1.0),
        # One node on each of the levels 0 to 4.
        ({5: 1.0}, 4, 5.0),
        # Leaves 0 and 1 share the nodes of levels 1 and 2: 1 + 1 + 4 + 4.
        ({0: 1.0, 1: 1.0}, 2, 10.0),
        # Leaves 0 and 2 share the node of level 2: 1 + 1 + 1 + 1 + 4.
        ({0: 1.0, 2: 1.0}, 2, 8.0),
        # All leaves of a tree of 8: 8 · 1 + 4 · 4 + 2 · 16 + 64.
        (dict.fromkeys(range(8), 1.0), 3, 120.0),
        # Shares are added before they are squared: 4 + 0.25 + 6.25.
        ({0: 2.0, 1: 0.5}, 1, 10.5),
    ],
)
def test_the_cost_of_a_client_in_a_tree_by_hand(
    leaves: dict[int, float], height: int, expected: float
) -> None:
    assert cost(leaves, height) == expected


@pytest.mark.parametrize("height", [0, 3, 6])
def test_the_account_of_a_tree_agrees_with_the_library(height: int) -> None:
    # Each client takes part once; the library counts height + 1 nodes for 2^height steps.
    event = dp_accounting.SingleEpochTreeAggregationDpEvent(3.0, 2**height)
    other = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    ).compose(event)
    own = epsilon_of(1, 3.0 / math.sqrt(cost({0: 1.0}, height)), 1e-5)
    assert own <= other.get_epsilon(1e-5) <= 1.12 * own


def test_the_noise_of_trees_has_the_stated_variance() -> None:
    method = buffer()
    seen = private(method, 2.0, **{"privacy-clip": 0.7, "privacy-tree": 4})
    ran(method, grid_of(pulled_app(), devices(1.0, 1.0, 1.0)), 1200)
    versions = dict(zip(seen.versions, seen.models, strict=True))
    sums = np.array([versions[v] for v in sorted(versions) if v])
    (privacy, _) = method.features
    # Sums of leaves in units of the noise, relative to the start of their tree.
    found = sums / (2.0 * 0.7 * privacy.state.share)
    begun = np.concatenate([np.zeros((1, 8)), found[3:-1:4]])
    assert len(found) == 400
    for leaf, nodes in enumerate([1, 1, 2, 1]):
        squares = float(np.square(found[leaf::4] - begun).sum()) / nodes
        assert chi2.ppf(2e-5, begun.size) < squares < chi2.ppf(1 - 2e-5, begun.size)


def test_a_client_contributes_no_more_to_trees_than_its_budget() -> None:
    # A run with one client: its leaves are 0, 1, 2, …; three of them cost 3 · 1 + (4 + 1) + 9 = 17
    # in a tree of four, four of them 4 + 8 + 16 = 28.
    budget = epsilon_of(1, 10.0 / math.sqrt(17.0), 1e-5) + 1e-6
    method = half()
    keys = {"privacy-tree": 4, "privacy-budget": budget}
    private(method, 10.0, **keys)
    seen = ran(method, fleet(1.0), 1000)
    assert len(of(events.UpdateApplied, seen)) == 3
    losses = [one.values["epsilon"] for one in of(events.Measured, seen)]
    expected = [epsilon_of(1, 10.0 / math.sqrt(cost), 1e-5) for cost in (3.0, 10.0, 17.0)]
    assert losses == pytest.approx(expected)
    assert "the privacy budget of" in seen[-1].reason


# Limits of the budget.


def test_a_client_contributes_no_more_than_its_budget() -> None:
    budget = {"privacy-budget": epsilon_of(4, 3.0, 1e-5) + 1e-6}
    method = half()
    private(method, 3.0, **budget)
    seen = ran(method, fleet(1.0, 2.0, 5.0), 1000)
    taken = [one.client for one in of(events.UpdateApplied, seen)]
    assert {client: taken.count(client) for client in taken} == {"c0": 4, "c1": 4, "c2": 4}
    ended = seen[-1]
    assert isinstance(ended, events.RunEnded)
    assert ended.ending is events.Ending.LIMIT
    assert ended.reason.endswith("is spent: each client has contributed 4 updates")
    measured = of(events.Measured, seen)
    assert [one.values["participations"] for one in measured] == [1, 2, 3, 4]
    assert measured[-1].values["epsilon"] == pytest.approx(budget["privacy-budget"], abs=1e-5)
    assert not of(events.UpdateRejected, seen)


@pytest.mark.parametrize("make", [half, buffer, FedAvg, Compared], ids=str)
def test_a_bound_on_updates_ends_the_run_when_all_have_reached_it(make: Any) -> None:
    method = make()
    private(method, 1.0, **{"privacy-updates": 6})
    seen = ran(method, fleet(1.0, 1.0, 3.0), 1000)
    assert len(of(events.UpdateApplied, seen)) == 18
    assert method.models[0].version == {FedAvg: 6, buffer: 6}.get(make, 18)
    assert seen[-1].reason == "each client has contributed 6 updates"


def test_a_run_does_not_end_while_updates_wait_that_are_paid_for() -> None:
    method = half()
    private(method, 1.0, **{"privacy-updates": 2})
    ran(method, fleet(), 1000)
    privacy, context = next(iter(method.features)), method.features._connected
    assert privacy.ends(context)
    privacy.state.unused[99] = True
    assert not privacy.ends(context)


def test_an_update_beyond_the_bound_is_refused() -> None:
    method = half()
    seen = private(method, 1.0, **{"privacy-updates": 2})
    ran(method, fleet(), 1000)
    privacy, (_, update) = next(iter(method.features)), seen.parts[-1]
    before = copy.deepcopy(privacy.state)
    assert isinstance(privacy.on_update(update, method.features._connected), Refusal)
    assert privacy.state == before


def test_a_resumed_run_gets_no_budget_back() -> None:
    method, grid = half(), fleet(1.0, 2.0, 5.0)
    private(method, 1.0, **{"privacy-updates": 4})
    ran(method, grid, 1000)
    again = half()
    private(again, 1.0, **{"privacy-updates": 4})
    again.load_state_dict(copy.deepcopy(method.state_dict()))
    # On a fleet that joins again, as after a restart of a server.
    seen = ran(again, fleet(1.0, 2.0, 5.0), 1000)
    assert not of(events.UpdateApplied, seen)
    assert again.progress.updates == 12


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (buffer, {}),
        (buffer, {"privacy-tree": 8}),
        (FedAvg, {}),
        (Compared, {}),
        (Means, {"privacy-cohort": 2}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_one_that_was_never_interrupted(
    make: Any, keys: dict[str, Any]
) -> None:
    def start(method: Method, grid: VirtualGrid, updates: int, former: Any = None) -> Any:
        private(method, 1.0, **{"privacy-updates": 30, **keys})
        if former is not None:
            method.load_state_dict(former["method"])
            grid.load_state_dict(former["grid"])
        ran(method, grid, updates)
        return copy.deepcopy({"method": method.state_dict(), "grid": grid.state_dict()})

    def slow() -> VirtualGrid:
        return fleet(1.0, 1.3, 2.1)

    whole = start(make(), slow(), 40)
    resumed = start(make(), slow(), 40, start(make(), slow(), 17))
    # The chain also contains a feature without a state.
    assert resumed["method"]["features"] == whole["method"]["features"]
    state = resumed["method"]["features"]["central-privacy"]
    assert max(state["draws"], state["leaf"]) >= 13
    models = [one["method"]["clusters"]["models"]["0"]["vector"] for one in (resumed, whole)]
    assert np.array_equal(*models)


# Unsupported settings.


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"strategy": "ifca"}, "ifca asks clients for more, which gets none: train-best"),
        ({"strategy": "flexcfl"}, "label-counts"),
        ({"strategy": "faacl"}, "losses"),
        ({"strategy": "standalone"}, "shares no models"),
        ({"own-model": True}, "own-model"),
        ({"score-uploads": True}, "score-uploads"),
        ({"protection": "norm"}, "protection"),
        (
            {"privacy-central": 1.0, "privacy-budget": 1.0},
            "costs ε = 4.38: give privacy-central 3.",
        ),
        ({"privacy-budget": 0.0}, "privacy-budget must be greater than 0"),
        ({"privacy-budget": -1.0}, "privacy-budget must be greater than 0"),
        ({"privacy-delta": 1.0}, "privacy-delta must be"),
        ({"privacy-clip": 0.0}, "privacy-clip must be"),
        ({"privacy-central": -1.0}, "privacy-central must be"),
        ({"privacy-updates": 0}, "privacy-updates must be"),
        ({"strategy": "panicle"}, "cannot tell which clients are alike. Give panicle.sketch-eps"),
        ({"privacy-tree": 6}, "privacy-tree must be a power of two, got 6"),
        ({"privacy-tree": 8, "strategy": "casa"}, "casa does not only add updates to one model"),
        ({"privacy-tree": 8, "strategy": "fedbuff", "secure": True}, "leave one of them out"),
    ],
)
def test_what_gets_no_noise_or_makes_no_sense_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_strategy(resolve(RunConfig.from_mapping({"privacy-central": 5.0, **keys})))


def test_panicle_leaves_its_own_models_out() -> None:
    keys = {"strategy": "panicle", "privacy-central": 5.0, "privacy-known-groups": True}
    config = resolve(RunConfig.from_mapping(keys))
    build_strategy(config)
    assert config.value("own-model") is False


def test_a_model_with_running_statistics_is_refused() -> None:
    feature = private_of({"privacy-central": 1.0})
    feature.check_model(SimpleNamespace(trainable=None, counters=None))  # type: ignore[arg-type]
    some = np.ones(8, np.bool_)
    with pytest.raises(UserError, match="running statistics"):
        feature.check_model(SimpleNamespace(trainable=some, counters=None))  # type: ignore[arg-type]


def test_a_delta_that_says_little_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    keys = {"privacy-central": 5.0, "privacy-delta": 0.1, "clients": 10}
    build_strategy(resolve(RunConfig.from_mapping(keys)))
    assert "not below 1 / 10" in caplog.text


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"dp_accounting is not installed.*privacy\]'"):
        build_strategy(resolve(RunConfig.from_mapping({"privacy-central": 5.0})))
