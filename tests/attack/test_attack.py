"""A minute of attacks, always the same; ``python -m tests.attack`` plays more."""

from __future__ import annotations

import pytest

from .__main__ import next_category
from .case import Case, Count
from .categories import CATEGORIES

pytestmark = pytest.mark.pictures

_SEED = 0


def _cases(*names: str) -> list[Case]:
    categories = [CATEGORIES[name] for name in names]
    return [
        Case(category, subject, _SEED) for category in categories for subject in category.subjects
    ]


@pytest.mark.parametrize("case", _cases("replies", "files", "config"), ids=lambda case: case.name)
def test_an_attack_breaks_nothing(case: Case) -> None:
    finding = case.play()
    assert not finding, f"python -m tests.attack --case {case.name}\n{finding}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", _cases("pages", "nested", "signals", "ports", "calls"), ids=lambda case: case.name
)
def test_a_long_attack_breaks_nothing(case: Case) -> None:
    finding = case.play()
    assert not finding, f"python -m tests.attack --case {case.name}\n{finding}"


def test_a_case_is_played_again_alike() -> None:
    seen: list[float] = []
    category = CATEGORIES["replies"]
    for _ in range(2):
        made = type(category)("any", ("x",), lambda subject, rng, folder: seen.append(rng.random()))
        assert Case(made, "x", 7).play() == ""
    assert seen[0] == seen[1]


def test_what_an_attack_breaks_is_found() -> None:
    def breaks(subject: str, rng: object, folder: object) -> None:
        raise ZeroDivisionError(subject)

    made = type(CATEGORIES["replies"])("any", ("x",), breaks)
    assert "ZeroDivisionError: x" in Case(made, "x", 0).play()


def test_every_category_has_its_share_of_the_time_whatever_its_cases_take() -> None:
    """A case of `signals` takes ten times as long as the others."""
    counts = {name: Count() for name in CATEGORIES}
    first = []
    for _ in range(1000):
        name = next_category(counts)
        first.append(name)
        counts[name].cases += 1
        counts[name].seconds += 10.0 if name == "signals" else 1.0
    assert set(first[: len(CATEGORIES)]) == set(CATEGORIES)
    shares = {name: count.seconds / CATEGORIES[name].share for name, count in counts.items()}
    assert max(shares.values()) - min(shares.values()) <= 10.0
