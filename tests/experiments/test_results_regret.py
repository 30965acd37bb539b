"""Regret over several cases; and the cases of the suite `panicle`."""

import pytest

from raceme.experiments.results import (
    Comparison,
    Result,
    Run,
    regret_overview,
    regret_table,
    regrets,
    slowness,
)
from raceme.experiments.suites import ComparedMethod, Suite, load_suite, shipped


def case(**methods: tuple[float, float | None]) -> Comparison:
    """A comparison of one run for each method, of accuracy and time to the target."""
    made = {label: ComparedMethod(label=label, strategy="fedasync") for label in methods}
    results = []
    for label, (accuracy, time) in methods.items():
        reached = None if time is None else {"virtual_time": time, "updates": 1}
        summary = {"accuracy": accuracy, "time_to_target": reached}
        results.append(Result(made[label], label, (Run(0, label, summary),)))
    suite = Suite(title="a case", methods=tuple(made.values()), settings={}, seeds=(0,))
    return Comparison(suite=suite, results=tuple(results))


def test_regret_is_how_far_a_method_is_from_the_best_of_each_case() -> None:
    cases = {"one": case(a=(0.90, 2.0), b=(0.85, 1.0)), "two": case(a=(0.70, None), b=(0.71, 3.0))}
    found = regrets(cases)
    assert found["a"] == pytest.approx({"one": 0.0, "two": 1.0})
    assert found["b"] == pytest.approx({"one": 5.0, "two": 0.0})
    assert slowness(cases) == {"a": {"one": 2.0, "two": float("inf")}, "b": {"one": 1.0, "two": 1}}


def test_the_worst_case_of_each_method_is_in_bold() -> None:
    cases = {"one": case(a=(0.90, 2.0), b=(0.85, 1.0)), "two": case(a=(0.70, None), b=(0.71, 3.0))}
    text = regret_table(cases)
    assert text is not None
    assert text.columns == ("case", "a", "b")
    assert text.rows == (
        ("one", "0.00", "**5.00**"),
        ("two", "**1.00**", "0.00"),
        ("mean", "0.50", "2.50"),
        ("worst", "1.00", "5.00"),
        ("fastest", "0%", "100%"),
    )


def test_the_overview_has_a_row_for_each_method_the_best_first() -> None:
    cases = {"one": case(a=(0.90, 2.0), b=(0.95, 1.0)), "two": case(a=(0.70, None), b=(0.71, 3.0))}
    assert regret_overview(cases).rows == (
        ("b", "0.00", "0.00", "one", "100%"),
        ("a", "3.00", "5.00", "one", "0%"),
    )


def test_a_method_with_a_failed_seed_is_left_out_of_the_case() -> None:
    cases = {"one": case(a=(0.90, 2.0), b=(0.85, 1.0)), "two": case(a=(0.70, 4.0), b=(0.60, 3.0))}
    a, b = cases["two"].results
    # The mean of b's remaining seed, 0.95, would be over other data than a's.
    failed = Result(
        b.method, "b", (Run(0, "b", {**b.runs[0].summary, "accuracy": 0.95}),), {1: "!"}
    )
    assert not failed.is_complete
    cases["two"] = Comparison(cases["two"].suite, (a, failed))
    assert regrets(cases) == {
        "a": pytest.approx({"one": 0.0, "two": 0.0}),
        "b": pytest.approx({"one": 5.0}),
    }
    assert slowness(cases)["b"] == {"one": 1.0, "two": float("inf")}
    text = regret_table(cases)
    assert text is not None
    assert text.rows[:3] == (
        ("one", "**0.00**", "**5.00**"),
        ("two", "**0.00**", "-"),
        ("mean", "0.00", "5.00 (1 of 2)"),
    )
    assert text.lines[-1] == "-: not run, or a run failed or diverged."


def test_methods_of_fewer_cases_come_last() -> None:
    cases = {"one": case(a=(0.90, 2.0), b=(0.85, 1.0)), "two": case(b=(0.60, 3.0), c=(0.7, 1.0))}
    text = regret_table(cases)
    assert text is not None
    assert text.columns == ("case", "b", "a", "c")


def test_there_is_no_regret_of_errors() -> None:
    one = case(a=(0.9, 1.0))
    (result,) = one.results
    error = {"measure": "mae", "mae": 3.0, "unit": "°C"}
    of_errors = Result(result.method, "a", (Run(0, "a", {**result.runs[0].summary, **error}),))
    assert regret_table({"one": Comparison(one.suite, (of_errors,))}) is None


def test_a_case_that_nobody_finishes_counts_for_nobody() -> None:
    assert slowness({"one": case(a=(0.5, None))}) == {}


def test_a_target_reached_at_once_is_the_fastest_time() -> None:
    cases = {"one": case(a=(0.9, 0.0), b=(0.9, 2.0), c=(0.9, None), d=(0.9, 0.0))}
    found = slowness(cases)
    assert [found[label]["one"] for label in "abcd"] == [1.0, float("inf"), float("inf"), 1.0]
    quick, slow, never, too = cases["one"].results
    ratios = [cases["one"].ratio(result) for result in (quick, slow, never, too)]
    assert ratios == [1.0, None, None, 1.0]


def test_every_case_of_the_suite_can_be_read() -> None:
    for name, path in shipped("panicle").items():
        suite = load_suite(path)
        assert "panicle" in {method.label for method in suite.methods}, name
        assert suite.async_updates, name
