"""The suites of CDFL's Table 1: the published numbers, and the settings."""

from __future__ import annotations

import pytest

from raceme.experiments.suites import Scored, load_suite, shipped

TABLE1 = {
    2: "79.9 83.4 83.8 79.8 83.6 83.3 78.1",
    3: "78.3 82.3 83.5 78.0 81.8 82.3 74.6",
    4: "76.5 80.0 82.9 75.9 78.6 80.0 69.4",
    6: "76.8 78.8 81.8 76.0 76.1 76.9 69.7",
}
"""Li and Zhu, "Towards Client Driven Federated Learning", Table 1: accuracy in percent of CDFL
before, after and at the clusters, of FedSoft-Async the same, and local."""
TABLE2 = {2: (0.5, 0.4, "3"), 3: (0.5, 0.25, "3"), 4: (0.5, 0.25, "7"), 6: (0.7, 0.2, "15")}
"""The same, Table 2: c1, c2 and A."""


@pytest.mark.parametrize("name", ["cdfl-table1", "cdfl-fig"])
@pytest.mark.parametrize("k", TABLE1)
def test_the_suites_of_cdfl(name: str, k: int) -> None:
    variants = shipped(name)
    assert set(variants) - {"digits"} == {f"fashion-{number}" for number in TABLE1}
    suite = load_suite(variants[f"fashion-{k}"])
    assert [method.label for method in suite.methods] == ["cdfl", "fedsoft-async", "local"]
    rows = [method.published[0] for method in suite.methods]
    published = [
        number
        for row in rows
        for number in (row.before, row.after, row.cluster)
        if number is not None
    ]
    assert published == [float(number) for number in TABLE1[k].split()]
    assert suite.scores == tuple(Scored)
    assert suite.shows_mixtures
    assert suite.shows_work
    for method in suite.methods:
        config = suite.config(method, 0)
        # 25 uploads per client on average.
        assert (config.clients, config.max_updates) == (20 * k, 500 * k)
        assert len(str(config.options["groups"]).split(",")) == k
        assert (config.options["mixture-size-low"], config.options["mixture-size-high"]) == (
            500,
            2000,
        )
        assert (config.optimizer, config.lr, config.weight_decay) == ("adam", 0.01, 0.005)
        assert (config.batch_size, config.local_epochs, config.value("score-uploads")) == (
            128,
            5,
            True,
        )
    options = suite.config(suite.methods[0], 0).parameters()
    assert (options.k, options.c1, options.c2, options.sharpness) == (k, *TABLE2[k])
    assert (options.loss_bar, options.model_loss_bar, options.distance_bar) == ("0.5", "0", "0")


def test_the_suites_of_the_figures_without_values() -> None:
    """Figures 7 and 20 to 22: K = 4 with Table 2's bars, one thing at a time."""
    changed: dict[str, list[object]] = {}
    for name, path in shipped("cdfl-effects").items():
        suite = load_suite(path)
        configs = [suite.config(method, 0) for method in suite.methods]
        assert {config.max_updates for config in configs} == {2000}
        assert suite.reference in [method.label for method in suite.methods]
        options = [config.parameters() for config in configs]
        assert {(o.k, o.c1, o.c2, o.sharpness) for o in options} == {(4, *TABLE2[4])}
        key = {
            "proxy": [config.proxy for config in configs],
            "clients": [config.clients for config in configs],
            "rho": [o.rho for o in options],
            "lateness": [(o.a, o.b) for o in options],
        }
        changed[name] = list(key[name])
    assert changed == {
        "proxy": ["500", "1000", "2000", "4000"],
        "clients": [100, 250, 500, 1000],
        "rho": [0.01, 0.1, 0.5, 1.0],
        "lateness": [(10.0, 5.0), (1.0, 5.0), (10.0, 100.0), (1.0, 100.0)],
    }


def test_the_suite_of_digits() -> None:
    suite = load_suite(shipped("cdfl-table1")["digits"])
    config = suite.config(suite.methods[0], 0)
    # 40 uploads per client on average; Table 2's last row.
    assert (config.clients, config.max_updates, config.dataset) == (100, 4000, "npz-folder")
    options = config.parameters()
    assert (options.k, options.c1, options.c2, options.sharpness) == (3, 0.9, 0.0, "5")
    assert {options.loss_bar, options.model_loss_bar, options.distance_bar} == {"min"}
    published = [method.published[0] for method in suite.methods]
    assert [row.before for row in published] == [83.5, 84.6, 82.0]
    assert [row.after for row in published] == [88.3, 89.0, None]
    assert [row.cluster for row in published] == [89.0, 87.0, None]
