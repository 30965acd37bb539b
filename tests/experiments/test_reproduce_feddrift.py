"""The suites after FedDrift's paper: published numbers, methods and settings."""

from __future__ import annotations

import pytest

from raceme.datasets.drift import ConceptsOptions, schedule_of
from raceme.experiments.suites import Score, load_suite, shipped

METHODS = ["feddrift", "feddrift-eager", "feddrift-async", "fedavg", "fedasync", "ifca", "casa"]


@pytest.mark.parametrize(("concepts", "published"), [(2, 93.47), (4, 90.68)])
def test_the_table(concepts: int, published: float) -> None:
    suite = load_suite(shipped("feddrift-table")[f"mnist-{concepts}"])
    assert [method.label for method in suite.methods] == METHODS
    assert suite.score is Score.STEP_STARTS
    rows = {method.label: method.row for method in suite.methods if method.row is not None}
    assert {label: row.accuracy for label, row in rows.items()} == {"feddrift": published}
    configs = {method.label: suite.config(method, 0) for method in suite.methods}
    for config in configs.values():
        options = config.read(ConceptsOptions)
        assert (options.concepts, options.concept_steps, config.clients) == (concepts, 10, 10)
        assert (config.local_steps, config.lr, config.eval_steps) == (5, 0.01, True)
        # Ten steps, each as many updates as ten clients make in 200 rounds.
        schedule = schedule_of(config)
        assert schedule is not None
        assert [schedule.step(0.0, n, 0) for n in (1999, 2000, 19999)] == [0, 1, 9]
    drift = configs["feddrift"].parameters()
    assert (drift.start, drift.delta, drift.measure) == ("per-client", 0.1, "accuracy")
    assert configs["ifca"].parameters().k == concepts
