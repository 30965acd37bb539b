"""What evaluations tell of models, in words and by its direction."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raceme.core.events import ACCURACY, LOSS_MEASURE, Measure

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
def test_words(
    measure: Measure, name: str, label: str, word: str, title: str, shown: str, goal: str
) -> None:
    assert (measure.name, measure.label, measure.word) == (name, label, word)
    assert measure.title == title
    assert (measure.shown(0.512), measure.goal(0.512)) == (shown, goal)
    assert Measure.of({"measure": measure.name, "unit": measure.unit}) == measure


@pytest.mark.parametrize(
    ("measure", "better"), [(ACCURACY, 0.9), (ERROR, 0.1), (LOSS_MEASURE, 0.1)]
)
def test_which_of_two_is_the_better_one(measure: Measure, better: float) -> None:
    assert measure.better(0.1, 0.9) == better
    assert measure.reaches(better, 0.5)
    assert not measure.reaches(1.0 - better, 0.5)
    assert not measure.reaches(math.nan, 0.5)
    assert list(measure.shortfall(np.array([better, 1.0 - better]))) == pytest.approx([0.0, 0.8])
