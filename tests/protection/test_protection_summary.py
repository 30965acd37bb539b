"""What a run with attackers or a protection leaves in its summary and its store."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from raceme import experiment
from raceme.comparison.suite_file import load_suite
from raceme.comparison.suites import Score
from raceme.config import RunConfig
from raceme.config.errors import UserError
from raceme.protection import protection_of
from raceme.protection.guard import FilterOptions, FilterProtection, NoProtection, NormProtection
from raceme.protocol.events import Evaluated, UpdateApplied, UpdateRejected
from raceme.protocol.verdicts import UpdateJudged, Verdict
from raceme.records.protection import ProtectionSummary
from raceme.records.store import read_events


def applied(seq: int, client: str) -> UpdateApplied:
    return UpdateApplied(seq, 1.0, client, 0, 0, 0, 0.5, 0.0, 0.5, 8, 8)


def judged(client: str, verdict: Verdict) -> UpdateJudged:
    return UpdateJudged(1.0, client, verdict, 1.0, 2.0, "why")


def test_verdicts_are_counted_by_client() -> None:
    summary = ProtectionSummary()
    for event in (
        *(applied(1, "a"), judged("a", Verdict.SCALED), applied(2, "a")),
        *(judged("b", Verdict.EXCLUDED), judged("b", Verdict.REFUSED)),
        *(judged("c", Verdict.EXCLUDED), judged("c", Verdict.READMITTED), applied(3, "c")),
    ):
        summary.observe(event)
    assert summary.result() == {
        "protection": {
            "a": {"accepted": 1, "scaled": 1, "refused": 0},
            "b": {"accepted": 0, "scaled": 0, "refused": 2},
            "c": {"accepted": 1, "scaled": 0, "refused": 1},
        },
        "excluded_clients": ["b"],
    }


def test_the_honest_accuracy_is_that_of_all_but_the_attackers_at_the_end() -> None:
    first = Evaluated(0.0, 0, 0.5, 1.0, 1, {"a": (0, 0.0, 1.0), "b": (0, 0.1, 1.0)})
    last = Evaluated(9.0, 9, 0.5, 1.0, 1, {"a": (0, 0.4, 1.0), "b": (0, 0.9, 1.0)})
    summary = ProtectionSummary(["a"])
    for event in (first, last):
        summary.observe(event)
    assert summary.result() == {"attackers": ["a"], "honest_accuracy": 0.9}
    nobody = ProtectionSummary()
    nobody.observe(last)
    assert nobody.result() == {}


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
    refused = sum(counts["refused"] for counts in summary["protection"].values())
    assert refused == sum(isinstance(event, UpdateRejected) for event in events) > 0
    assert any(isinstance(event, UpdateJudged) for event in events)


def test_a_configuration_names_a_protection_and_its_options() -> None:
    assert type(protection_of(RunConfig())) is NoProtection
    config = RunConfig.from_mapping({"protection": "filter", "protection-share": 0.5})
    guard = protection_of(config)
    assert type(guard) is FilterProtection
    assert guard.options == FilterOptions(protection_share=0.5)
    assert type(protection_of(RunConfig(protection="norm"))) is NormProtection
    with pytest.raises(UserError, match="protection-share is read by protection filter; this run"):
        RunConfig.from_mapping({"protection": "norm", "protection-share": 0.5})
    with pytest.raises(UserError, match=r"attackers is read by attack .* this run has attack none"):
        RunConfig.from_mapping({"attackers": 0.5})


def test_the_suite_has_every_attack_without_and_with_the_filter() -> None:
    suite = load_suite(Path("poisoning"))
    assert suite.score is Score.HONEST
    kinds = {
        (config.strategy, config.attack, config.protection)
        for method in suite.methods
        for config in [suite.config(method, seed=0)]
    }
    assert len(kinds) == len(suite.methods) == 3 * 5 * 2
