"""The summary and store of a run with attackers or a protection."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.evaluation import BACKDOOR_BY_CLUSTER
from raceme.core.events import (
    Evaluated,
    Measured,
    UpdateApplied,
    UpdateJudged,
    UpdateRejected,
    Verdict,
)
from raceme.experiments.results import Comparison, Result, Run
from raceme.experiments.suites import ComparedMethod, Score, Suite, load_suite
from raceme.experiments.tables import main_table, to_csv
from raceme.features.protection import Options
from raceme.features.protection.guards import (
    FilterOptions,
    FilterProtection,
    Guard,
    NormProtection,
    protection,
)
from raceme.records.store import read_events
from raceme.records.summary import VerdictSummary
from raceme.reporting.console import summary_rows
from raceme.reporting.run_page import run_page
from raceme.runs import experiment
from raceme.simulation.attacks import attackers_of


def applied(seq: int, client: str) -> UpdateApplied:
    return UpdateApplied(seq, 1.0, client, 0, 0, 0, 0.5, 0.0, 0.5, 8, 8)


def judged(client: str, verdict: Verdict) -> UpdateJudged:
    return UpdateJudged(1.0, client, verdict, 1.0, 2.0, "why")


def test_verdicts_are_counted_by_client() -> None:
    summary = VerdictSummary()
    for event in (
        *(applied(1, "a"), judged("a", Verdict.SCALED), applied(2, "a")),
        *(judged("b", Verdict.EXCLUDED), judged("b", Verdict.REFUSED)),
        *(judged("c", Verdict.EXCLUDED), judged("c", Verdict.READMITTED), applied(3, "c")),
    ):
        summary(event)
    assert summary.result() == {
        "verdicts": {
            "a": {"accepted": 1, "scaled": 1, "refused": 0},
            "b": {"accepted": 0, "scaled": 0, "refused": 2},
            "c": {"accepted": 1, "scaled": 0, "refused": 1},
        },
        "excluded_clients": ["b"],
    }


def test_the_honest_accuracy_is_that_of_all_but_the_attackers_at_the_end() -> None:
    first = Evaluated(0.0, 0, 0.5, 1.0, 1, {"a": (0, 0.0, 1.0), "b": (0, 0.1, 1.0)})
    last = Evaluated(9.0, 9, 0.5, 1.0, 1, {"a": (0, 0.4, 1.0), "b": (0, 0.9, 1.0)})
    summary = VerdictSummary(["a"])
    for event in (first, last):
        summary(event)
    assert summary.result() == {
        **{"attackers": ["a"], "honest_accuracy": 0.9, "worst_honest_accuracy": 0.9},
        "honest_time_to_target": None,
    }
    summary(replace(last, per_client={**last.per_client, "c": (0, 0.7, 1.0)}))
    assert summary.result()["worst_honest_accuracy"] == 0.7
    # A diverged model has an infinite error, which JSON cannot express.
    summary(Evaluated(9.0, 9, 0.5, 1.0, 1, {"b": (0, float("inf"), 1.0)}))
    assert summary.result()["honest_accuracy"] is None
    unattacked = VerdictSummary()
    unattacked(last)
    assert unattacked.result() == {}


def test_the_time_to_a_target_is_that_of_the_honest_clients() -> None:
    """Attackers' accuracies do not count: they are tested with the models of their clusters."""
    summary = VerdictSummary(["a"])
    for time, attacker, honest, asked in (
        *((1.0, 0.99, 0.5, 2), (2.0, 0.1, 0.96, 4)),
        *((3.0, 0.1, 0.95, 2), (4.0, 0.1, 0.97, 2)),
    ):
        scores = {"a": (0, attacker, 1.0), "b": (0, honest, 1.0)}
        summary(Evaluated(time, int(time), 0.5, 1.0, 1, scores, asked))
    found = summary.result(0.95)
    # At 2 s half of the clients have not answered yet.
    assert found["honest_time_to_target"] == {"target": 0.95, "virtual_time": 3.0, "updates": 3}
    own = {"time_to_target": None, "accuracy": 0.5}
    assert Run(0, "run", {**own, **found}, score=Score.HONEST).time == 3.0
    assert Run(0, "run", {**own, **found}).time is None
    clean = {"time_to_target": found["honest_time_to_target"]}
    assert Run(0, "run", clean, score=Score.HONEST).time == 3.0


def test_an_attacked_and_protected_run_says_all_of_it(tmp_path: Path) -> None:
    keys = {
        **{"strategy": "fedasync", "clients": 10, "groups": "1", "model": "mclr", "workers": 0},
        **{"max-updates": 80, "attack": "sign-flip", "protection": "filter", "seed": 1},
        "out": str(tmp_path / "run"),
    }
    outcome = experiment.simulate(RunConfig.from_mapping(keys))
    summary = json.loads((outcome.out / "summary.json").read_text())
    attackers = summary["attackers"]
    assert len(attackers) == 2
    assert summary["excluded_clients"] == attackers
    events = read_events(outcome.out)
    last = [event for event in events if isinstance(event, Evaluated)][-1]
    honest = [score[1] for name, score in last.per_client.items() if name not in attackers]
    assert summary["honest_accuracy"] == pytest.approx(fmean(honest))
    refused = sum(counts["refused"] for counts in summary["verdicts"].values())
    assert refused == sum(isinstance(event, UpdateRejected) for event in events) > 0
    assert any(isinstance(event, UpdateJudged) for event in events)
    rows = dict(summary_rows(summary))
    assert rows["honest clients"] == f"{summary['honest_accuracy']:.3f}, mean without 2 attackers"
    scaled = sum(counts["scaled"] for counts in summary["verdicts"].values())
    assert rows["verdicts"] == f"{scaled} updates scaled, {refused} refused, 2 clients excluded"
    one = dict(summary_rows({**summary, "excluded_clients": attackers[:1]}))
    assert one["verdicts"].endswith(" 1 client excluded")
    assert rows["verdicts"] in run_page(outcome.out, "")


