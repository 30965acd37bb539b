"""Events reach the handler of their kind; evaluation metrics in words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raceme.core.events import (
    ACCURACY,
    LOSS_MEASURE,
    ClientJoined,
    ClientLeft,
    EventHandler,
    Measure,
    Observer,
    RunEnded,
    UpdateRejected,
)


class _Log(EventHandler):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_client_left(self, event: ClientLeft) -> str:
        self.lines.append(f"{event.client} left")
        return event.client

    def on_run_ended(self, event: RunEnded) -> None:
        self.lines.append(event.reason)


class _Louder(_Log):
    def on_client_joined(self, event: ClientJoined | UpdateRejected) -> None:
        self.lines.append(f"{event.client}!")

    on_update_rejected = on_client_joined


def test_each_kind_of_event_has_its_method_and_others_pass() -> None:
    log = _Log()
    assert log(ClientLeft(1.0, "a")) == "a"
    assert log(UpdateRejected(1.0, "a", "late", 0.0)) is None
    log(RunEnded(2.0, 5, "limit"))
    assert log.lines == ["a left", "limit"]


def test_a_subclass_adds_methods_and_two_kinds_share_one() -> None:
    log = _Louder()
    observe: Observer = log
    observe(UpdateRejected(1.0, "a", "late", 0.0))
    observe(ClientLeft(2.0, "b"))
    assert log.lines == ["a!", "b left"]


def test_a_misspelt_method_is_refused() -> None:
    with pytest.raises(TypeError, match=r"_Wrong handles .*'on_update_aplied'"):

        class _Wrong(EventHandler):
            def on_update_aplied(self, event: object) -> None: ...


ERROR = Measure("µg/m³")


@pytest.mark.parametrize(
    ("measure", "name", "label", "word", "title", "shown", "goal"),
    [
        (ACCURACY, "accuracy", "accuracy", "accuracy", "Accuracy", "0.512", "51.2%"),
        (ERROR, "mae", "MAE (µg/m³)", "MAE", "Mean absolute error", "0.51 µg/m³", "0.512 µg/m³"),
        (Measure(""), "mae", "MAE", "MAE", "Mean absolute error", "0.51", "0.512"),
        (LOSS_MEASURE, "loss", "loss", "loss", "Loss", "0.512", "0.512"),
    ],
)
def test_events_are_described_in_words(
    measure: Measure, name: str, label: str, word: str, title: str, shown: str, goal: str
) -> None:
    assert (measure.name, measure.label, measure.word) == (name, label, word)
    assert measure.title == title
    assert (measure.shown(0.512), measure.goal(0.512)) == (shown, goal)
    assert Measure.of({"measure": measure.name, "unit": measure.unit}) == measure


@pytest.mark.parametrize(
    ("measure", "better"), [(ACCURACY, 0.9), (ERROR, 0.1), (LOSS_MEASURE, 0.1)]
)
def test_the_better_of_two_values_depends_on_the_measure(measure: Measure, better: float) -> None:
    assert measure.better(0.1, 0.9) == better
    assert measure.reaches(better, 0.5)
    assert not measure.reaches(1.0 - better, 0.5)
    assert not measure.reaches(math.nan, 0.5)
    assert list(measure.shortfall(np.array([better, 1.0 - better]))) == pytest.approx([0.0, 0.8])
