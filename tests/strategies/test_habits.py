"""What is a suddenly long update, and when the changes of some speak for all."""

import pytest

from raceme.strategies.panicle.strategy import DriftDetector, call_others


def test_the_length_of_updates_is_remembered_with_less_and_less_weight() -> None:
    detector = DriftDetector()
    detector.learn(2.0)
    assert detector.length == 2.0
    detector.learn(4.0)
    # 0.7 · 2 + 0.3 · 4
    assert detector.length == pytest.approx(2.6)


def test_an_update_is_sudden_beyond_its_clients_and_its_clusters_usual_ones() -> None:
    detector = DriftDetector(length=1.0, growth=2.0)
    assert not detector.is_sudden(2.0, typical=0.0)
    assert detector.is_sudden(2.01, typical=0.0)
    # One and a half times what the others send is not sudden, however short the client's own were.
    assert not detector.is_sudden(3.0, typical=2.0)
    assert detector.is_sudden(3.01, typical=2.0)


def test_a_first_update_is_never_sudden() -> None:
    assert not DriftDetector(growth=2.0).is_sudden(100.0, typical=1.0)


def fleet(clients: int) -> dict[str, DriftDetector]:
    return {f"c{i}": DriftDetector(probed=10) for i in range(clients)}


def called(detectors: dict[str, DriftDetector]) -> int:
    return sum(detector.called for detector in detectors.values())


def test_an_eighth_of_the_clients_speaks_for_all() -> None:
    detectors = fleet(20)
    call_others(detectors, {"c0": 100, "c1": 101}, now=101, clients=20)
    assert called(detectors) == 0
    call_others(detectors, {"c0": 100, "c1": 101, "c2": 102}, now=102, clients=20)
    assert called(detectors) == 20


def test_of_few_clients_two_speak_for_all() -> None:
    detectors = fleet(4)
    call_others(detectors, {"c0": 100}, now=100, clients=4)
    assert called(detectors) == 0
    call_others(detectors, {"c0": 100, "c1": 101}, now=101, clients=4)
    assert called(detectors) == 4


def test_who_was_probed_since_the_first_change_is_left_alone() -> None:
    detectors = fleet(4)
    detectors["c0"].probed, detectors["c1"].probed = 100, 101
    call_others(detectors, {"c0": 100, "c1": 101}, now=101, clients=4)
    assert [detector.called for detector in detectors.values()] == [False, False, True, True]


def test_all_are_called_once_for_each_event() -> None:
    detectors = fleet(4)
    changes = {"c0": 100, "c1": 101, "c2": 102}
    call_others(detectors, changes, now=102, clients=4)
    assert called(detectors) == 0


def test_changes_that_are_long_past_do_not_count() -> None:
    detectors, changes = fleet(4), {"c0": 100, "c1": 109}
    call_others(detectors, changes, now=109, clients=4)
    assert changes == {"c1": 109}
    assert called(detectors) == 0
    changes = {"c0": 101, "c1": 109}
    call_others(detectors, changes, now=109, clients=4)
    assert called(detectors) == 4
