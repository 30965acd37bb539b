"""The suite of CSAFL's Table 2 and figure 5: the published numbers, and the settings."""

import pytest

from raceme.experiments.suites import Score, load_suite, shipped

METHODS = ("t-fedavg", "ta-fedavg", "g-fedavg", "ga-fedavg", "r-fedavg", "nog-fedavg", "csafl")
TABLE2 = {
    "mnist-10s": "90.0 86.1 96.3 95.8 88.0 89.9 96.2",
    "mnist-15s": "90.0 86.0 96.2 95.6 88.3 89.6 96.2",
    "characters-10s": "77.1 55.1 88.6 77.1 62.4 74.1 84.2",
    "characters-15s": "77.4 51.1 89.7 77.7 63.0 77.2 85.5",
    "synthetic-10s": "26.6 33.0 88.1 64.8 31.9 40.5 66.2",
    "synthetic-15s": "20.4 53.6 71.4 62.3 35.6 52.9 64.1",
}
"""Zhang et al., "CSAFL", IJCNN 2021, Table II: accuracy in percent, in the order of the columns."""
SETTINGS = {"mnist": (1000, 0.03, 3), "characters": (200, 0.003, 5), "synthetic": (100, 0.01, 5)}
"""Clients, learning rate and m, the last two as in FlexCFL's paper."""


@pytest.mark.parametrize("part", TABLE2)
def test_the_suite_of_csafl(part: str) -> None:
    assert set(shipped("csafl-table2")) == set(TABLE2)
    suite = load_suite(shipped("csafl-table2")[part])
    dataset, _, seconds = part.partition("-")
    published = [method.published[0].accuracy for method in suite.methods]
    assert tuple(method.label for method in suite.methods) == METHODS
    assert published == [float(number) for number in TABLE2[part].split()]
    assert (suite.score, suite.rounds) == (Score.BEST_WEIGHTED, 300)
    clients, lr, groups = SETTINGS[dataset]
    for method in suite.methods:
        config = suite.config(method, 0)
        assert (config.dataset, config.clients, config.lr) == (dataset, clients, lr)
        assert (config.local_epochs, config.batch_size, config.devices) == (10, 10, "fdma")
        budget = config.options.get(f"{method.strategy}.budget", 10.0)
        assert f"{budget:g}s" == seconds
        has_groups = method.label not in ("t-fedavg", "ta-fedavg", "nog-fedavg")
        assert config.options.get(f"{method.strategy}.groups") == (groups if has_groups else None)
