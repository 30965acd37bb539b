"""Arguments of a strategy that replaces one of Flower's."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from adopted import grid_of
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from quickstarts import initial_numpy, numpy_app

import raceme.strategies as strategies
from raceme.core.errors import UserError
from raceme.core.scheduling import FlowerArguments
from raceme.strategies import CASA, STRATEGIES, CASAParameters, FedAvg, FedAvgParameters
from raceme.strategies.casa.strategy import CASAC
from raceme.strategies.cdfl.fedsoft import FedSoft
from raceme.strategies.csafl import CSAFL


def test_the_arguments_of_flowers_own_strategy_have_its_defaults() -> None:
    wanted = inspect.signature(flower.FedAvg).parameters
    ours = FlowerArguments()
    for name, parameter in wanted.items():
        assert getattr(ours, name) == parameter.default, name


def test_the_defaults_that_are_not_flowers_are_documented() -> None:
    ours = {name: getattr(strategies, name) for name in flower.__all__ if name in dir(strategies)}
    assert ours.keys() >= {"FedAvg", "FedMedian", "FedProx", "FedTrimmedAvg", "Krum", "MultiKrum"}
    other = {}
    for name, method in ours.items():
        known = inspect.signature(method).parameters
        for key, theirs in inspect.signature(getattr(flower, name)).parameters.items():
            if known[key].default != theirs.default:
                other[name, key] = (known[key].default, theirs.default)
    assert other == {
        ("FedProx", "proximal_mu"): (0.05, 0.0),
        ("MultiKrum", "num_nodes_to_select"): (None, 1),
    }
    page = (Path(__file__).parents[2] / "docs" / "flower-users.md").read_text(encoding="utf-8")
    assert "`FedProx(proximal_mu=0.05)` (Flower: 0)" in page
    assert "(Flower: `num_nodes_to_select=1`)" in page


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_them_beside_its_own(name: str) -> None:
    made = STRATEGIES[name](
        fraction_train=1.0, fraction_evaluate=0.5, min_train_nodes=3, weighted_by_key="weight"
    )
    assert made.arguments == FlowerArguments(
        fraction_evaluate=0.5, min_train_nodes=3, weighted_by_key="weight"
    )
    assert type(made.parameters) is STRATEGIES[name].parameters_type
    assert made.parameters == STRATEGIES[name]().parameters


def test_hyper_parameters_are_given_one_by_one_or_together() -> None:
    made = CASA(alpha0=0.6, sketch=64, seed=3, min_available_nodes=5)
    assert made.parameters == CASAParameters(alpha0=0.6, sketch=64)
    assert made.arguments.min_available_nodes == 5
    assert CASA(CASAParameters(gamma=0.3), alpha0=0.6).parameters == CASAParameters(0.6, gamma=0.3)
    assert CASAC(alpha0=0.6).parameters.clustering is False
    assert CASAC(alpha0=0.6).parameters.alpha0 == 0.6


def test_the_share_that_trains_is_that_of_a_round_where_there_are_rounds() -> None:
    assert FedAvg(fraction_train=0.4).parameters.fraction == 0.4
    assert FedAvg(FedAvgParameters(fraction=0.4)).arguments.fraction_train == 0.4
    assert FedAvg(fraction=0.4).arguments.fraction_train == 0.4
    assert FedAvg(fraction_train=0.4).inner.fraction_train == 0.4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fraction_trian": 0.5}, "Did you mean 'fraction_train'"),
        ({"alpha_0": 0.5}, "Did you mean 'alpha0'"),
        ({"fraction_fit": 0.5}, "fraction_fit is called fraction_train"),
        ({"evaluate_fn": print}, r"give it to its start\(evaluate_fn"),
        ({"proximal_mu": 0.1}, "Unknown argument of CASA 'proximal_mu'"),
        ({"alpha0": "much"}, "alpha0 must be a number, got 'much'"),
        ({"alpha0": -1.0}, "alpha0 must be greater than 0, got -1"),
        ({"fraction_train": 0.0}, "fraction_train must be greater than 0, got 0"),
        ({"fraction_train": 1.5}, "fraction_train must be at most 1, got 1.5"),
        ({"fraction_evaluate": 1.5}, "fraction_evaluate must be at most 1, got 1.5"),
        ({"fraction_train": True}, "fraction_train must be a number, got True"),
        ({"min_train_nodes": 2.5}, "min_train_nodes must be a whole number, got 2.5"),
        ({"min_available_nodes": -1}, "min_available_nodes must be at least 0"),
        ({"weighted_by_key": ""}, "weighted_by_key must be text, got ''"),
        ({"train_metrics_aggr_fn": 3}, "train_metrics_aggr_fn must be a function or None, got 3"),
    ],
)
def test_arguments_without_effect_are_reported(arguments: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        CASA(**arguments)


def test_a_share_means_nothing_to_methods_that_choose_clients_themselves() -> None:
    with pytest.raises(UserError, match=r"fraction_train has no effect on CSAFL.* picked"):
        CSAFL(fraction_train=0.5)
    with pytest.raises(UserError, match=r"fraction_train has no effect on FedSoft.* drawn"):
        FedSoft(fraction_train=0.5)
    with pytest.raises(UserError, match="fraction and fraction_train are the same"):
        FedAvg(fraction=0.3, fraction_train=0.5)


def test_arguments_by_position_are_no_parameters() -> None:
    with pytest.raises(UserError, match=r"by keyword: CASA\(fraction_train=0.5\)"):
        CASA(0.5)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"num_rounds": 0}, "num_rounds must be a whole number of at least 1, got 0"),
        ({"max_updates": 0}, "max_updates must be a whole number of at least 1, got 0"),
        ({"max_update": 9}, "Did you mean 'max_updates'"),
        ({"initial_arrays": ArrayRecord()}, "initial_arrays must be an ArrayRecord with the model"),
    ],
)
def test_an_impossible_start_is_an_error(told: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        CASA().start(grid_of(numpy_app()), **{"initial_arrays": initial_numpy(), **told})


def test_a_strategy_of_flower_around_one_of_ours_is_an_error() -> None:
    wrapped = flower.DifferentialPrivacyServerSideFixedClipping(CASA(), 0.1, 1.0, 5)
    with pytest.raises(UserError, match=r"cannot be put around it.* CASA's .* LocalDpMod"):
        wrapped.start(grid_of(numpy_app()), initial_numpy())


def test_nodes_that_never_come_are_not_waited_for_on_virtual_time() -> None:
    with pytest.raises(
        UserError, match="Only 3 of min_available_nodes=5 nodes connected within 60"
    ):
        CASA(min_available_nodes=5).start(
            grid_of(numpy_app(), nodes=3), initial_numpy(), timeout=60.0
        )