def test_a_backdoored_run_says_how_often_it_succeeds(tmp_path: Path) -> None:
    keys = {
        **{"strategy": "fedasync", "clients": 6, "groups": "1", "model": "mclr", "workers": 0},
        **{"max-updates": 12, "attack": "backdoor", "seed": 1, "out": str(tmp_path / "run")},
    }
    outcome = experiment.simulate(RunConfig.from_mapping(keys))
    found = [event for event in read_events(outcome.out) if isinstance(event, Measured)]
    by_cluster = [event for event in found if event.schema.name == BACKDOOR_BY_CLUSTER.name]
    measured = [event for event in found if event not in by_cluster]
    assert [event.value for event in by_cluster] == [{0: event.value} for event in measured]
    tested = [event for event in read_events(outcome.out) if isinstance(event, Evaluated)]
    assert [event.updates for event in measured] == [event.updates for event in tested]
    success = json.loads((outcome.out / "summary.json").read_text())["backdoor_success"]
    assert success == measured[-1].value
    rows = dict(summary_rows(outcome.summary))
    assert rows["backdoor"].startswith(f"{success:.3f} of the honest clients'")
    assert "backdoor success" in run_page(outcome.out, "")


def test_a_comparison_with_backdoors_has_their_success() -> None:
    methods = ComparedMethod("clean", "casa"), ComparedMethod("backdoor", "casa")
    told = {"accuracy": 0.9, "purity": 1.0, "updates": 9, "virtual_time": 1.0, "target": None}
    clean = {**told, "time_to_target": None}
    runs = clean, {**clean, "honest_accuracy": 0.8, "backdoor_success": 0.625}
    results = [
        Result(method, method.label, (Run(0, method.label, own, score=Score.HONEST),))
        for method, own in zip(methods, runs, strict=True)
    ]
    found = Comparison(Suite("t", methods, score=Score.HONEST), tuple(results))
    table = main_table(found)
    assert table.columns[-1] == "backdoor %"
    assert [row[-1] for row in table.rows] == ["-", "62.5"]
    assert any(line.startswith("Backdoor: share of the honest") for line in table.lines)
    head, _, line = to_csv(found).splitlines()
    assert dict(zip(head.split(","), line.split(","), strict=True))["backdoor_success"] == "0.625"
    without = Comparison(Suite("t", methods[:1]), tuple(results[:1]))
    assert "backdoor %" not in main_table(without).columns
    assert not any(line.startswith("Backdoor") for line in main_table(without).lines)


def guard_of(keys: dict[str, object]) -> Guard:
    config = RunConfig.from_mapping(keys)
    return protection(config.read(Options), config)


def test_a_configuration_names_a_protection_and_its_options() -> None:
    assert not guard_of({}).is_on
    guard = guard_of({"protection": "filter", "protection-share": 0.5})
    assert type(guard) is FilterProtection
    assert guard.options == FilterOptions(protection_share=0.5)
    assert type(guard_of({"protection": "norm"})) is NormProtection
    with pytest.raises(
        UserError, match="protection-share is read by protection filter and trust; this run"
    ):
        RunConfig.from_mapping({"protection": "norm", "protection-share": 0.5})
    with pytest.raises(UserError, match=r"attackers is read by attack .* this run has attack none"):
        RunConfig.from_mapping({"attackers": 0.5})


THREE = ("casa", "fedasync", "fedbuff")
ATTACKS = ("none", "scale", "sign-flip", "label-flip", "noise")
PROTECTIONS = ("none", "filter")


def test_the_suite_has_every_attack_without_and_with_the_filter() -> None:
    suite = load_suite(Path("poisoning"))
    assert suite.score is Score.HONEST
    kinds = {
        (config.strategy, config.attack, config.value("protection"))
        for method in suite.methods
        for config in [suite.config(method, seed=0)]
    }
    assert len(kinds & {*product(THREE, ATTACKS, PROTECTIONS)}) == 3 * 5 * 2
    # Late sybils and backdoors, with seven methods.
    late = load_suite(Path("poisoning-late"))
    assert set(late.methods) < set(suite.methods)
    # One model under informed attackers, with and without protection, and its bounds.
    informed = ("edge-anti", "min-max", "replay", "backdoor")
    known = {*product(THREE[1:], informed, ("none", "trust"))}
    assert known <= kinds
    assert len(suite.methods) == 3 * 5 * 2 + len(known) + 2 * 2 + len(late.methods)
    assert len(late.methods) == 7 * 4 * 2
    for config in (late.config(method, seed=921) for method in late.methods):
        count = 0 if config.attack == "none" else 6
        assert len(attackers_of(experiment.resolve(config))) == count
