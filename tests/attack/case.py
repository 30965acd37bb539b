"""A case, and how it is played."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from raceme.core.errors import UserError

Attack = Callable[[str, random.Random, Path], None]
"""Plays a case of a subject with a generator, in an empty folder; raises an error for a finding."""

_LONGEST = 2500
"""Maximum number of characters of a finding."""


@dataclass(frozen=True)
class Category:
    """Cases of one kind.

    Attributes
    ----------
    name : str
        Name of the category.
    subjects : Sequence[str]
        Subjects of the attacks, in turn.
    attack : Attack
        Plays a case.
    share : float
        Share of the time, relative to the other categories.
    """

    name: str
    subjects: Sequence[str]
    attack: Attack
    share: float = 1.0


@dataclass(frozen=True)
class Case:
    """One attack."""

    category: Category
    subject: str
    seed: int

    @property
    def name(self) -> str:
        """Argument of ``--case`` that repeats this case."""
        return f"{self.category.name}/{self.subject}/{self.seed}"

    def play(self) -> str:
        """Play the case; return the finding, or an empty text."""
        with TemporaryDirectory(prefix="attack-") as folder:
            try:
                self.category.attack(self.subject, random.Random(self.name), Path(folder))
            # Any exception that is not expected is a finding.
            except (Exception, SystemExit):
                found = traceback.format_exc(limit=-4)
                return found if len(found) < _LONGEST else f"{found[:_LONGEST]} [...]"
        return ""


@contextmanager
def refused_in_a_line(*kinds: type[Exception]) -> Iterator[None]:
    """Expect a one-line refusal of the block's action: a `UserError`, or one of other kinds."""
    said = ""
    try:
        yield
    except (UserError, *kinds) as error:
        said = str(error).strip()
    assert "\n" not in said, f"more than one line: {said!r}"
    assert len(said) < 10_000, f"a line of {len(said)} letters"


@dataclass
class Count:
    """Numbers of the cases of a category."""

    cases: int = 0
    found: int = 0
    seconds: float = 0.0


def play(case: Case, count: Count) -> str:
    """Play a case and count it; return the finding, or an empty text."""
    started = perf_counter()
    finding = case.play()
    count.cases += 1
    count.found += bool(finding)
    count.seconds += perf_counter() - started
    return finding
